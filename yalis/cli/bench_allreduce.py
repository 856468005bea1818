"""`yalis bench allreduce`: its flags, and how its result is told."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from yalis.cli.flags import add_common_flags, whole

if TYPE_CHECKING:
    from yalis.results import Result

ABOUT = "how long backends take to sum messages of several sizes over all ranks, every sum checked"
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20}


def add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--ranks", type=whole, metavar="N", help="ranks to start on this machine (without torchrun, srun or mpirun)")
    add("--sizes", type=_sizes, metavar="8K,1M", help="bytes of each message (default: 8K to 4M, doubling)")
    add("--dtypes", type=_names, metavar="NAMES", help="float32, bfloat16, float16 (default: float32)")
    add(
        "--backends", type=_names, metavar="NAMES",
        help="of `yalis doctor`, or gloo: its own all-reduce at every size (default: all that can be used)",
    )  # fmt: skip
    add("--baseline", metavar="NAME", help="backend that speed-ups are over (default: gloo on a CPU, else torch)")
    add("--warmup", type=whole, metavar="N", help="operations before any that counts (default: 5)")
    add("--repeats", type=whole, metavar="N", help="operations that count (default: 30)")
    add("--seed", type=whole, metavar="N", help="seed of the inputs (default: 0)")
    add(
        "--tune",
        action="store_true",
        default=argparse.SUPPRESS,
        help="try each backend's options, and keep the times for auto",
    )
    add("--device", metavar="NAME", help="auto, cpu or cuda (default: auto)")
    add("--ranks-per-node", type=whole, metavar="N", help="let so many neighbouring ranks stand for a node")
    add("--ranks-per-gpu", type=whole, metavar="N", help="on GPUs: ranks that may share one (default: 1)")
    add(
        "--join-timeout", type=float, metavar="SECONDS", help="wait so long for ranks that have not come (default: 300)"
    )
    add("--plot", type=Path, metavar="FILE", help="draw latency and speed-up against size, as FILE.png and FILE.svg")
    add("--out", type=Path, metavar="DIR", help="write the result as JSON into this folder")
    add_common_flags(parser, json="print the result as one object")


def measure(args: argparse.Namespace, command: str, report: Callable[[str], None]) -> Result | None:
    from dataclasses import fields

    from yalis.study.allreduce import AllReducePlan, measure

    named = {one.name: getattr(args, one.name, None) for one in fields(AllReducePlan)}
    plan = AllReducePlan(**{name: value for name, value in named.items() if value is not None})
    return measure(plan, args.ranks, command, report)


def print_table(result: Result) -> None:
    from yalis.study.allreduce import label

    facts = result.parameters
    print(f"{facts['ranks']} ranks, {facts['shape']} · {result.devices[0]['name']}")
    wide = max(len(label(row)) for row in result.rows) + 2
    print(
        f"{'backend':<{wide}}{'size':>8}{'dtype':>10}{'mode':>7}{'median':>11}{'10%..90%':>19}{'GB/s':>8}{'speed-up':>10}"
    )
    for row in result.rows:
        start = f"{label(row):<{wide}}{_size(row['bytes']):>8}{row['dtype']:>10}{row['mode']:>7}"
        if row["status"] != "ok":
            print(f"{start}  {row['status']}")
            continue
        span = f"{_time(row['low_us'])}..{_time(row['high_us'])}"
        speedup = f"{row['speedup']:.2f}x" if row["speedup"] is not None else ""
        print(f"{start}{_time(row['median_us']):>11}{span:>19}{row['bus_gb_per_s']:>8.3f}{speedup:>10}")


def finish(args: argparse.Namespace, result: Result) -> None:
    """What is left once the result is told: the plot, the table for auto, and a failure if a sum was wrong."""
    from yalis.study.allreduce import check_right

    check_right(result.rows)


def _size(size: int) -> str:
    """ "64K"."""
    for unit in ("M", "K"):
        if size % _UNITS[unit] == 0:
            return f"{size // _UNITS[unit]}{unit}"
    return str(size)


def _time(microseconds: float) -> str:
    return f"{microseconds:.1f} us" if microseconds < 1e3 else f"{microseconds / 1e3:.2f} ms"


def _sizes(text: str) -> tuple[int, ...]:
    found = [re.fullmatch(r"(\d+)([KM]?)", part.strip().upper()) for part in text.split(",")]
    if not all(found):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of sizes, such as 8K,64K,1M")
    return tuple(int(one[1]) * _UNITS[one[2]] for one in found if one)


def _names(text: str) -> tuple[str, ...]:
    return tuple(filter(None, (part.strip() for part in text.split(","))))
