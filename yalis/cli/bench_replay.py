"""`yalis bench replay`: recorded throughput runs on the planner's virtual clock."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from yalis.cli.flags import add_common_flags

if TYPE_CHECKING:
    from yalis.study.results import Result

ABOUT = "measured times and steps of `bench throughput` beside the same requests on the planner's virtual clock"


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("results", nargs="+", type=Path, metavar="RESULT", help="files of `yalis bench throughput`")
    parser.add_argument(
        "--machine", metavar="NAME", default="h200",
        help="machine that was measured: a name, or a file of `yalis calibrate` (default: h200)",
    )  # fmt: skip
    parser.add_argument(
        "--calibration", action="append", default=[], type=Path, metavar="FILE",
        help="result of `yalis bench latency` on the same CPU, to which its table is fitted; may be repeated",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, metavar="DIR", help="write the result as JSON to this folder")
    add_common_flags(parser, json="print the result as one JSON object")
    parser.set_defaults(uses_engine=False)


def measure(args: argparse.Namespace, command: str, report: Callable[[str], None]) -> Result:
    from yalis.planner.machine import load_machine
    from yalis.study import replay, results
    from yalis.study.results import StoredResult

    def read(paths: list[Path]) -> list[StoredResult]:
        return [StoredResult(path, results.read(path)) for path in paths]

    return replay.compare(read(args.results), load_machine(args.machine), command, read(args.calibration))
