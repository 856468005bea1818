"""`yalis bench throughput`: its flags, which `bench scaling` shares, and how its result is told."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from yalis.cli.flags import add_common_flags, add_engine_flags, engine_config, number, whole
from yalis.errors import YalisError
from yalis.study.workloads import NAMED, read_workload

if TYPE_CHECKING:
    from yalis.config import EngineConfig
    from yalis.results import Result
    from yalis.study.requests import ThroughputPlan

ABOUT = "tokens a second of a whole job, and how long requests wait for their first token and between tokens"


def add_flags(parser: argparse.ArgumentParser) -> None:
    add_work_flags(parser)
    parser.add_argument(
        "--peer", action="append", default=[], metavar="NAME", help="also measure: transformers or vllm"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="write the result as JSON into this folder")
    add_engine_flags(parser)
    add_common_flags(parser, json="print the result as one object")


def add_work_flags(parser: argparse.ArgumentParser) -> None:
    """What is run: the same for one setting and for many."""
    add = parser.add_argument
    add(
        "--workload", type=read_workload, action="append", metavar="NAME",
        help=f"{', '.join(NAMED)}, or batch x prompt x output (default: 16x64x64); several are mixed",
    )  # fmt: skip
    add("--dataset", metavar="FILE", help="a JSONL file as `yalis batch` takes it, instead of workloads")
    add("--requests", type=whole, metavar="N", help="so many: drawn from the workloads, or the dataset's first")
    add("--vary", type=number, metavar="SHARE", help="draw lengths from this share below to above the workload's")
    add("--rate", type=number, metavar="R", help="requests a second, as a Poisson process (default: all at once)")
    add("--warmup", type=whole, metavar="N", help="runs of the job before any that counts (default: 1)")
    add("--repeats", type=whole, metavar="N", help="runs that count (default: 3)")
    add("--seed", type=whole, metavar="N", help="seed of what is drawn (default: 0)")


def work_plan(args: argparse.Namespace) -> ThroughputPlan:
    from yalis.study.requests import ThroughputPlan

    if args.workload and args.dataset is not None:
        raise YalisError("both --workload and --dataset say what to run; give one of them")
    names = ("dataset", "requests", "vary", "rate", "warmup", "repeats", "seed")
    given: dict[str, Any] = {name: value for name in names if (value := getattr(args, name)) is not None}
    if args.workload:
        given["workloads"] = tuple(args.workload)
    elif args.dataset is not None:
        given["workloads"] = ()
    return ThroughputPlan(**given)


def work_config(args: argparse.Namespace) -> EngineConfig:
    """Prefix reuse only where it was asked for: every repeat of a dataset would find the prompts of the one before."""
    config = engine_config(args)
    return config if "prefix_reuse" in args else replace(config, prefix_reuse=False)


def measure(args: argparse.Namespace, command: str, report: Callable[[str], None]) -> Result:
    from yalis.study.throughput import measure

    plan = replace(work_plan(args), peer=tuple(args.peer))
    return measure(work_config(args), plan, command, report)


def print_table(result: Result) -> None:
    facts, device = result.parameters, result.devices[0]
    ranks = 1 if result.topology is None else result.topology["ranks"]
    told = [facts["engine"]["model"], facts["dtype"], device["name"]] + ([f"{ranks} ranks"] if ranks > 1 else [])
    print(" · ".join(told))
    first = result.rows[0]
    coming = "all at once" if first["rate"] is None else f"arriving at {first['rate']:g} a second"
    print(f"{first['requests']} requests {coming}, {first['prompt_tokens']} + {first['output_tokens']} tokens")
    heads = (("the job", 12), ("10%..90%", 18), ("tokens/s", 11), ("requests/s", 12), ("of floor", 10))
    print(f"{'engine':<20}" + "".join(f"{head:>{width}}" for head, width in heads))
    for row in result.rows:
        label = f"{row['engine']} {row['version']}".strip()
        if row["status"] != "ok":
            print(f"{label:<20}  {row['status']}")
            continue
        span = f"{row['seconds_low']:.3f}..{row['seconds_high']:.3f}"
        share = "" if row["share_of_floor"] is None else f"{row['share_of_floor']:.0%}"
        speeds = f"{row['tokens_per_s']:>11.1f}{row['requests_per_s']:>12.2f}"
        print(f"{label:<20}{row['seconds']:>10.3f} s{span:>18}{speeds}{share:>10}")
    wide = 20 if len(result.rows) == 1 else 28
    print(f"{'milliseconds to':<{wide}}{'median':>12}{'90%':>12}{'99%':>12}")
    for row in result.rows:
        for name, title in (("first_token_ms", "a first token"), ("token_ms", "a next token")):
            if row[name] is not None:
                label = title if len(result.rows) == 1 else f"{title}, {row['engine']}"
                values = (row[name], row[f"{name}_p90"], row[f"{name}_p99"])
                print(f"{label:<{wide}}" + "".join(f"{value:>12.1f}" for value in values))
    for row in result.rows:
        if row["engine"] != "yalis" and row["status"] == "ok":
            same = (
                "not compared" if row["same_tokens"] is None else f"the same in {row['same_tokens']:.0%} of the answers"
            )
            print(f"the job takes {row['engine']} {row['ratio']:.2f}x as long as ours; tokens {same}")
        if row["preemptions"]:
            print(
                f"{row['preemptions']} requests lost their KV blocks and were computed anew; a larger --kv-memory helps"
            )
        if row["cached_tokens"]:
            print(f"{row['cached_tokens']} of the prompts' tokens were found in the cache")
    for note in result.notes:
        print(note)
