"""Compares the throughput of `yalis serve` with that of LLM.generate() on the same requests.

    python benchmarks/serve_against_offline.py FOLDER --model benchmarks/shapes/llama-3.1-8b.json --dtype bfloat16

Prompts are token ids, `--concurrency` requests run at a time in both, and prefix reuse is off. A model that is only a
shape (.json) gets random weights and a made-up tokenizer of its vocabulary, so that the server has text to decode and
send. Writes FOLDER/serve.json and FOLDER/serve-against-offline.json, and fails below `--least`.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from yalis import LLM, SamplingParams
from yalis.study import bandwidth, results
from yalis.study.serve.benchmark import ServePlan, make_prompts, measure
from yalis.study.serve.http import Target
from yalis.workloads import Workload, parse_workload


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--workload", type=parse_workload, default=Workload(192, 256, 256))
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--points", type=int, default=3, help="measured runs of each")
    parser.add_argument("--start-seconds", type=float, default=90.0, help="longest start of the server")
    parser.add_argument("--least", type=float, default=0.95, help="the lowest ratio that passes")
    given = parser.parse_args(arguments)
    given.folder.mkdir(parents=True, exist_ok=True)
    options: dict[str, Any] = {"dtype": given.dtype, "max_num_seqs": given.concurrency, "prefix_reuse": False}
    options |= {"generation_config": "none"} | ({} if given.threads is None else {"threads": given.threads})
    if given.model.endswith(".json"):
        options |= {"load": "random", "tokenizer": str(make_tokenizer(given.folder / "tokenizer", Path(given.model)))}
    plan = ServePlan(
        concurrency=(given.concurrency,) * given.points, workloads=(given.workload,), warmup=given.concurrency
    )
    offline, device = run_offline(given.model, options, plan)
    result = run_server(given.model, options, plan, given.folder, given.start_seconds)
    results.write(result, given.folder, "serve")
    if any(row["errors"] for row in result.rows):
        show("\n".join(results.kind_of(result).text(result)))
        return 1
    served = [row["tokens_per_s"] for row in result.rows]
    ratio = median(served) / median(offline)
    summary = {
        "model": given.model,
        "workload": str(given.workload),
        "concurrency": given.concurrency,
        "device": device,
        "versions": result.versions,
        "offline_tokens_per_s": [round(value, 1) for value in offline],
        "served_tokens_per_s": [round(value, 1) for value in served],
        "ratio_of_medians": round(ratio, 4),
    }
    (given.folder / "serve-against-offline.json").write_text(json.dumps(summary, indent=1) + "\n")
    show("\n".join(results.kind_of(result).text(result)))
    show(f"offline tokens/s: {', '.join(f'{value:,.1f}' for value in offline)}")
    show(f"served tokens/s:  {', '.join(f'{value:,.1f}' for value in served)}")
    show(f"ratio of the medians: {ratio:.3f}")
    return 0 if ratio >= given.least else 1


def show(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def make_tokenizer(folder: Path, shape: Path) -> Path:
    """Write a byte-level tokenizer with as many tokens as the model's vocabulary: all bytes, and made-up words."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    size = json.loads(shape.read_text())["vocab_size"]
    tokens = sorted(pre_tokenizers.ByteLevel.alphabet())[:size]
    tokens += [f"\u0120{number:x}" for number in range(size - len(tokens))]  # a space and a word
    backend = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(folder)
    return folder


def run_offline(model: str, options: dict[str, Any], plan: ServePlan) -> tuple[list[float], str]:
    """Return the output tokens per second of each run of LLM.generate(), and the name of the device."""
    sizes = plan.sizes()
    sampling = [SamplingParams(max_tokens=size.output_len, ignore_eos=True) for size in sizes]
    speeds = []
    with LLM(model, **options) as llm:
        for point in range(-1, len(plan.concurrency)):
            prompts = make_prompts(sizes, plan.seed, point, llm.spec.vocab_size)
            count = plan.warmup if point < 0 else len(prompts)
            begin = time.perf_counter()
            outputs = llm.generate(prompts[:count], sampling[:count], progress=False)
            seconds = time.perf_counter() - begin
            if point >= 0:
                speeds.append(sum(len(output.token_ids) for output in outputs) / seconds)
                show(f"offline: {speeds[-1]:,.1f} tokens/s")
        return speeds, str(bandwidth.describe_device(llm.device)["name"])


def run_server(
    model: str, options: dict[str, Any], plan: ServePlan, folder: Path, start_seconds: float
) -> results.Result:
    """Start the server, run the client, and end the server."""
    announced = folder.absolute() / "run" / "url"
    command = [sys.executable, "-m", "yalis", "serve", "--model", model, "--port", "0", "--announce", str(announced)]
    for name, value in options.items():
        flag = name.replace("_", "-")
        command += [f"--no-{flag}"] if value is False else [f"--{flag}", str(value)]
    begin = time.monotonic()
    with (folder / "server.txt").open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as server:
        try:
            while not announced.exists():
                if server.poll() is not None or time.monotonic() > begin + start_seconds:
                    sys.exit(f"the server did not start:\n{(folder / 'server.txt').read_text()[-3000:]}")
                time.sleep(0.1)
            show(f"the server started in {time.monotonic() - begin:.1f} s")
            return measure(Target.parse(announced.read_text()), None, plan, shlex.join(["python", *sys.argv]))
        finally:
            server.terminate()
            try:
                server.wait(20)
            except subprocess.TimeoutExpired:
                server.kill()


if __name__ == "__main__":
    sys.exit(main())
