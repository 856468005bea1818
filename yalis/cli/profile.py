"""Profile prefill and decode on every rank: matmul, attention, communication, other kernels and idle time."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from yalis.cli.bench import check_folder
from yalis.cli.flags import add_common_flags, add_engine_flags, engine_config, parse_int
from yalis.cli.terminal import ProgressLine, print_status
from yalis.engine.interrupts import if_stopped, interrupts_held
from yalis.study.workloads import NAMED, parse_workload

if TYPE_CHECKING:
    from yalis.results import Result

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
        "--plot", type=Path, metavar="FILE", help="plot the parts as stacked bars, as FILE.png and FILE.svg"
    )
    add_engine_flags(parser)
    add_common_flags(parser, json="print the result as one JSON object")


def run(args: argparse.Namespace) -> int:
    from yalis import results

    with ProgressLine() as line, if_stopped("nothing was written"):
        from yalis.study import plots
        from yalis.study.profile import ProfilePlan, measure

        if args.out is not None:
            check_folder(args.out)
        if args.plot is not None:
            plots.check_plot(args.plot, made=args.out)
        plan = ProfilePlan(parse_workload(args.workload), args.steps, args.warmup, args.repeats, args.seed)
        result = measure(engine_config(args), plan, shlex.join(["yalis", *sys.argv[1:]]), line.show)
    with interrupts_held():
        if args.json:
            print(json.dumps(asdict(result)))
        else:
            print_table(result, args.names)
        if args.out is not None:
            print_status(f"wrote {results.write(result, args.out)}")
    if args.plot is not None:
        print_status(f"drew {' and '.join(map(str, plots.draw_profile(result, args.plot)))}")
    return 0


def print_table(result: Result, names: int) -> None:
    from yalis.study.profile import PARTS

    facts = result.parameters
    told = (facts["engine"]["model"], facts["dtype"], result.devices[0]["name"], facts["split"], _work(facts))
    print(" · ".join(told))
    for phase in dict.fromkeys(row["phase"] for row in result.rows):
        rows = [row for row in result.rows if row["phase"] == phase]
        what = "all prompts" if phase == "prefill" else "a token for every sequence"
        print(f"\n{phase}, {what}, in ms; {rows[0]['steps']} steps watched")
        heads = ("all", *PARTS[:-1], "idle/host")
        print(f"{'rank':<10}" + "".join(f"{head:>15}" for head in heads))
        for row in rows:
            share = [f"{row[part + '_ms']:.2f} {row[part + '_ms'] / row['ms']:>4.0%}" for part in PARTS]
            print(f"{row['rank']:<10}{row['ms']:>15.2f}" + "".join(f"{cell:>15}" for cell in share))
        if len(rows) > 1:
            over = [one for one in facts["over_ranks"] if one["phase"] == phase]
            for label, key, form in (
                ("max", "max_ms", ".2f"),
                ("mean", "mean_ms", ".2f"),
                ("max/mean", "imbalance", ".2f"),
            ):
                print(f"{label:<10}" + "".join(f"{one[key]:>15{form}}" for one in over))
        for one in facts["names"][phase][0][:names]:
            print(f"  {one['share']:>5.1%} {one['category']:<14}{one['name'][:90]}")
    print()
    least, most = (pick(row["accounted"] for row in result.rows) for pick in (min, max))
    print(f"the parts add up to {least:.1%}..{most:.1%} of the wall time")
    if facts["watching_costs"] is not None:
        print(f"a watched decode step takes {1 + facts['watching_costs']:.2f}x an unwatched one")
    for note in result.notes:
        print(note)


def _work(facts: dict[str, Any]) -> str:
    work = facts["workload"]
    return f"{work['batch']}x{work['prompt_len']}x{work['output_len']}"
