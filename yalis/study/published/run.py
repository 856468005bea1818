"""Runs the whole study and writes its results and figures."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from yalis.study import plots, results
from yalis.study.published import figures
from yalis.study.published.jobs import MACHINES, Predictor, machine_of
from yalis.study.published.statements import evaluate_statements
from yalis.study.results import Result, Row

#: Name of the figure and its files, title, unit of its values.
_FIGURES = (
    ("scaling", "strong scaling, 16 x 2480 + 2048 tokens, NCCL", "seconds"),
    ("breakdown", "where the time of a step goes, llama-3.1-70b, NCCL", "seconds"),
    ("all-reduce", "all-reduce by size and nodes", "microseconds"),
    ("speed-up", "NVRAR over NCCL by size; shaded: published", "speed-up over NCCL"),
    ("gain", "NVRAR instead of NCCL, tp, 16 x 128 + 2048 tokens", "speed-up"),
    ("sensitivity", "effect of each assumed or fitted quantity on Perlmutter", "prediction"),
)


def run_study(folder: Path, command: str, report: Callable[[str], None]) -> list[Path]:
    """Predict all figures and statements, and write JSON and PNG. Returns the paths."""
    predictor = Predictor()
    rows: dict[str, Callable[[], Iterable[Row]]] = {
        "scaling": lambda: figures.strong_scaling(predictor),
        "breakdown": lambda: figures.breakdowns(predictor),
        "all-reduce": figures.all_reduce_times,
        "speed-up": figures.speed_ups,
        "gain": lambda: figures.gains(predictor),
        "sensitivity": lambda: figures.sensitivity(predictor),
    }
    written: list[Path] = []
    machines = {name: machine_of(name).to_json() for name in (*MACHINES, figures.INFINIBAND)}
    for name, title, unit in _FIGURES:
        report(f"{name}: {title}")
        facts = {"figure": name, "title": title, "unit": unit, "machines": machines}
        result = results.new("scale", facts, list(rows[name]()), command, [])
        written += [results.write(result, folder, name), *_plot(result, folder / name)]
    report("published statements")
    result = results.new("statements", {"machines": machines}, list(evaluate_statements(predictor)), command, [])
    return [*written, results.write(result, folder, "statements")]


def _plot(result: Result, file: Path) -> list[Path]:
    """Write the plot as PNG only: the SVG of many lines is large."""
    png, svg = plots.write_plot(result, file)
    svg.unlink()
    return [png]
