"""Print the table of performance targets on one H200, from the results of gpu_bench.sh in a folder.

python benchmarks/gpu_table.py FOLDER
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from yalis.study import results

#: (workload, batch, prompt, column of the result, column of its floor, unit, required, goal); times in ms and s.
TARGETS: list[tuple[str, int, int, str, str, str, float, float]] = [
    ("decode step, batch 1, prompt 128", 1, 128, "decode_ms", "floor_ms", "ms", 3.95, 3.6),
    ("decode step, batch 16, prompt 128", 16, 128, "decode_ms", "floor_ms", "ms", 4.3, 3.75),
    ("decode step, batch 16, context 2480-2990", 16, 2480, "decode_ms", "floor_ms", "ms", 5.6, 5.0),
    ("decode step, batch 64, prompt 512", 64, 512, "decode_ms", "floor_ms", "ms", 5.9, 4.9),
    ("prefill, 16 x 2480 tokens", 16, 2480, "first_token_ms", "prefill_floor_ms", "ms", 880, 820),
]
JOB = (16, 2480, 2048)
#: The targets were set for this GPU.
DEVICE = "H200"


def main() -> None:
    folder = Path(sys.argv[1])
    table = read(folder, "table")
    rows = our_rows(table)
    job = [row for row in our_rows(read(folder, "job")) if (row["batch"], row["prompt_len"], row["output_len"]) == JOB]
    if table is not None:
        measured = table.parameters
        kernel = f" ({measured['read_by']})" if "read_by" in measured else ""
        rate, matmul = measured["read_bytes_per_s"] / 1e12, measured["matmul_flops_per_s"] / 1e12
        print_line(f"floors from measured rates: read {rate:.2f} TB/s{kernel}, matmul {matmul:.0f} TFLOP/s")
    print_line(f"{'workload':<44}{'floor':>9}{'ours':>10}{'of floor':>10}{'required':>9}{'goal':>9}")
    for workload, batch, prompt, column, floor, unit, required, goal in TARGETS:
        for row in rows:
            if (row["batch"], row["prompt_len"]) == (batch, prompt) and row[column] is not None:
                print_target(workload, row[floor], row[column], unit, required, goal)
    for row in job:
        seconds = row["batch"] * row["output_len"] / row["tokens_per_s"]
        print_target("whole job, 16 x (2480 + 2048)", None, seconds, "s", 13, 11.8)
    for caches, limit in (("warm", 15.0), ("cold", 60.0)):
        text = folder / f"startup-{caches}.txt"
        pattern = rf"{DEVICE}\b.* first token after ([\d.]+)"
        found = re.search(pattern, text.read_text()) if text.is_file() else None
        if found:
            print_target(f"start-up to first token, caches {caches}", None, float(found[1]), "s", limit, limit)


def read(folder: Path, step: str) -> results.Result | None:
    """Return the latest result of a step of gpu_bench.sh; None if there is none. Exits if it is of another GPU."""
    files = sorted((folder / step).glob("latency-*.json"))
    if not files:
        return None
    result = results.read(files[-1])
    if DEVICE not in result.devices[0]["name"]:
        sys.exit(f"{files[-1]} was measured on {result.devices[0]['name']}; the targets are for an {DEVICE}")
    return result


def our_rows(result: results.Result | None) -> list[dict[str, Any]]:
    return [] if result is None else [row for row in result.rows if row["engine"] == "yalis"]


def print_target(workload: str, floor: float | None, ours: float, unit: str, required: float, goal: float) -> None:
    share = "" if floor is None else f"{floor / ours:.0%}"
    best = "" if floor is None else f"{floor:.4g}"
    verdict = "goal met" if ours <= goal else "met" if ours <= required else "MISSED"
    print_line(f"{workload:<44}{best:>9}{ours:>10.4g}{share:>10}{required:>9g}{goal:>9g} {unit}  {verdict}")


def print_line(text: str) -> None:
    sys.stdout.write(f"{text}\n")


if __name__ == "__main__":
    main()
