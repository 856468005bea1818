"""Show the weights and KV cache of each rank of a split, from the model's config alone: nothing is loaded.
With --gpu-memory, also whether they fit such GPUs and how many sequences the KV cache then holds.
With --machine, predict how the model runs there on each number of --nodes, and choose the split."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from yalis.cli import plan_search
from yalis.cli.flags import add_common_flags, add_engine_flags, engine_config, parse_float, parse_int
from yalis.cli.plan_memory import as_json, describe_fit, make_plan, print_table
from yalis.errors import YalisError, YalisFailure
from yalis.launch.launchers import process_rank


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--gpu-memory", metavar="GIB", type=parse_float,
        help="plan for GPUs with this much memory, in GiB; one sold as 80 GB has a little less than 80",
    )  # fmt: skip
    parser.add_argument(
        "--seq-len", metavar="N", type=parse_int,
        help="show how many sequences of N tokens the KV cache holds (default: --max-model-len)",
    )  # fmt: skip
    plan_search.add_flags(parser)
    parser.add_argument(
        "--study", metavar="DIR", type=Path,
        help="repeat the published study by model, and write its figures and JSON to this folder",
    )  # fmt: skip
    add_engine_flags(parser)
    parser.set_defaults(uses_engine=False)
    add_common_flags(parser, json="print the plan as one JSON object")


def run(args: argparse.Namespace) -> int:
    if args.study is not None:
        return plan_search.run_study(args)
    if args.machine is not None:
        return plan_search.run(args)
    if given := plan_search.flags_given(args):
        raise YalisError(f"{given} needs a machine to predict for; add --machine, such as --machine perlmutter")
    plan = make_plan(engine_config(args), args.gpu_memory, args.seq_len)
    if process_rank() > 0:
        return 0
    if args.json:
        print(json.dumps(as_json(plan)))
    else:
        print_table(plan)
    if plan.gpu is not None and not plan.fits:
        raise YalisFailure(describe_fit(plan, plan.gpu))
    return 0
