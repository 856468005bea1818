"""Compare NVIDIA's aiconfigurator with vLLM's measured times; writes a result of kind "accuracy".

usage: python benchmarks/compare_aiconfigurator.py AICONFIGURATOR OUT.json
AICONFIGURATOR is its command, installed in an environment of its own (pip install aiconfigurator). Times of vLLM 0.24.0
on one H200 are read from benchmarks/results/h200/latency-llama-3.1-8b.json and -job.json; aiconfigurator 0.12.0 has a
database of the same version, GPU and dtype.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

from yalis.study import planner_accuracy, results
from yalis.study.results import StoredResult

FOLDER = Path("benchmarks/results/h200")
SOURCES = ("latency-llama-3.1-8b", "latency-llama-3.1-8b-job")
MODEL, SYSTEM, VLLM = "meta-llama/Meta-Llama-3.1-8B", "h200_sxm", "0.24.0"


def estimate(program: str, batch: int, prompt_len: int, output_len: int) -> dict[str, float]:
    """Return seconds to the first token and of a decode step, of a batch that is prefilled and decoded at once."""
    command = [
        program, "cli", "estimate", "--estimate-mode", "static", "--model-path", MODEL, "--system", SYSTEM,
        "--backend", "vllm", "--perf-db-version", VLLM, "--tp-size", "1", "--no-color",
        "--isl", str(prompt_len), "--osl", str(output_len), "--batch-size", str(batch),
    ]  # fmt: skip
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    names = {"first token": "TTFT", "decode step": "TPOT"}
    return {phase: float(re.findall(rf"{name}:\s+([\d.]+) ms", text)[0]) / 1e3 for phase, name in names.items()}


def main(program: str, out: str) -> None:
    stored = [StoredResult(FOLDER / f"{name}.json", results.read(FOLDER / f"{name}.json")) for name in SOURCES]
    points = [one for one in planner_accuracy.read_points(stored, "vllm") if not one.excluded]
    cases = {one.case: estimate(program, *asdict(one.case).values()) for one in points}
    rows = [planner_accuracy.make_row(one, cases[one.case][one.phase], "vllm", False) for one in points]
    version = subprocess.run(
        [str(Path(program).parent / "pip"), "show", "aiconfigurator"], capture_output=True, text=True, check=True
    )
    predictor = f"aiconfigurator {re.findall(r'Version: (.*)', version.stdout)[0]}"
    parameters = {
        "predictor": predictor,
        "machine": "h200",
        "model": MODEL,
        "system": SYSTEM,
        "database": f"vllm {VLLM}",
    }
    command = f"python benchmarks/compare_aiconfigurator.py {Path(program).name} {Path(out).name}"
    result = results.new("accuracy", parameters, rows, command, stored[0].result.devices)
    results.check(asdict(result), out)
    Path(out).write_text(json.dumps(asdict(result), indent=1) + "\n")
    sys.stdout.write("\n".join(results.kind_of(result).text(result)) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
