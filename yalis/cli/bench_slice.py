"""`yalis bench slice`: its flags, and the check of its result."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from yalis.cli.flags import HELP, add_common_flags, add_engine_flags, engine_config, parse_int, parse_ints
from yalis.config import parse_grid
from yalis.errors import YalisError, YalisFailure, count_of
from yalis.launch.launchers import EXTERNAL_LAUNCHERS, detect_launcher
from yalis.workloads import NAMED, Workload, parse_workload

if TYPE_CHECKING:
    from yalis.config import GridShape
    from yalis.study.results import Result

ABOUT = "prefill and decode step of one rank of a split model, run alone: collectives return at once"
#: Engine fields that a slice sets itself, or that only a job of several ranks uses.
_WITHOUT = (
    "tokenizer", "load", "generation_config", "prefix_reuse", "tp", "pp", "dp", "micro_batches", "allreduce",
    "ranks_per_node", "ranks_per_gpu", "join_timeout", "step_timeout", "insecure_rendezvous",
)  # fmt: skip


def add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--tp", dest="grids", type=_grids, metavar="4,8,16", required=True,
        help="tensor-parallel sizes to measure a rank of: numbers of ranks, or grids such as 2x2",
    )  # fmt: skip
    add("--pp", dest="stages", type=parse_int, metavar="N", default=1, help=f"{HELP['pp']} (default: 1)")
    add("--rank", type=parse_int, metavar="N", default=0, help="the rank to run, from 0 to tp * pp - 1 (default: 0)")
    add("--batch", type=parse_ints, metavar="1,16,64", help="batch sizes (default: 1,16,64)")
    add("--prompt-len", type=parse_int, metavar="N", help="tokens in each prompt (default: 128)")
    add("--output-len", type=parse_int, metavar="N", help="tokens to generate for each prompt (default: 33)")
    add(
        "--workload", type=parse_workload, action="append", default=[], metavar="NAME",
        help=f"{', '.join(NAMED)}, or batch x prompt x output such as 16x2480x33, in addition to --batch, or instead "
        "of it if that is not given; may be repeated",
    )  # fmt: skip
    add("--warmup", type=parse_int, metavar="N", default=1, help="unmeasured runs at the start (default: 1)")
    add("--repeats", type=parse_int, metavar="N", default=3, help="measured runs (default: 3)")
    add("--seed", type=parse_int, metavar="N", default=0, help="seed of the prompts (default: 0)")
    add("--out", type=Path, metavar="DIR", help="write the result as JSON to this folder")
    add_engine_flags(parser, without=_WITHOUT)
    add_common_flags(parser, json="print the result as one JSON object")
    parser.set_defaults(uses_engine=False, load="random")


def measure(args: argparse.Namespace, command: str, report: Callable[[str], None]) -> Result:
    from yalis.study.slice import SlicePlan, measure

    if detect_launcher().size > 1:
        raise YalisError(f"bench slice runs one rank alone; run it without {EXTERNAL_LAUNCHERS}")
    plan = SlicePlan(args.grids, _workloads(args), args.stages, args.rank, args.warmup, args.repeats, args.seed)
    return measure(engine_config(args), plan, command, report)


def finish(result: Result) -> None:
    """Raise if some rows have no figures, after the others were printed and written."""
    failed = [row for row in result.rows if row["status"] != "ok"]
    if failed:
        workloads = count_of(len(result.rows), "workload")
        raise YalisFailure(f"{len(failed)} of {workloads} failed; the first: {failed[0]['status']}")


def _workloads(args: argparse.Namespace) -> tuple[Workload, ...]:
    sizes = (args.batch, args.prompt_len, args.output_len)
    if args.workload and sizes == (None, None, None):
        return tuple(args.workload)
    prompt_len = 128 if args.prompt_len is None else args.prompt_len
    output_len = 33 if args.output_len is None else args.output_len
    return (*(Workload(batch, prompt_len, output_len) for batch in args.batch or (1, 16, 64)), *args.workload)


def _grids(text: str) -> tuple[GridShape, ...]:
    return tuple(parse_grid(part) for part in text.split(","))
