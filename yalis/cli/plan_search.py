"""`yalis plan --machine`: its flags, the search, and what is printed."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from yalis.cli.flags import engine_config, parse_float, parse_int
from yalis.cli.plan_memory import SplitPlan, as_json, make_plan, print_table
from yalis.cli.terminal import print_status
from yalis.config import EngineConfig
from yalis.errors import YalisError, YalisFailure, count_of
from yalis.launch.launchers import launch_command, process_rank
from yalis.progress_line import ProgressLine
from yalis.workloads import ANY_WORKLOAD, parse_any_workload

if TYPE_CHECKING:
    from yalis.planner.job import Job
    from yalis.planner.machine import Machine
    from yalis.planner.search import Candidate, Choices
    from yalis.study.planning import Answer, Search

_GIB = 2**30
OBJECTIVES = ("latency", "throughput", "cost")
#: Flags that mean nothing together with --machine.
_NOT_PREDICTED = (
    "seq_len", "device", "attention", "eager", "compile", "prefix_reuse", "threads", "kv_blocks", "kv_memory",
    "ranks_per_node", "ranks_per_gpu", "routing",
)  # fmt: skip
#: Flags that only mean something together with --machine.
_NEEDS_MACHINE = ("nodes", "workload", "trace", "requests", "rate", "objective", "slo", "plot", "out")


def add_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("prediction", "predict the model on a machine; --tp, --pp and --dp fix a part")
    add = group.add_argument
    add(
        "--machine", metavar="NAME",
        help="a machine that comes with yalis, such as perlmutter, or a file written by `yalis calibrate`",
    )  # fmt: skip
    add("--nodes", type=_nodes, metavar="1-16", help="numbers of nodes: 4, 1,2,4 or 1-16 (powers of two; default: 1)")
    add(
        "--workload", type=parse_any_workload, action="append", metavar="NAME",
        help=f"{ANY_WORKLOAD} (default: poster); may be repeated, which mixes them",
    )  # fmt: skip
    add("--trace", metavar="FILE", help="JSONL file of lengths and arrival times, instead of --workload")
    add("--requests", type=parse_int, metavar="N", help="number of requests of the workloads or the trace")
    add("--rate", type=parse_float, metavar="R", help="requests per second (default: all at once)")
    add(
        "--objective", choices=OBJECTIVES,
        help="latency of a request, throughput of the job, or cost: GPU-seconds of the job (default: latency)",
    )  # fmt: skip
    add("--slo", type=_slo, metavar="ttft=2s,itl=50ms", help="only splits that meet these for 90%% of the requests")
    add("--plot", type=Path, metavar="FILE", help="plot time against GPUs and its breakdown, as FILE.png and FILE.svg")
    add("--out", type=Path, metavar="DIR", help="write the prediction as JSON to this folder, for `yalis report`")


def flags_given(args: argparse.Namespace) -> str:
    """Return the first given flag that needs --machine; empty if there is none."""
    return next((f"--{name}" for name in _NEEDS_MACHINE if getattr(args, name) is not None), "")


def run(args: argparse.Namespace) -> int:
    from yalis.study import plots, results
    from yalis.study.planning import make_result, run_search

    if args.plot is not None:
        plots.check_plot(args.plot, output_folder=args.out)
    if args.out is not None and args.out.exists() and not args.out.is_dir():
        raise YalisError(f"--out is {args.out}, which is a file; give a folder")
    config = engine_config(args)
    search = _search(args, config)
    if process_rank() > 0:
        return 0
    answer = run_search(search)
    best = answer.best
    command = _run_command(args, config, search, best)
    memory = _memory(config, search, best)
    result = make_result(search, answer, command, shlex.join(["yalis", *sys.argv[1:]]))
    if args.json:
        print(json.dumps({**asdict(result), "memory": as_json(memory)}))
    else:
        print("\n".join(results.kind_of(result).text(result)))
        _print_answer(search, answer)
        print("\nmemory of the best split")
        print_table(memory)
        print(f"\nto run it:\n  {command}")
    if args.out is not None:
        print_status(f"wrote {results.write(result, args.out)}")
    if args.plot is not None:
        print_status(f"wrote {' and '.join(map(str, plots.write_plot(result, args.plot)))}")
    return 0


def run_study(args: argparse.Namespace) -> int:
    """Repeat the published study; nothing else can be chosen."""
    from yalis.study.published.run import run_study as run_published
    from yalis.study.results import drawing, kind_of, read

    names = ("machine", "gpu_memory", "seq_len", *(one.name for one in fields(EngineConfig)))
    engine = next((f"--{name.replace('_', '-')}" for name in names if getattr(args, name, None) is not None), "")
    if given := flags_given(args) or engine:
        raise YalisError(f"--study has its own machines, models and workloads; leave out {given}")
    drawing.require_matplotlib()
    try:
        args.study.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise YalisFailure(f"--study is {args.study}: {error.strerror}; give a folder that can be written") from None
    line = ProgressLine()
    try:
        written = run_published(args.study, shlex.join(["yalis", *sys.argv[1:]]), line.show)
    finally:
        line.clear()
    result = read(args.study / "statements.json")
    if args.json:
        print(json.dumps(asdict(result)))
    else:
        print("\n".join(kind_of(result).text(result)))
    print_status(f"wrote {len(written)} files to {args.study}")
    return 0


def _search(args: argparse.Namespace, config: EngineConfig) -> Search:
    from yalis.planner.machine import load_machine
    from yalis.planner.search import Slo
    from yalis.study.planning import Search

    if args.gpu_memory is not None:
        raise YalisError("--gpu-memory and --machine exclude each other: a machine has its own GPUs; give one of them")
    if args.workload and args.trace is not None:
        raise YalisError("--workload and --trace exclude each other; give one of them")
    for name in _NOT_PREDICTED:
        if (value := getattr(args, name, None)) not in (None, False, "auto", "cuda"):
            raise YalisError(
                f"--{name.replace('_', '-')} {'' if value is True else f'{value} '}has no effect on a prediction: the "
                "machine file gives devices, nodes and memory, steps are recorded, and prompts are random; leave it out"
            )
    machine = load_machine(args.machine)
    nodes = args.nodes or [1]
    if max(nodes) > machine.max_nodes:
        raise YalisError(
            f"--nodes is {max(nodes)}, but {machine.name} has {count_of(machine.max_nodes, 'node')}; give "
            + (f"1 to {machine.max_nodes}" if machine.max_nodes > 1 else "1, or a machine with a network")
        )
    job, dtype = _job(args, config, machine)
    name = args.trace or " + ".join(map(_workload_name, args.workload or [parse_any_workload("poster")]))
    return Search(
        machine, job, name, dtype, nodes, args.objective or "latency", _choices(args, config), Slo(**args.slo or {})
    )


def _job(args: argparse.Namespace, config: EngineConfig, machine: Machine) -> tuple[Job, str]:
    """Return the job and the name of its dtype."""
    import torch

    from yalis.checkpoint.resolve import open_checkpoint
    from yalis.engine.device import resolve_dtype, resolve_max_len
    from yalis.planner.efficiency import load_efficiencies
    from yalis.planner.job import Job
    from yalis.planner.step import SimRequest
    from yalis.spec import read_spec
    from yalis.study.requests import ThroughputPlan, request_sizes

    checkpoint = open_checkpoint(config.model, load="random")  # only its config is read
    spec = read_spec(checkpoint.config, checkpoint.label)
    checkpoint.close()
    device = load_efficiencies(machine.gpu.efficiencies).device
    dtype = resolve_dtype(config.dtype, spec.dtype, torch.device(device))
    workloads = () if args.trace is not None else tuple(args.workload or [parse_any_workload("poster")])
    plan = ThroughputPlan(workloads, trace=args.trace, requests=args.requests, rate=args.rate)
    sizes = request_sizes(plan)
    longest = max(size.total_len for size in sizes)
    limit = resolve_max_len(config, spec, checkpoint.label)
    if longest > limit:
        larger = f" or a larger --max-model-len, up to {spec.max_position}" if limit < spec.max_position else ""
        raise YalisError(
            f"prompt and output of the longest request take {longest} tokens, but {checkpoint.label} is limited to "
            f"{limit}; give a shorter {'--trace' if args.trace is not None else '--workload'}{larger}"
        )
    requests = [SimRequest(size.prompt_len, size.output_len, size.arrival) for size in sizes]
    model = Path(checkpoint.label).name.removesuffix(".json")
    job = Job(model, spec, dtype.itemsize, requests, replace(config, prefix_reuse=False), device == "cuda")
    return job, str(dtype).partition(".")[2]


def _choices(args: argparse.Namespace, config: EngineConfig) -> Choices:
    from yalis.planner.search import Choices

    given = vars(args)
    return Choices(
        config.tp if "tp" in given else None,
        config.pp if "pp" in given else None,
        config.dp if "dp" in given else None,
        None if config.allreduce == "auto" else (config.allreduce,),
        config.expert_parallel,
    )


def _memory(config: EngineConfig, search: Search, best: Candidate) -> SplitPlan:
    """Return the memory of every rank of the best split, as `yalis plan --gpu-memory` does."""
    split = best.split
    chosen = replace(
        config, tp=(split.rows, split.cols), pp=split.stages, dp=split.replicas, max_model_len=search.job.model_len,
        dtype=search.dtype, block_size=search.job.block_size, expert_parallel=split.expert_parallel,
    )  # fmt: skip
    return make_plan(chosen, search.machine.gpu.memory_bytes.value / _GIB, search.job.model_len)


def _run_command(args: argparse.Namespace, config: EngineConfig, search: Search, best: Candidate) -> str:
    """Return the srun line that runs the job with the best split."""
    from yalis.checkpoint.resolve import locate
    from yalis.planner.search import backend_of

    split, machine = best.split, search.machine
    words = launch_command("srun", split.size, [machine.gpus_per_node] * best.nodes) if split.size > 1 else []
    words += [f"--gpus-per-node={machine.gpus_per_node}"] * bool(words and search.job.on_gpu)
    words += ["yalis", "bench", "throughput", "--model", config.model]
    if config.load == "random" or locate(config.model, weights=False).suffix == ".json":
        words += ["--load", "random"]
        words += ["--routing", "uniform"] * (search.job.spec.moe is not None)  # as predicted
    grid = str(split.rows) if split.cols == 1 else f"{split.rows}x{split.cols}"
    for flag, value in (("--tp", grid), ("--pp", str(split.stages)), ("--dp", str(split.replicas))):
        words += [flag, value] if value != "1" else []
    if search.job.spec.moe is not None and split.rows > 1:
        words.append("--expert-parallel" if split.expert_parallel else "--no-expert-parallel")
    words += ["--allreduce", backend_of(best.library)] if split.per_stage > 1 else []
    if args.trace is not None:
        words += ["--trace", args.trace]
    for one in args.workload or ([] if args.trace is not None else [parse_any_workload("poster")]):
        words += ["--workload", _workload_name(one)]
    for name in ("requests", "rate"):
        words += [f"--{name}", str(getattr(args, name))] if getattr(args, name) is not None else []
    default = EngineConfig()
    for field in ("micro_batches", "max_num_seqs", "max_batch_tokens", "dtype", "memory_fraction", "block_size"):
        if (value := getattr(config, field)) != getattr(default, field):
            words += [f"--{field.replace('_', '-')}", str(value)]
    return shlex.join([*words, "--max-model-len", str(search.job.model_len)])


def _print_answer(search: Search, answer: Answer) -> None:
    from yalis.planner.explain import spell_split

    print(f"\nthe best {len(answer.replays)} on the virtual clock, best first")
    for one in answer.replays:
        split, run = spell_split(one.candidate.split), one.simulation
        low, high = one.seconds.low, one.seconds.high
        nodes = count_of(one.candidate.nodes, "node")
        library = f", {one.candidate.library}" if one.candidate.split.per_replica > 1 else ""
        print(
            f"  {split} on {nodes}{library}: {one.seconds.value:.2f} s ({low:.2f}..{high:.2f}), "
            f"{one.tokens_per_s.value:.0f} tokens/s, TTFT {1e3 * one.ttft:.0f} ms, ITL {1e3 * one.itl:.2f} ms (p90), "
            f"{run.steps} steps, {run.preemptions} preemptions"
        )
    best = answer.best
    nodes = count_of(best.nodes, "node")
    library = f" with {best.library}" if best.split.per_replica > 1 else ""
    print(f"\nwhy {spell_split(best.split)}{library} on {nodes}:")
    for sentence in answer.why or ["nothing else fits the given --nodes, --tp, --pp, --dp and --allreduce"]:
        print(f"  {sentence}")
    room = best.capacity
    held = (room.weights + room.activations) / _GIB
    print(
        f"\nfits: weights and activations need {held:.1f} of {room.usable / _GIB:.1f} GiB, the rest holds "
        f"{room.sequences} sequences of {search.job.model_len} tokens in each replica"
    )


def _workload_name(workload: object) -> str:
    from yalis.workloads import NAMED

    return next((name for name, one in NAMED.items() if one == workload), str(workload))


def _nodes(text: str) -> Sequence[int]:
    """Parse 4, "1,2,4" or "1-16"; of a range, the powers of two and both ends are taken."""
    if match := re.fullmatch(r"(\d{1,6})-(\d{1,6})", text):
        low, high = int(match[1]), int(match[2])
        if 1 <= low <= high:
            doubled = [1 << power for power in range(high.bit_length())]
            return sorted({low, high, *(count for count in doubled if low < count < high)})
    elif re.fullmatch(r"\d{1,6}(,\d{1,6})*", text) and all(int(part) for part in text.split(",")):
        return sorted({int(part) for part in text.split(",")})
    raise argparse.ArgumentTypeError(f"{text!r} is not a number of nodes; give 4, 1,2,4 or 1-16")


def _slo(text: str) -> dict[str, float]:
    """Parse "ttft=2s,itl=50ms" into seconds by name."""
    values: dict[str, float] = {}
    for part in text.split(","):
        match = re.fullmatch(r"(ttft|itl)=(\d+(?:\.\d+)?)(ms|s)", part.strip())
        if match is None or not float(match[2]) or match[1] in values:
            raise argparse.ArgumentTypeError(f"{text!r} is not a list such as ttft=2s,itl=50ms (units: s, ms)")
        values[match[1]] = float(match[2]) * (1e-3 if match[3] == "ms" else 1.0)
    return values
