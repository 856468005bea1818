"""`yalis bench serve`: its flags, and the reading of the API key."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from yalis.cli.flags import add_common_flags, parse_float, parse_int, parse_ints
from yalis.errors import YalisError, YalisFailure
from yalis.workloads import ANY_WORKLOAD, parse_any_workload

if TYPE_CHECKING:
    from yalis.study.results import Result

ABOUT = "a running server: time to first token, inter-token latency and throughput, by rate or concurrency"


def add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--url", required=True, metavar="URL", help="the server, such as http://127.0.0.1:8000")
    add("--rate", type=_parse_floats, metavar="R[,R..]", help="requests per second, with Poisson arrivals")
    add("--concurrency", type=parse_ints, metavar="N[,N..]", help="requests at a time, instead of --rate")
    add(
        "--workload", type=parse_any_workload, action="append", metavar="NAME",
        help=f"{ANY_WORKLOAD} (default: 64x128x128); may be repeated, which mixes them",
    )  # fmt: skip
    add("--trace", metavar="FILE", help="JSONL file of lengths, instead of --workload")
    add("--requests", type=parse_int, metavar="N", help="requests per point (default: all of the workload)")
    add("--vary", type=parse_float, metavar="F", help="draw lengths from 1-F to 1+F times the workload's (default: 0)")
    add("--model", metavar="NAME", help="model to ask for (default: the first that the server lists)")
    add("--api-key-file", metavar="FILE", type=Path, help="file whose first line is the API key")
    add("--vocab-size", type=parse_int, metavar="N", help="prompts are random token ids below N (default: the model's)")
    add("--warmup", type=parse_int, metavar="N", help="unmeasured requests at the start (default: 4)")
    add("--timeout", type=parse_float, metavar="SECONDS", help="longest time of one request (default: 600)")
    add("--seed", type=parse_int, metavar="N", help="seed of prompts, lengths and arrivals (default: 0)")
    add("--out", type=Path, metavar="DIR", help="write the result as JSON to this folder")
    add_common_flags(parser, json="print the result as one JSON object")


def measure(args: argparse.Namespace, command: str, report: Callable[[str], None]) -> Result:
    from yalis.study.serve.benchmark import ServePlan, measure
    from yalis.study.serve.http import Target

    if args.workload and args.trace:
        raise YalisError("--workload and --trace exclude each other; give one of them")
    names = ("rate", "concurrency", "trace", "requests", "vary", "vocab_size", "warmup", "timeout", "seed")
    fields: dict[str, Any] = {name: value for name in names if (value := getattr(args, name)) is not None}
    if args.workload or args.trace:
        fields["workloads"] = tuple(args.workload or ())
    plan = ServePlan(**fields)
    target = Target.parse(args.url, _read_key(args.api_key_file))
    if not target.is_local:  # results are published without host names
        command = command.replace(target.host, "HOST")
    return measure(target, args.model, plan, command, report)


def finish(result: Result) -> None:
    """Raise if no point has figures, after they were printed and written."""
    if all(row["status"] != "ok" for row in result.rows):
        raise YalisFailure(f"no point has a complete answer; the first: {result.rows[0]['status']}")


def _read_key(path: Path | None) -> str | None:
    if path is None:
        return None
    try:
        key = path.read_text(encoding="utf-8").partition("\n")[0].strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise YalisError(f"cannot read --api-key-file {path}: {reason}; give a file with the key") from error
    if not key or not key.isascii() or not key.isprintable():
        raise YalisError(f"--api-key-file {path} has no key in its first line; write the key there")
    return key


def _parse_floats(text: str) -> tuple[float, ...]:
    """Parse "0.5,2" into (0.5, 2.0)."""
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers, such as 0.5,2") from None
