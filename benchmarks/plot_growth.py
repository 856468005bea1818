"""A decode step's time against the number of sequences and against their context, beside the floor.

python benchmarks/plot_growth.py FOLDER: the folder of gpu_bench.sh, after its steps batches and contexts; PNG and SVG.
"""

from __future__ import annotations

import sys
from itertools import groupby
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

from yalis.study import results


def main() -> None:
    folder = Path(sys.argv[1])
    figure, axes = pyplot.subplots(1, 2, figsize=(12, 4.5), layout="constrained")
    devices = set()
    for axis, step, by, word in (
        (axes[0], "batches", "batch", "sequences"), (axes[1], "contexts", "prompt_len", "tokens of context")
    ):  # fmt: skip
        files = sorted((folder / step).glob("latency-*.json"))
        if not files:
            sys.exit(f"{folder} has no results of step {step}; run benchmarks/gpu_bench.sh {folder} {step}")
        result = results.read(files[-1])
        devices.add(result.devices[0]["name"])
        draw(axis, [row for row in result.rows if row["engine"] == "yalis"], by)
        axis.set_xlabel(word)
    axes[0].set_ylabel("milliseconds of a decode step")
    shape = Path(result.parameters["engine"]["model"]).stem
    figure.suptitle(f"{shape}, {result.parameters['dtype']}, {', '.join(devices)}")
    for suffix in ("png", "svg"):
        figure.savefig(folder / f"growth.{suffix}", dpi=120)


def draw(axis: Any, rows: list[dict[str, Any]], by: str) -> None:
    """One line for each value of what is not drawn along, and its floor dashed."""
    other = "prompt_len" if by == "batch" else "batch"
    for value, group in groupby(sorted(rows, key=lambda row: (row[other], row[by])), key=lambda row: row[other]):
        line = list(group)
        along = [row[by] for row in line]
        label = f"{other.replace('_len', '')} {value}"
        (drawn,) = axis.plot(along, [row["decode_ms"] for row in line], marker="o", markersize=3, label=label)
        floors = [row["floor_ms"] for row in line]
        axis.plot(along, floors, "--", color=drawn.get_color(), linewidth=1, label=f"floor, {label}")
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_formatter("{x:g}")
    axis.set_ylim(bottom=0)
    axis.grid(alpha=0.3)
    axis.legend()


if __name__ == "__main__":
    main()
