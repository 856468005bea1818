"""`yalis bench compare`: what changed between two results of one benchmark."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from yalis.cli.flags import add_common_flags, parse_float
from yalis.cli.terminal import print_status
from yalis.errors import count_of

if TYPE_CHECKING:
    from yalis.study.compare import Change

ABOUT = "what changed between two results of the same benchmark and machine, beyond noise"


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("before", metavar="A.json", type=Path, help="result file of a benchmark")
    parser.add_argument("after", metavar="B.json", type=Path, help="later result file of the same benchmark")
    parser.add_argument(
        "--noise", type=parse_float, default=0.05, metavar="SHARE",
        help="relative difference that counts as noise for metrics without a spread (default: 0.05)",
    )  # fmt: skip
    parser.add_argument("--all", action="store_true", help="also show unchanged metrics")
    parser.add_argument(
        "--fail-if-slower", action="store_true", help="exit with status 1 if a metric got slower or failed"
    )
    add_common_flags(parser, json="print one JSON object per metric")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from yalis.study import results
    from yalis.study.compare import compare

    found = compare(results.read(args.before), results.read(args.after), args.noise)
    for warning in found.warnings:
        print_status(f"the results differ in {warning}")
    if args.json:
        for change in found.changes:
            values = asdict(change)
            print(json.dumps({"figure": values.pop("metric"), **values, "ratio": change.ratio}))
    else:
        shown = [change for change in found.changes if args.all or change.verdict != "the same"]
        for change in shown:
            print(_line(change))
        same = sum(change.verdict == "the same" for change in found.changes)
        print(f"the same within noise: {same} of {count_of(len(found.changes), 'metric')}")
    return 1 if args.fail_if_slower and found.slower else 0


def _line(change: Change) -> str:
    before, after = ("-" if one is None else f"{one:.4g}" for one in (change.before, change.after))
    ratio = "" if change.ratio is None else f" ({change.ratio:.3f}x)"
    doubt = "" if change.sure else ", not certain: no spread over enough repeats"
    return f"{change.verdict:>8}  {change.setting}: {change.metric} {before} -> {after} {change.unit}{ratio}{doubt}"
