"""Make one self-contained HTML page from benchmark results: plots, tables and the commands that made them."""

from __future__ import annotations

import argparse
from pathlib import Path

from yalis.cli.flags import add_common_flags
from yalis.cli.terminal import print_status
from yalis.engine.interrupts import if_stopped
from yalis.errors import count_of


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "results", nargs="+", type=Path, metavar="RESULT", help="result files, or folders with result files"
    )
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE", default=Path("report.html"),
        help="the page; its plots are written next to it, as PNG and SVG (default: report.html)",
    )  # fmt: skip
    parser.add_argument("--title", metavar="TEXT", default="A performance study", help="heading of the page")
    add_common_flags(parser, json="print the paths of the written files as one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    import json

    with if_stopped("nothing was written"):
        from yalis.study.report.build import find_results, write_report

        found = find_results(args.results, lambda reason: print_status(f"left out: {reason}"))
        page, plots = write_report(found, args.output, args.title)
    if args.json:
        print(json.dumps({"page": str(page), "plots": [str(path) for path in plots]}))
    print_status(
        f"wrote {page} of {count_of(len(found), 'result')}, and {count_of(len(plots), 'plot')} into {plots[0].parent}"
        if plots
        else f"wrote {page}"
    )
    return 0
