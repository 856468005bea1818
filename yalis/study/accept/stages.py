"""The stages of an acceptance run. Every rank runs them together; lines count on rank 0 only."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from statistics import median

import torch

from yalis.cache_folders import cache_folder
from yalis.comm.base import CommBackend
from yalis.comm.nvrar.group import NvrarGroup
from yalis.comm.nvrar.transport import NONE, gather_transports
from yalis.comm.selection import open_backend, unusable_on_any_rank
from yalis.engine.llm import LLM
from yalis.errors import YalisError, count_of
from yalis.launch.rank_info import list_ranks
from yalis.machine import versions
from yalis.planner.machine import load_machine
from yalis.study import calibration
from yalis.study.accept import child_job
from yalis.study.accept.line import FAILED, IMPOSSIBLE, PASSED, Line
from yalis.study.accept.plan import MACHINE, Job
from yalis.study.accept.storms import Inputs, Storm, check_contract
from yalis.study.allreduce import benchmark
from yalis.study.allreduce.registered import find_obstacle
from yalis.study.cluster import finding as findings
from yalis.study.cluster.finding import Finding, RankFinding, merge_ranks
from yalis.study.cluster.gpu_checks import check_gpus
from yalis.study.cluster.rank_checks import check_rank
from yalis.study.results.kinds.allreduce import NCCL_REGISTERED, NVRAR_PEERS, PLAIN_GLOO, fastest, label, size_name
from yalis.study.results.result import Result
from yalis.study.this_machine import CalibrationPlan, calibrate
from yalis.types import SamplingParams

_OUTCOMES = {findings.OK: PASSED, findings.WARNING: PASSED, findings.IMPOSSIBLE: IMPOSSIBLE}
_LIBRARIES = {"torch": "nccl"}  # names of the planner, for the backends of GPUs
_PROMPTS = [[5, 17, 99, 3, 41, 8], [200, 8, 41, 41, 7, 120, 33, 2, 90]]


def environment(job: Job) -> Iterator[Line]:
    """Versions on all ranks, and what `yalis doctor` finds about each of them."""
    world = job.world
    found = versions()
    by_rank = world.all_gather_object(found)
    for name, version in found.items():
        others = [rank for rank, one in enumerate(by_rank) if one[name] != by_rank[0][name]]
        if others:
            detail = f"{by_rank[0][name]} on rank 0, {by_rank[others[0]][name]} on {list_ranks(others)}"
            yield Line("environment", name, FAILED, f"{detail}; install the same everywhere")
        elif version is not None:
            yield Line("environment", name, PASSED, f"{version} on all ranks")
    checks = [*check_rank(world), *check_gpus()]
    gathered = world.all_gather_object([one.to_json() for one in checks])
    for one in merge_ranks([[Finding.from_json(values) for values in rank] for rank in gathered]):
        yield Line("rank", one.finding.name, _OUTCOMES[one.finding.status], _describe(one))


def _describe(one: RankFinding) -> str:
    return f"warning: {one.detail}" if one.finding.warning else one.detail


def transports(job: Job) -> Iterator[Line]:
    """The transport between GPUs, and which backends all ranks can use."""
    if job.device.type == "cuda":
        found = gather_transports(job.world, str(torch.cuda.get_device_properties(job.device).uuid))
        names = {transport.name for transport in found}
        outcome = PASSED if len(names) == 1 and NONE not in names else FAILED
        yield Line("transport", "between GPUs", outcome, "; ".join(dict.fromkeys(map(str, found))))
    else:
        hosts = len({member.node for member in job.world.members})
        how = "shared memory of one host" if hosts == 1 else f"TCP between {hosts} hosts"
        yield Line("transport", "between CPUs", PASSED, f"{how}, {job.topology}")
    for name in job.plan.backends:
        reason = unusable_on_any_rank(name, job.world, job.device)
        if reason is None:
            job.usable.append(name)
        yield Line("backend", name, IMPOSSIBLE if reason else PASSED, reason or "usable on all ranks")


def contract_and_storms(job: Job) -> Iterator[Line]:
    """Every collective of every backend, and storms of random all-reduces on it."""
    inputs = Inputs(job.world, job.device)
    for name in job.usable:
        job.report(f"contract of {name}")
        backend = open_backend(name, job.world, job.device, job.topology)
        try:
            yield from _storm(job, name, backend, inputs)
        finally:
            backend.close()


def _storm(job: Job, name: str, backend: CommBackend, inputs: Inputs) -> Iterator[Line]:
    comm = backend.group(f"accept {name}", range(job.world.size))
    checks, problems = check_contract(job.world, comm, inputs, job.device)
    detail = f"{checks} checks on each rank" if not problems else f"{len(problems)} failed, first {problems[0]}"
    yield Line("contract", name, FAILED if problems else PASSED, detail)
    if isinstance(comm, NvrarGroup) and job.topology.nodes > 1:
        whole = comm.lines_arrive_whole()
        use = "the protocol line can be tuned" if whole else "some were torn, so the protocol line is not used"
        yield Line("tear test", "lines of 128 bytes between nodes", PASSED, use)
    modes = ("eager", "graph") if job.device.type == "cuda" and comm.capturable else ("eager",)
    for mode in modes:
        operations = job.plan.storm_operations
        job.report(f"storm of {operations} all-reduces with {name}, {mode}")
        storm = Storm(job.world, comm, inputs, job.device, seed=len(mode))
        begun = time.monotonic()
        outcome = storm.run(operations) if mode == "eager" else storm.replay(operations)
        backend.check()
        wrong, digests = outcome["wrong"], outcome["digests"]
        detail = (
            f"{operations} operations in {time.monotonic() - begun:.1f} s, {wrong} wrong elements, "
            f"{'the same bits on all ranks' if digests == 1 else f'{digests} different results on the ranks'}"
        )
        yield Line("storm", f"{name}, {mode}", PASSED if not wrong and digests == 1 else FAILED, detail)


def sweep(job: Job) -> Iterator[Line]:
    """Times by backend and size, tuned unless the run is quick, and what the planner expects."""
    if not job.usable:
        yield Line("all-reduce", "all", IMPOSSIBLE, "no backend can be used")
        return
    on_cpu = job.device.type == "cpu"
    peers = [PLAIN_GLOO] if on_cpu else list(NVRAR_PEERS) if "nvrar" in job.usable else []
    obstacle = None if on_cpu else find_obstacle(job.world, job.device)
    if obstacle is not None:
        yield Line("all-reduce", NCCL_REGISTERED, IMPOSSIBLE, obstacle)
    elif not on_cpu:
        peers.append(NCCL_REGISTERED)
    plan = benchmark.AllReducePlan(
        sizes=job.plan.sizes, backends=(*job.usable, *peers), repeats=job.plan.repeats, tune=not job.plan.quick,
        device=job.device.type, ranks_per_node=job.plan.ranks_per_node, ranks_per_gpu=job.plan.ranks_per_gpu,
    )  # fmt: skip
    result = benchmark.measure(plan, None, job.command, job.report)
    if result is None:
        return
    job.results.append(result)
    predicted, source = _predict(job, result)
    for row in fastest(result.rows):
        expected = predicted.get((row["backend"], row["bytes"]))
        detail = f"{label(row)}, {row['mode']}" + (f"; predicted by {source}" if expected is not None else "")
        check = f"{row['backend']}, {size_name(row['bytes'])}"
        yield Line("all-reduce", check, PASSED, detail, row["median_us"], expected)
    for row in result.rows:
        if row["status"] != "ok":
            check = f"{row['backend']}, {size_name(row['bytes'])}"
            outcome = FAILED if row["status"].startswith("wrong") else IMPOSSIBLE
            yield Line("all-reduce", check, outcome, f"{label(row)}, {row['mode']}: {row['status']}")
    yield from _calibration_lines(job, source)
    if job.plan.quick:
        yield Line("tuning", "table", IMPOSSIBLE, "--quick measures too little for a tuning table")
    else:
        path, best = benchmark.save_table(result)
        yield Line("tuning", "table", PASSED, f"{count_of(len(best), 'size')}, written to {path}")


def _predict(job: Job, result: Result) -> tuple[dict[tuple[str, int], float], str]:
    """Return the planner's times by backend and size, and which machine it used or why it cannot."""
    plan = CalibrationPlan("accepted", job.plan.machine, device=job.device.type)
    try:
        machine = calibrate(plan, result, "`yalis accept`", job.command, job.report)
        assert machine is not None  # it measures nothing with other ranks
        (job.out / MACHINE).write_text(json.dumps(machine.to_json(), indent=1) + "\n")
        source = f"{MACHINE} of this run"
        if job.plan.machine:
            machine, source = load_machine(job.plan.machine), f"machine {job.plan.machine}"
        elif job.topology.nodes == 1:
            return {}, "libraries are fitted between nodes only"
        comparisons = calibration.compare(machine, result)
    except YalisError as error:
        return {}, str(error)
    backends = {library: backend for backend, library in _LIBRARIES.items()} if job.device.type == "cuda" else {}
    return {(backends.get(one.library, one.library), one.bytes): one.predicted_us for one in comparisons}, source


def _calibration_lines(job: Job, source: str) -> Iterator[Line]:
    if (job.out / MACHINE).exists():
        yield Line("planner", "link parameters", PASSED, f"{MACHINE}, for `yalis plan --machine`")
    else:
        yield Line("planner", "link parameters", IMPOSSIBLE, source)


def decode(job: Job) -> Iterator[Line]:
    """Decode with a tiny random model over every backend, and compare the tokens."""
    model, size = _write_model(job.world.size), job.world.size
    reference: list[list[int]] | None = None
    for name in job.usable:
        job.report(f"decode with {name}")
        with LLM(
            model, load="random", tp=size, dtype="float32", device=job.device.type, allreduce=name, max_model_len=128,
            kv_blocks=64, ranks_per_node=job.plan.ranks_per_node, ranks_per_gpu=job.plan.ranks_per_gpu,
        ) as llm:  # fmt: skip
            sampling = SamplingParams(max_tokens=job.plan.output_len, temperature=0.0, ignore_eos=True)
            outputs = llm.generate(_PROMPTS, sampling, progress=False)
            steps = _step_times(llm, sampling) if job.world.rank == 0 else []
        if job.world.rank:
            continue
        tokens = [output.token_ids for output in outputs]
        reference = reference or tokens
        equal = "the tokens of " + job.usable[0] if tokens == reference else f"not the tokens of {job.usable[0]}"
        detail = f"tp {size}, {sum(map(len, tokens))} tokens: {equal}; time of a step"
        yield Line("decode", name, PASSED if tokens == reference else FAILED, detail, 1e6 * median(steps))


def _step_times(llm: LLM, sampling: SamplingParams) -> list[float]:
    """Return the seconds per token of two runs; the first runs of a process are slower."""
    times = []
    for _ in range(2):
        begun = time.perf_counter()
        llm.generate(_PROMPTS[0], sampling, progress=False)
        times.append((time.perf_counter() - begun) / sampling.max_tokens)
    return times


def _write_model(ranks: int) -> str:
    """Write the config.json of a model of which every rank holds a head. Returns its folder, the same on all ranks."""
    heads = max(8, ranks)
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64 * heads,
        "intermediate_size": 128 * heads, "num_attention_heads": heads, "num_key_value_heads": heads,
        "num_hidden_layers": 2, "vocab_size": 512, "max_position_embeddings": 256, "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0, "tie_word_embeddings": False, "torch_dtype": "float32", "bos_token_id": 1,
        "eos_token_id": 2,
    }  # fmt: skip
    folder = cache_folder("accept") / f"{heads}-heads"
    folder.mkdir(exist_ok=True)
    path = folder / "config.json"
    temporary = path.with_suffix(f".{os.getpid()}")
    temporary.write_text(json.dumps(config))
    temporary.replace(path)  # ranks of one host write the same
    return str(folder)


def faults(job: Job) -> Iterator[Line]:
    """Kill and stall a rank of a small job on every host: the other rank must notice and name it."""
    member = job.world.members[job.world.rank]
    outcomes = {}
    if member.local_rank == 0:
        job.report("a job whose rank is killed, and one whose rank stalls")
        running = {fault: child_job.start(fault) for fault in child_job.FAULTS}
        outcomes = {fault: child_job.finish(process) for fault, process in running.items()}
    by_rank = job.world.all_gather_object(outcomes)
    for fault in child_job.FAULTS:
        for rank, found in enumerate(by_rank):
            if fault not in found:
                continue
            error, seconds = found[fault]["error"], found[fault]["seconds"]
            good = error.startswith("rank 1 ") and seconds < child_job.LIMIT_S
            yield Line(
                "faults", f"{fault} a rank on the host of rank {rank}", PASSED if good else FAILED,
                f"after {seconds:.1f} s: {error or 'the other rank did not notice'}",
            )  # fmt: skip


STAGES = {
    "environment": environment,
    "transports": transports,
    "contract and storms": contract_and_storms,
    "all-reduce sweep": sweep,
    "decode": decode,
    "faults": faults,
}
