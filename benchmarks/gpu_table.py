"""The table of targets on one H200, from the results that gpu_bench.sh left in a folder.

python benchmarks/gpu_table.py FOLDER
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from yalis.study import results

#: (work, batch, prompt, what of the row, its floor, unit, must reach, aim for); times in ms and s.
TARGETS: list[tuple[str, int, int, str, str, str, float, float]] = [
    ("decode step, batch 1, prompt 128", 1, 128, "decode_ms", "floor_ms", "ms", 3.95, 3.6),
    ("decode step, batch 16, prompt 128", 16, 128, "decode_ms", "floor_ms", "ms", 4.3, 3.75),
    ("decode step, batch 16, context 2480-2990", 16, 2480, "decode_ms", "floor_ms", "ms", 5.6, 5.0),
    ("decode step, batch 64, prompt 512", 64, 512, "decode_ms", "floor_ms", "ms", 5.9, 4.9),
    ("prefill, 16 x 2480 tokens", 16, 2480, "first_token_ms", "prefill_floor_ms", "ms", 880, 820),
]
JOB = (16, 2480, 2048)
#: What the targets were set for.
DEVICE = "H200"


def main() -> None:
    folder = Path(sys.argv[1])
    table = read(folder, "table")
    rows = our_rows(table)
    job = [row for row in our_rows(read(folder, "job")) if (row["batch"], row["prompt_len"], row["output_len"]) == JOB]
    if table is not None:
        facts = table.parameters
        by = f" ({facts['read_by']})" if "read_by" in facts else ""
        rate, matmul = facts["read_bytes_per_s"] / 1e12, facts["matmul_flops_per_s"] / 1e12
        tell(f"floors by what was measured: read {rate:.2f} TB/s{by}, matmul {matmul:.0f} TFLOP/s")
    tell(f"{'work':<44}{'floor':>9}{'ours':>10}{'of floor':>10}{'must':>9}{'aim':>9}")
    for work, batch, prompt, column, floor, unit, must, aim in TARGETS:
        for row in rows:
            if (row["batch"], row["prompt_len"]) == (batch, prompt) and row[column] is not None:
                told(work, row[floor], row[column], unit, must, aim)
    for row in job:
        told(
            "whole job, 16 x (2480 + 2048)", None, row["batch"] * row["output_len"] / row["tokens_per_s"], "s", 13, 11.8
        )
    for kind, limit in (("warm", 15.0), ("cold", 60.0)):
        text = folder / f"startup-{kind}.txt"
        pattern = rf"{DEVICE}\b.* first token after ([\d.]+)"
        found = re.search(pattern, text.read_text()) if text.is_file() else None
        if found:
            told(f"start-up to first token, caches {kind}", None, float(found[1]), "s", limit, limit)


def read(folder: Path, step: str) -> results.Result | None:
    """A step's latest result."""
    files = sorted((folder / step).glob("latency-*.json"))
    if not files:
        return None
    found = results.read(files[-1])
    if DEVICE not in found.devices[0]["name"]:
        sys.exit(f"{files[-1]} is of {found.devices[0]['name']}, and the targets are of an {DEVICE}")
    return found


def our_rows(found: results.Result | None) -> list[dict[str, Any]]:
    return [] if found is None else [row for row in found.rows if row["engine"] == "yalis"]


def told(work: str, floor: float | None, ours: float, unit: str, must: float, aim: float) -> None:
    share = "" if floor is None else f"{floor / ours:.0%}"
    best = "" if floor is None else f"{floor:.4g}"
    word = "aim met" if ours <= aim else "met" if ours <= must else "MISSED"
    tell(f"{work:<44}{best:>9}{ours:>10.4g}{share:>10}{must:>9g}{aim:>9g} {unit}  {word}")


def tell(text: str) -> None:
    sys.stdout.write(f"{text}\n")


if __name__ == "__main__":
    main()
