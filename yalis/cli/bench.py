"""Run benchmarks: latency, throughput, scaling, slice, serving, pipeline, all-reduce, kernels; or compare results."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from yalis.cli import (
    bench_accuracy,
    bench_allreduce,
    bench_compare,
    bench_replay,
    bench_scaling,
    bench_serve,
    bench_slice,
    bench_throughput,
)
from yalis.cli.flags import add_common_flags, add_engine_flags, engine_config, parse_int, parse_ints
from yalis.cli.terminal import print_status
from yalis.engine.interrupts import Stopped, if_stopped, interrupts_held
from yalis.errors import YalisError
from yalis.progress_line import ProgressLine
from yalis.workloads import NAMED, parse_workload

if TYPE_CHECKING:
    from yalis.study.results import Result

Measure = Callable[[argparse.Namespace, str, Callable[[str], None]], "Result | None"]


def add_flags(parser: argparse.ArgumentParser) -> None:
    benchmarks = parser.add_subparsers(title="benchmarks", metavar="BENCHMARK", dest="benchmark")
    about = "time to first token and decode step time, compared with the device's floor and with other engines"
    latency = benchmarks.add_parser("latency", help=about, description=about)
    latency.add_argument("--batch", metavar="1,8", type=parse_ints, default=(1, 8), help="batch sizes (default: 1,8)")
    _add_numbers(latency, prompt_len=64, output_len=64, warmup=1, repeats=3, seed=0)
    latency.add_argument(
        "--peer",
        action="append",
        default=[],
        metavar="NAME",
        help="another engine to measure: transformers or vllm; may be repeated",
    )
    latency.add_argument(
        "--workload", action="append", default=[], metavar="NAME",
        help=f"{', '.join(NAMED)}, or batch x prompt x output such as 16x128x256, instead of --batch, --prompt-len and "
        "--output-len; may be repeated",
    )  # fmt: skip
    _add_shared_flags(latency)
    modules = {
        "throughput": bench_throughput, "scaling": bench_scaling, "slice": bench_slice, "compare": bench_compare,
        "accuracy": bench_accuracy, "replay": bench_replay, "serve": bench_serve,
    }  # fmt: skip
    for name, module in modules.items():
        module.add_flags(benchmarks.add_parser(name, help=module.ABOUT, description=module.ABOUT))
    about = "idle time of pipeline stages, by number of micro-batches"
    pipeline = benchmarks.add_parser("pipeline", help=about, description=about)
    pipeline.add_argument(
        "--cuts", metavar="1,2,4,8", type=parse_ints, default=(1, 2, 4, 8),
        help="numbers of micro-batches to measure (default: 1,2,4,8)",
    )  # fmt: skip
    _add_numbers(pipeline, prompts=8, prompt_len=128, warmup=1, repeats=5, seed=0)
    _add_shared_flags(pipeline)
    about = bench_allreduce.ABOUT
    bench_allreduce.add_flags(benchmarks.add_parser("allreduce", help=about, description=about))
    about = "kernels of a decode step and prefill attention, compared with torch and with the device's floor"
    kernels = benchmarks.add_parser("kernels", help=about, description=about)
    rows = (1, 2, 4, 8, 16, 32, 64)
    kernels.add_argument(
        "--rows",
        metavar="1,16,64",
        type=parse_ints,
        default=rows,
        help="input rows, which are the batch size (default: 1,2,4,8,16,32,64)",
    )
    _add_numbers(kernels, layers=8, context=1024, prompts=4, repeats=10, seed=0)
    kernels.add_argument(
        "--prompt-len", metavar="N", type=parse_int, help="tokens in each prompt (default: 2048 on a GPU, 512 on a CPU)"
    )
    kernels.add_argument("--device", metavar="NAME", default="auto", help="auto, cpu or cuda (default: auto)")
    kernels.add_argument("--dtype", metavar="NAME", default="auto", help="auto, float32, float16 or bfloat16")
    kernels.add_argument("--out", type=Path, metavar="DIR", help="write the result as JSON to this folder")
    add_common_flags(kernels, json="print the result as one JSON object")


_NUMBERS = {
    "prompts": "number of prompts",
    "prompt_len": "tokens in each prompt",
    "output_len": "tokens to generate for each prompt",
    "warmup": "unmeasured runs at the start",
    "repeats": "measured runs",
    "layers": "layers in the decode step without attention",
    "context": "tokens of each sequence in the KV cache",
    "seed": "seed of the random inputs",
}


def _add_numbers(parser: argparse.ArgumentParser, **defaults: int) -> None:
    for name, default in defaults.items():
        about = f"{_NUMBERS[name]} (default: {default})"
        parser.add_argument(f"--{name.replace('_', '-')}", metavar="N", type=parse_int, default=default, help=about)


def _add_shared_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, metavar="DIR", help="write the result as JSON to this folder")
    add_engine_flags(parser)
    add_common_flags(parser, json="print the result as one JSON object")


def run(args: argparse.Namespace) -> int:
    if args.benchmark is None:
        raise YalisError(
            "no benchmark given; type `yalis bench NAME`, where NAME is latency, throughput, scaling, slice, serve, "
            "compare, accuracy, replay, pipeline, allreduce or kernels"
        )
    from yalis.study import results

    if args.out is not None:
        check_folder(args.out)
    measure = _BENCHMARKS[args.benchmark]
    stopped: Stopped | None = None
    try:
        with ProgressLine() as line, if_stopped("nothing was written"):
            result = measure(args, shlex.join(["yalis", *sys.argv[1:]]), line.show)
    except Stopped as stop:
        if stop.done is None:
            raise
        result, stopped = stop.done, stop
    if result is None:
        return 0  # rank 0 prints it
    with interrupts_held():
        if args.json:
            print(json.dumps(asdict(result)), flush=True)
        else:
            print("\n".join(results.kind_of(result).text(result)))
        if args.out is not None:
            print_status(f"wrote {results.write(result, args.out)}")
    if stopped is not None:
        raise stopped
    if args.benchmark == "allreduce":
        bench_allreduce.finish(args, result)
    if args.benchmark == "slice":
        bench_slice.finish(result)
    if args.benchmark == "serve":
        bench_serve.finish(result)
    if args.benchmark == "kernels":
        from yalis.study.kernels.benchmark import check_correct

        check_correct(result)
    return 0


def _latency(args: argparse.Namespace, command: str, report: Callable[[str], None]) -> Result:
    from yalis.study.latency import LatencyPlan, measure

    if args.workload and (args.batch, args.prompt_len, args.output_len) != ((1, 8), 64, 64):
        raise YalisError("--workload sets all sizes; omit --batch, --prompt-len and --output-len")
    plan = LatencyPlan(
        args.batch, args.prompt_len, args.output_len, args.warmup, args.repeats, tuple(args.peer), args.seed,
        tuple(map(parse_workload, args.workload)),
    )  # fmt: skip
    return measure(engine_config(args), plan, command, report)


def _pipeline(args: argparse.Namespace, command: str, report: Callable[[str], None]) -> Result:
    from yalis.study.pipeline import PipelinePlan, measure

    plan = PipelinePlan(args.cuts, args.prompts, args.prompt_len, args.warmup, args.repeats, args.seed)
    return measure(engine_config(args), plan, command, report)


def _kernels(args: argparse.Namespace, command: str, report: Callable[[str], None]) -> Result:
    from yalis.study.kernels.benchmark import measure
    from yalis.study.kernels.cases import KernelsPlan

    plan = KernelsPlan(
        rows=args.rows, layers=args.layers, context=args.context, prompts=args.prompts, prompt_len=args.prompt_len,
        device=args.device, dtype=args.dtype, repeats=args.repeats, seed=args.seed,
    )  # fmt: skip
    return measure(plan, command, report)


def check_folder(folder: Path) -> None:
    """Refuse a folder that cannot be written to, before the measurement. It is created with the result."""
    if folder.exists() and not folder.is_dir():
        raise YalisError(f"--out is {folder}, which is not a folder; give a folder")
    existing = next(one for one in (folder, *folder.absolute().parents) if os.path.lexists(one))
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        raise YalisError(f"--out is {folder}, which cannot be written to: {error.strerror}; give a folder") from error


#: The function that measures each benchmark. It returns None on ranks other than 0.
_BENCHMARKS: dict[str, Measure] = {
    "latency": _latency,
    "throughput": bench_throughput.measure,
    "slice": bench_slice.measure,
    "accuracy": bench_accuracy.measure,
    "replay": bench_replay.measure,
    "serve": bench_serve.measure,
    "pipeline": _pipeline,
    "allreduce": bench_allreduce.measure,
    "kernels": _kernels,
}
