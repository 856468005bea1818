"""`yalis bench allreduce`: its flags, and how its result is told."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from yalis.cli.flags import add_common_flags, parse_float, parse_int
from yalis.cli.terminal import print_status
from yalis.errors import YalisError
from yalis.launch.launchers import EXTERNAL_LAUNCHERS, detect_launcher

if TYPE_CHECKING:
    from yalis.study.allreduce.in_lab import LabPlan
    from yalis.study.results import Result

ABOUT = "how long backends take to sum messages of several sizes over all ranks, every sum checked"
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20}


def add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--ranks", type=parse_int, metavar="N", help=f"ranks to start on this machine (without {EXTERNAL_LAUNCHERS})")
    add(
        "--sizes",
        type=_sizes,
        metavar="8K,1M",
        help="bytes of each message (default: 8K to 64M, doubling; with --tune to 4M)",
    )
    add("--dtypes", type=_names, metavar="NAMES", help="float32, bfloat16, float16 (default: float32)")
    add(
        "--backends", type=_names, metavar="NAMES",
        help="those of `yalis doctor`; gloo, plain at every size; ring, oneshot and nvshmem on nvrar's memory "
        "(default: all that can be used)",
    )  # fmt: skip
    add("--baseline", metavar="NAME", help="backend that speed-ups are over (default: gloo on a CPU, else torch)")
    add("--warmup", type=parse_int, metavar="N", help="operations before any that counts (default: 5)")
    add(
        "--repeats",
        type=parse_int,
        metavar="N",
        help="operations that count (default: 30, down to 9 where above 4M)",
    )
    add("--seed", type=parse_int, metavar="N", help="seed of the inputs (default: 0)")
    add("--tune", action="store_true", help="try the options of each backend, and keep the times for --allreduce auto")
    add("--device", metavar="NAME", help="auto, cpu or cuda (default: auto)")
    add("--ranks-per-node", type=parse_int, metavar="N", help="let so many neighbouring ranks stand for a node")
    add("--ranks-per-gpu", type=parse_int, metavar="N", help="on GPUs: ranks that may share one (default: 1)")
    add("--join-timeout", type=parse_float, metavar="SECONDS", help="for ranks that have not come (default: 300)")
    add("--plot", type=Path, metavar="FILE", help="draw latency and speed-up against size, as FILE.png and FILE.svg")
    add("--out", type=Path, metavar="DIR", help="write the result as JSON into this folder")
    add_common_flags(parser, json="print the result as one object")
    lab = parser.add_argument_group(
        "lab", "hosts on this machine, as network namespaces with links between them (root)"
    )
    lab.add_argument("--hosts", type=parse_int, metavar="N", help="run on so many hosts of a lab")
    lab.add_argument("--ranks-per-host", type=parse_int, metavar="N", help="ranks on each (default: 2)")
    lab.add_argument(
        "--delay", metavar="1ms", help="of a link, one way; several, as 0,0.2ms,1ms, in turn (default: 1ms)"
    )
    lab.add_argument("--rate", metavar="10gbit", help="of a host's link (default: no limit)")


def measure(args: argparse.Namespace, command: str, report: Callable[[str], None]) -> Result | None:
    from yalis.study import plots
    from yalis.study.allreduce import benchmark
    from yalis.study.allreduce.in_lab import measure_in_lab

    if args.plot is not None:
        plots.check_plot(args.plot, output_folder=args.out)
    named = {one.name: getattr(args, one.name, None) for one in fields(benchmark.AllReducePlan)}
    plan = benchmark.AllReducePlan(**{name: value for name, value in named.items() if value is not None})
    if args.hosts is None:
        for flag in ("ranks_per_host", "delay", "rate"):
            if getattr(args, flag) is not None:
                raise YalisError(f"--{flag.replace('_', '-')} is for a lab of hosts; give --hosts as well")
        return benchmark.measure(plan, args.ranks, command, report)
    if args.ranks is not None or detect_launcher().size > 1:
        raise YalisError(f"--hosts starts its own ranks; run it without --ranks and without {EXTERNAL_LAUNCHERS}")
    return measure_in_lab(plan, _lab_plan(args), command, report)


def _lab_plan(args: argparse.Namespace) -> LabPlan:
    from yalis.study.allreduce.in_lab import LabPlan
    from yalis.study.lab.hosts import parse_delay, parse_rate

    given: dict[str, Any] = {"hosts": args.hosts}
    if args.ranks_per_host is not None:
        given["ranks_per_host"] = args.ranks_per_host
    if args.delay is not None:
        given["delays"] = tuple(dict.fromkeys(parse_delay(part) for part in args.delay.split(",")))
    if args.rate is not None:
        given["rate"] = parse_rate(args.rate)
    return LabPlan(**given)


def finish(args: argparse.Namespace, result: Result) -> None:
    """What is left once the result is told: the plot, the table for auto, and a failure if a sum was wrong."""
    from yalis.study.allreduce.benchmark import check_sums, save_table
    from yalis.study.plots import write_plot
    from yalis.study.results.kinds.allreduce import short_size

    if args.plot is not None:
        print_status(f"wrote {' and '.join(map(str, write_plot(result, args.plot)))}")
    check_sums(result.rows)
    if args.tune:
        path, best = save_table(result)
        for size, choice in best:
            print_status(f"{short_size(size)}: {choice}")
        print_status(f"wrote {path}, which --allreduce auto and hierarchical go by from now on")


def _sizes(text: str) -> tuple[int, ...]:
    found = [re.fullmatch(r"(\d+)([KM]?)", part.strip().upper()) for part in text.split(",")]
    if not all(found):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of sizes, such as 8K,64K,1M")
    return tuple(int(one[1]) * _UNITS[one[2]] for one in found if one)


def _names(text: str) -> tuple[str, ...]:
    return tuple(filter(None, (part.strip() for part in text.split(","))))
