"""`yalis bench compare`: two results of one benchmark, and what changed from the first to the second."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from yalis.cli.flags import add_common_flags, parse_float
from yalis.cli.terminal import print_status

if TYPE_CHECKING:
    from yalis.study.compare import Change

ABOUT = "what changed from one result to another of the same benchmark and machine, beyond noise"


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("before", metavar="A.json", type=Path, help="a result, as a benchmark wrote it")
    parser.add_argument("after", metavar="B.json", type=Path, help="a later one")
    parser.add_argument(
        "--noise", type=parse_float, default=0.05, metavar="SHARE",
        help="by which figures without a spread may differ and count as the same (default: 0.05)",
    )  # fmt: skip
    parser.add_argument("--all", action="store_true", help="also show what stayed the same")
    parser.add_argument("--fail-if-slower", action="store_true", help="exit with status 1 where something got slower")
    add_common_flags(parser, json="print an object for each figure")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from yalis.study import results
    from yalis.study.compare import compare

    found = compare(results.read(args.before), results.read(args.after), args.noise)
    for warning in found.warnings:
        print_status(f"they differ in {warning}")
    if args.json:
        for change in found.changes:
            values = asdict(change)
            print(json.dumps({"figure": values.pop("metric"), **values, "ratio": change.ratio}))
    else:
        shown = [change for change in found.changes if args.all or change.verdict != "the same"]
        for change in shown:
            print(_line(change))
        same = sum(change.verdict == "the same" for change in found.changes)
        print(f"{same} of {len(found.changes)} figures are the same within noise")
    return 1 if args.fail_if_slower and found.slower else 0


def _line(change: Change) -> str:
    before, after = ("-" if one is None else f"{one:.4g}" for one in (change.before, change.after))
    ratio = "" if change.ratio is None else f" ({change.ratio:.3f}x)"
    doubt = "" if change.sure else ", without a spread to tell it from noise"
    return f"{change.verdict:>8}  {change.setting}: {change.metric} {before} -> {after} {change.unit}{ratio}{doubt}"
