"""`yalis bench throughput`: its flags, which `bench scaling` shares, and its table."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from yalis.cli.flags import add_common_flags, add_engine_flags, engine_config, parse_float, parse_int
from yalis.errors import YalisError
from yalis.study.workloads import NAMED, parse_workload

if TYPE_CHECKING:
    from yalis.config import EngineConfig
    from yalis.results import Result
    from yalis.study.requests import ThroughputPlan

ABOUT = "tokens per second of many requests, time to first token and time per output token"


def add_flags(parser: argparse.ArgumentParser) -> None:
    add_work_flags(parser)
    parser.add_argument(
        "--peer",
        action="append",
        default=[],
        metavar="NAME",
        help="another engine to measure: transformers or vllm; may be repeated",
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="write the result as JSON to this folder")
    add_engine_flags(parser)
    add_common_flags(parser, json="print the result as one JSON object")


def add_work_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that describe the requests."""
    add = parser.add_argument
    add(
        "--workload", type=parse_workload, action="append", metavar="NAME",
        help=f"{', '.join(NAMED)}, or batch x prompt x output (default: 16x64x64); may be repeated, which mixes them",
    )  # fmt: skip
    add("--dataset", metavar="FILE", help="JSONL file of requests as for `yalis batch`, instead of --workload")
    add(
        "--requests",
        type=parse_int,
        metavar="N",
        help="number of requests (default: all of the workloads or the dataset)",
    )
    add(
        "--vary",
        type=parse_float,
        metavar="F",
        help="draw lengths from 1-F to 1+F times the workload's (default: 0)",
    )
    add(
        "--rate",
        type=parse_float,
        metavar="R",
        help="requests per second, with Poisson arrivals (default: all at once)",
    )
    add("--warmup", type=parse_int, metavar="N", help="unmeasured runs at the start (default: 1)")
    add("--repeats", type=parse_int, metavar="N", help="measured runs (default: 3)")
    add("--seed", type=parse_int, metavar="N", help="seed of prompts, lengths and arrivals (default: 0)")


def work_plan(args: argparse.Namespace) -> ThroughputPlan:
    from yalis.study.requests import ThroughputPlan

    if args.workload and args.dataset is not None:
        raise YalisError("--workload and --dataset exclude each other; give one of them")
    names = ("dataset", "requests", "vary", "rate", "warmup", "repeats", "seed")
    fields: dict[str, Any] = {name: value for name in names if (value := getattr(args, name)) is not None}
    if args.workload:
        fields["workloads"] = tuple(args.workload)
    elif args.dataset is not None:
        fields["workloads"] = ()
    return ThroughputPlan(**fields)


def work_config(args: argparse.Namespace) -> EngineConfig:
    """Return the engine config, with prefix reuse off unless given: repeats would hit the prompts of earlier ones."""
    config = engine_config(args)
    return config if "prefix_reuse" in args else replace(config, prefix_reuse=False)


def measure(args: argparse.Namespace, command: str, report: Callable[[str], None]) -> Result:
    from yalis.study.throughput import measure

    plan = replace(work_plan(args), peer=tuple(args.peer))
    return measure(work_config(args), plan, command, report)


def print_table(result: Result) -> None:
    facts, device = result.parameters, result.devices[0]
    ranks = 1 if result.topology is None else result.topology["ranks"]
    heading = [facts["engine"]["model"], facts["dtype"], device["name"]] + ([f"{ranks} ranks"] if ranks > 1 else [])
    print(" · ".join(heading))
    first = result.rows[0]
    arrival = "all at once" if first["rate"] is None else f"arriving at {first['rate']:g} per second"
    print(f"{first['requests']} requests {arrival}, {first['prompt_tokens']} + {first['output_tokens']} tokens")
    heads = (("total", 12), ("p10..p90", 18), ("tokens/s", 11), ("requests/s", 12), ("of floor", 10))
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
    width = 24 if len(result.rows) == 1 else 36
    print(f"{'latency in ms':<{width}}{'median':>12}{'p90':>12}{'p99':>12}")
    for row in result.rows:
        for name, title in (("first_token_ms", "time to first token"), ("token_ms", "time per output token")):
            if row[name] is not None:
                label = title if len(result.rows) == 1 else f"{title}, {row['engine']}"
                values = (row[name], row[f"{name}_p90"], row[f"{name}_p99"])
                print(f"{label:<{width}}" + "".join(f"{value:>12.1f}" for value in values))
    for row in result.rows:
        if row["engine"] != "yalis" and row["status"] == "ok":
            same = "not compared" if row["same_tokens"] is None else f"equal in {row['same_tokens']:.0%} of the answers"
            print(f"{row['engine']}: {row['ratio']:.2f}x the time of yalis; tokens {same}")
        if row["preemptions"]:
            print(
                f"{row['preemptions']} preemptions: requests lost their KV blocks and were recomputed; "
                "give a larger --kv-memory"
            )
        if row["cached_tokens"]:
            print(f"{row['cached_tokens']} prompt tokens were found in the prefix cache")
    for note in result.notes:
        print(note)
