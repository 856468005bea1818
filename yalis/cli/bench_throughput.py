"""`yalis bench throughput`: its flags, which `bench scaling` shares, and its table."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from yalis.cli.flags import add_common_flags, add_engine_flags, engine_config, parse_float, parse_int
from yalis.errors import YalisError
from yalis.workloads import ANY_WORKLOAD, parse_any_workload

if TYPE_CHECKING:
    from yalis.config import EngineConfig
    from yalis.study.requests import ThroughputPlan
    from yalis.study.results import Result

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
        "--workload", type=parse_any_workload, action="append", metavar="NAME",
        help=f"{ANY_WORKLOAD} (default: 16x64x64); may be repeated, which mixes them",
    )  # fmt: skip
    add("--dataset", metavar="FILE", help="JSONL file of requests as for `yalis batch`, instead of --workload")
    add("--trace", metavar="FILE", help="JSONL file of lengths and arrival times, instead of --workload")
    add(
        "--requests",
        type=parse_int,
        metavar="N",
        help="number of requests: random ones of the workloads, or the first of the file (default: all)",
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
    add("--temperature", type=parse_float, metavar="T", help="sample at this temperature (default: 0, greedy)")
    add("--top-k", type=parse_int, metavar="N", help="sample from the N most likely tokens (default: 0, all)")
    add("--top-p", type=parse_float, metavar="P", help="sample from the tokens that add up to P (default: 1, all)")
    add("--warmup", type=parse_int, metavar="N", help="unmeasured runs at the start (default: 1)")
    add("--repeats", type=parse_int, metavar="N", help="measured runs (default: 3)")
    add("--seed", type=parse_int, metavar="N", help="seed of prompts, lengths and arrivals (default: 0)")


def work_plan(args: argparse.Namespace) -> ThroughputPlan:
    from yalis.study.requests import ThroughputPlan

    sources = ("workload", "dataset", "trace")
    if len(given := [f"--{name}" for name in sources if getattr(args, name)]) > 1:
        raise YalisError(f"{' and '.join(given)} exclude each other; give one of them")
    names = (
        "dataset", "trace", "requests", "vary", "rate", "temperature", "top_k", "top_p", "warmup", "repeats", "seed",
    )  # fmt: skip
    fields: dict[str, Any] = {name: value for name in names if (value := getattr(args, name)) is not None}
    if args.workload:
        fields["workloads"] = tuple(args.workload)
    elif args.dataset is not None or args.trace is not None:
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
