"""Profile prefill and decode on every rank: matmul, attention, communication, other kernels and idle time."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from dataclasses import asdict
from pathlib import Path

from yalis.cli.bench import check_folder
from yalis.cli.flags import add_common_flags, add_engine_flags, engine_config, parse_int
from yalis.cli.terminal import print_status
from yalis.engine.interrupts import if_stopped, interrupts_held
from yalis.progress_line import ProgressLine
from yalis.workloads import NAMED, parse_workload

_NUMBERS = {
    "steps": (32, "decode steps to profile, around the middle of the output"),
    "warmup": (1, "unmeasured runs at the start"),
    "repeats": (3, "measured runs"),
    "seed": (0, "seed of the prompts"),
    "names": (8, "kernels or operations to list for each phase, longest first"),
}


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--workload", metavar="NAME", default="8x64x64",
        help=f"{', '.join(NAMED)}, or batch x prompt x output such as 16x128x256 (default: 8x64x64)",
    )  # fmt: skip
    for name, (default, about) in _NUMBERS.items():
        parser.add_argument(
            f"--{name}", metavar="N", type=parse_int, default=default, help=f"{about} (default: {default})"
        )
    parser.add_argument("--out", type=Path, metavar="DIR", help="write the result as JSON to this folder")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="plot the categories as stacked bars, as FILE.png and FILE.svg"
    )
    add_engine_flags(parser)
    add_common_flags(parser, json="print the result as one JSON object")


def run(args: argparse.Namespace) -> int:
    from yalis.study import results

    with ProgressLine() as line, if_stopped("nothing was written"):
        from yalis.study import plots
        from yalis.study.profile import ProfilePlan, measure
        from yalis.study.results.kinds.profile import Profile

        if args.out is not None:
            check_folder(args.out)
        if args.plot is not None:
            plots.check_plot(args.plot, output_folder=args.out)
        plan = ProfilePlan(parse_workload(args.workload), args.steps, args.warmup, args.repeats, args.seed)
        result = measure(engine_config(args), plan, shlex.join(["yalis", *sys.argv[1:]]), line.show)
    with interrupts_held():
        if args.json:
            print(json.dumps(asdict(result)))
        else:
            print("\n".join(Profile().text(result, max_kernels=args.names)))
        if args.out is not None:
            print_status(f"wrote {results.write(result, args.out)}")
    if args.plot is not None:
        print_status(f"wrote {' and '.join(map(str, plots.write_plot(result, args.plot)))}")
    return 0
