"""`yalis bench replay`: recorded throughput runs on the planner's virtual clock."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from yalis.cli.bench_accuracy import add_comparison_flags

if TYPE_CHECKING:
    from yalis.study.results import Result

ABOUT = "measured times and steps of `bench throughput` beside the same requests on the planner's virtual clock"


def add_flags(parser: argparse.ArgumentParser) -> None:
    add_comparison_flags(parser, "files of `yalis bench throughput`")
    parser.add_argument(
        "--calibration", action="append", default=[], type=Path, metavar="FILE",
        help="result of `yalis bench latency` on the same CPU, to which its table is fitted; may be repeated",
    )  # fmt: skip


def measure(args: argparse.Namespace, command: str, report: Callable[[str], None]) -> Result:
    from yalis.planner.machine import load_machine
    from yalis.study import replay, results
    from yalis.study.results import StoredResult

    def read(paths: list[Path]) -> list[StoredResult]:
        return [StoredResult(path, results.read(path)) for path in paths]

    return replay.compare(read(args.results), load_machine(args.machine), command, read(args.calibration))
