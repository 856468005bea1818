"""`yalis bench allreduce`: its flags, and what follows the measurement."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from yalis.cli.flags import HELP, add_common_flags, parse_float, parse_int
from yalis.cli.terminal import print_status
from yalis.errors import YalisError
from yalis.launch.launchers import EXTERNAL_LAUNCHERS, detect_launcher

if TYPE_CHECKING:
    from yalis.study.allreduce.in_lab import LabPlan
    from yalis.study.results import Result

ABOUT = "time of an all-reduce by backend and message size, with every sum checked"
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20}


def add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--ranks", type=parse_int, metavar="N", help=f"ranks to start on this machine (without {EXTERNAL_LAUNCHERS})")
    add(
        "--sizes",
        type=_sizes,
        metavar="8K,1M",
        help="message sizes in bytes (default: powers of two from 8K to 64M; with --tune to 4M)",
    )
    add("--dtypes", type=_names, metavar="NAMES", help="float32, bfloat16, float16 (default: float32)")
    add(
        "--backends", type=_names, metavar="NAMES",
        help="those of `yalis doctor`; gloo without our small-message path; nccl-registered: NCCL with registered "
        "buffers; ring, oneshot and nvshmem on nvrar's symmetric memory (default: all usable ones)",
    )  # fmt: skip
    add(
        "--baseline", metavar="NAME", help="backend that speed-ups are relative to (default: gloo on a CPU, else torch)"
    )
    add("--warmup", type=parse_int, metavar="N", help="warm-up operations (default: 5)")
    add(
        "--repeats",
        type=parse_int,
        metavar="N",
        help="measured operations (default: 30, fewer above 4M, at least 9)",
    )
    add("--seed", type=parse_int, metavar="N", help="seed of the inputs (default: 0)")
    add(
        "--tune",
        action="store_true",
        help="measure the options of each backend, and save the times for --allreduce auto",
    )
    add("--device", metavar="NAME", help="auto, cpu or cuda (default: auto)")
    add("--ranks-per-node", type=parse_int, metavar="N", help="treat this many consecutive ranks as a node")
    add("--ranks-per-gpu", type=parse_int, metavar="N", help="ranks that may share a GPU (default: 1)")
    add("--join-timeout", type=parse_float, metavar="SECONDS", help="time limit for all ranks to join (default: 300)")
    add("--insecure-rendezvous", action="store_true", help=HELP["insecure_rendezvous"])
    add("--plot", type=Path, metavar="FILE", help="plot latency and speed-up against size, as FILE.png and FILE.svg")
    add("--out", type=Path, metavar="DIR", help="write the result as JSON to this folder")
    add_common_flags(parser, json="print the result as one JSON object")
    lab = parser.add_argument_group(
        "lab", "emulated hosts on this machine: network namespaces with links between them (needs root)"
    )
    lab.add_argument("--hosts", type=parse_int, metavar="N", help="number of emulated hosts")
    lab.add_argument("--ranks-per-host", type=parse_int, metavar="N", help="ranks on each host (default: 2)")
    lab.add_argument(
        "--delay", metavar="1ms", help="one-way delay of a link, or several such as 0,0.2ms,1ms (default: 1ms)"
    )
    lab.add_argument("--rate", metavar="10gbit", help="bandwidth of a host's link (default: no limit)")


def measure(args: argparse.Namespace, command: str, report: Callable[[str], None]) -> Result | None:
    from yalis.study import plots
    from yalis.study.allreduce import benchmark
    from yalis.study.allreduce.in_lab import measure_in_lab

    if args.plot is not None:
        plots.check_plot(args.plot, output_folder=args.out)
    values = {field.name: getattr(args, field.name, None) for field in fields(benchmark.AllReducePlan)}
    plan = benchmark.AllReducePlan(**{name: value for name, value in values.items() if value is not None})
    if args.hosts is None:
        for flag in ("ranks_per_host", "delay", "rate"):
            if getattr(args, flag) is not None:
                raise YalisError(f"--{flag.replace('_', '-')} needs --hosts; give it as well")
        return benchmark.measure(plan, args.ranks, command, report, args.insecure_rendezvous)
    if args.ranks is not None or detect_launcher().size > 1:
        raise YalisError(f"--hosts starts its own ranks; run it without --ranks and without {EXTERNAL_LAUNCHERS}")
    return measure_in_lab(plan, _lab_plan(args), command, report)


def _lab_plan(args: argparse.Namespace) -> LabPlan:
    from yalis.study.allreduce.in_lab import LabPlan
    from yalis.study.lab.hosts import parse_delay, parse_rate

    values: dict[str, Any] = {"hosts": args.hosts}
    if args.ranks_per_host is not None:
        values["ranks_per_host"] = args.ranks_per_host
    if args.delay is not None:
        values["delays"] = tuple(dict.fromkeys(parse_delay(part) for part in args.delay.split(",")))
    if args.rate is not None:
        values["rate"] = parse_rate(args.rate)
    return LabPlan(**values)


def finish(args: argparse.Namespace, result: Result) -> None:
    """Write the plot, fail if a sum was wrong, and save the tuning table, after the result was printed."""
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
        print_status(f"wrote {path}; --allreduce auto and hierarchical use it from now on")


def _sizes(text: str) -> tuple[int, ...]:
    found = [re.fullmatch(r"(\d+)([KM]?)", part.strip().upper()) for part in text.split(",")]
    if not all(found):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of sizes, such as 8K,64K,1M")
    return tuple(int(one[1]) * _UNITS[one[2]] for one in found if one)


def _names(text: str) -> tuple[str, ...]:
    return tuple(filter(None, (part.strip() for part in text.split(","))))
