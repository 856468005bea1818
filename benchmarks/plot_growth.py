"""Plot the time of a decode step against the batch size and against the context length, with the floor.

python benchmarks/plot_growth.py FOLDER: reads the results of gpu_bench.sh (steps batches and contexts) in FOLDER and
writes growth.png and growth.svg there.
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
    for axis, step, column, label in (
        (axes[0], "batches", "batch", "batch size"), (axes[1], "contexts", "prompt_len", "context length in tokens")
    ):  # fmt: skip
        files = sorted((folder / step).glob("latency-*.json"))
        if not files:
            sys.exit(f"{folder} has no results of step {step}; run benchmarks/gpu_bench.sh {folder} {step}")
        result = results.read(files[-1])
        devices.add(result.devices[0]["name"])
        draw(axis, [row for row in result.rows if row["engine"] == "yalis"], column)
        axis.set_xlabel(label)
    axes[0].set_ylabel("decode step in ms")
    shape = Path(result.parameters["engine"]["model"]).stem
    figure.suptitle(f"{shape}, {result.parameters['dtype']}, {', '.join(devices)}")
    for suffix in ("png", "svg"):
        figure.savefig(folder / f"growth.{suffix}", dpi=120)


def draw(axis: Any, rows: list[dict[str, Any]], column: str) -> None:
    """Draw the step time against `column`, one line per value of the other column, with its floor dashed."""
    other = "prompt_len" if column == "batch" else "batch"
    for value, group in groupby(sorted(rows, key=lambda row: (row[other], row[column])), key=lambda row: row[other]):
        line = list(group)
        xs = [row[column] for row in line]
        label = f"{other.replace('_len', '')} {value}"
        (curve,) = axis.plot(xs, [row["decode_ms"] for row in line], marker="o", markersize=3, label=label)
        floors = [row["floor_ms"] for row in line]
        axis.plot(xs, floors, "--", color=curve.get_color(), linewidth=1, label=f"floor, {label}")
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_formatter("{x:g}")
    axis.set_ylim(bottom=0)
    axis.grid(alpha=0.3)
    axis.legend()


if __name__ == "__main__":
    main()
