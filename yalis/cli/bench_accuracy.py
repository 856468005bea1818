"""`yalis bench accuracy`: measured latency and slice results beside the planner's predictions."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from yalis.cli.flags import add_common_flags

if TYPE_CHECKING:
    from yalis.study.results import Result

ABOUT = "measured times of `bench latency` and `bench slice` beside the times that the planner predicts"


def add_flags(parser: argparse.ArgumentParser) -> None:
    add_comparison_flags(parser, "result files, or folders of them")


def add_comparison_flags(parser: argparse.ArgumentParser, about: str) -> None:
    """Add the flags of a benchmark that compares measured results, described by `about`, with predictions."""
    parser.add_argument("results", nargs="+", type=Path, metavar="RESULT", help=about)
    parser.add_argument(
        "--machine", metavar="NAME", default="h200",
        help="machine that was measured: a name, or a file of `yalis calibrate` (default: h200)",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, metavar="DIR", help="write the result as JSON to this folder")
    add_common_flags(parser, json="print the result as one JSON object")
    parser.set_defaults(uses_engine=False)


def measure(args: argparse.Namespace, command: str, report: Callable[[str], None]) -> Result:
    from yalis.planner.machine import load_machine
    from yalis.study import planner_accuracy

    machine = load_machine(args.machine)
    return planner_accuracy.compare(planner_accuracy.read_files(args.results, machine), machine, command)
