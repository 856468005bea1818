"""The throughput benchmark: a job of many requests, all at once or arriving at random, and how long each waited.

Lengths and arrivals are the same in every repeat, so that what repeats differ by is noise; random prompts are fresh.
Ours and every peer take turns within each repeat, so that a machine that slows down slows all of them.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import deque
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean, median
from typing import Any, Protocol

import torch

from yalis import __version__, result_rows, results
from yalis.checkpoint.resolve import locate, open_checkpoint
from yalis.config import EngineConfig
from yalis.engine.device import release_memory, resolve_device, resolve_dtype, with_block_size
from yalis.engine.llm import LLM
from yalis.engine.replica_ranks import split_of
from yalis.errors import YalisFailure
from yalis.perfmodel.floors import ModelDims, decode_work, prefill_work
from yalis.spec import ModelSpec, read_spec
from yalis.study import bandwidth
from yalis.study.peers.interleaving import Report, take_turns
from yalis.study.peers.peer import Peer, PeerSetup
from yalis.study.peers.process import start_peer
from yalis.study.requests import Job, ThroughputPlan, check_length, digest_of, draw_jobs, read_dataset
from yalis.study.spread import percentiles, spread
from yalis.study.topology import has_floor, topology_of, unlike_peers
from yalis.types import RequestOutput


@dataclass(frozen=True)
class Run:
    """All jobs done once."""

    requests: int
    seconds: float
    first_token: list[float]  # of each answer, from its request's arrival on
    per_token: list[float]  # of each answer that has a second token
    tokens: list[list[int]]
    prompt_tokens: int
    cached_tokens: int = 0
    preemptions: int = 0

    @property
    def output_tokens(self) -> int:
        return sum(map(len, self.tokens))


class Engine(Protocol):
    name: str
    version: str

    def run(self, jobs: Sequence[Job], report: Report) -> Run: ...


class Ours:
    """This engine, fed with requests as they come."""

    name = "yalis"
    version = __version__

    def __init__(self, llm: LLM) -> None:
        self._llm = llm

    def run(self, jobs: Sequence[Job], report: Report) -> Run:
        llm = self._llm
        begun, preempted = llm.stats.output_tokens, llm.stats.preemptions
        waiting, late, done = deque(jobs), dict[int, float](), dict[int, RequestOutput]()
        start = time.perf_counter()
        while len(done) < len(jobs):
            now = time.perf_counter() - start
            while waiting and waiting[0].arrival <= now:
                job = waiting.popleft()
                id = llm.submit(job.prompt, job.sampling)
                late[id] = time.perf_counter() - start - job.arrival  # it came while a step ran
            if len(done) == len(late):  # nothing to do until the next one comes
                time.sleep(waiting[0].arrival - now)
                continue
            done.update(llm.poll())
            tokens, seconds = llm.stats.output_tokens - begun, time.perf_counter() - start
            report(f"{len(done)} of {len(jobs)} requests, {tokens / seconds:.1f} tokens/s")
        seconds = time.perf_counter() - start
        outputs = [done[id] for id in late]  # in order of arrival
        for job, output in zip(jobs, outputs, strict=True):
            for one in output.completions:
                _check_answer(job, one.token_ids)
        answers = [(late[id], one) for id in late for one in done[id].completions]
        return Run(
            requests=len(jobs),
            seconds=seconds,
            first_token=[waited + one.metrics.time_to_first_token for waited, one in answers],
            per_token=[one.metrics.time_per_token for _, one in answers if one.metrics.output_tokens > 1],
            tokens=[one.token_ids for _, one in answers],
            prompt_tokens=sum(output.metrics.prompt_tokens for output in outputs),
            cached_tokens=sum(output.metrics.cached_tokens for output in outputs),
            preemptions=llm.stats.preemptions - preempted,
        )


class Theirs:
    """A peer, which takes like requests as one batch."""

    def __init__(self, peer: Peer) -> None:
        self._peer, self.name, self.version = peer, peer.name, peer.version

    def run(self, jobs: Sequence[Job], report: Report) -> Run:
        prompts = [[token for token in job.prompt if isinstance(token, int)] for job in jobs]
        timing = self._peer.run(prompts, jobs[0].sampling.max_tokens)
        for job, tokens in zip(jobs, timing.tokens, strict=True):
            _check_answer(job, tokens)
        return Run(
            requests=len(jobs),
            seconds=timing.total,
            first_token=[timing.first_token] * len(jobs),
            per_token=[mean(timing.steps)] * len(jobs) if timing.steps else [],
            tokens=timing.tokens,
            prompt_tokens=sum(map(len, prompts)),
        )


def _check_answer(job: Job, tokens: list[int]) -> None:
    """A request that did not give what was asked for measures something else."""
    given, asked = len(tokens), job.sampling.max_tokens
    if given == 0 or (job.sampling.ignore_eos and given != asked):
        raise YalisFailure(
            f"a request for {asked} tokens gave {given}, so nothing was measured; give shorter lengths, or a larger "
            "--max-model-len or --kv-memory"
        )


def prepare(config: EngineConfig, plan: ThroughputPlan) -> tuple[ModelSpec, list[Job] | None]:
    """The model and the dataset's lines, if there is one; refuses work that cannot be before anything is loaded."""
    lines = None if plan.dataset is None else read_dataset(Path(plan.dataset), plan.requests)
    with closing(open_checkpoint(config.model, config.load, config.load_seed)) as checkpoint:
        spec = read_spec(checkpoint.config, checkpoint.label)
    check_length(plan, config.max_model_len or spec.max_position)
    return spec, lines


def measure(
    config: EngineConfig, plan: ThroughputPlan, command: str, report: Report = lambda text: None
) -> results.Result:
    """Run the whole benchmark; `report` hears what it is doing."""
    spec, lines = prepare(config, plan)
    config = _leave_room(config, plan)
    device = resolve_device(config.device)
    dtype = resolve_dtype(config.dtype, spec.dtype, device)
    floored = has_floor(config, device)
    rates = _rates(device, dtype, report) if floored else None
    report("loading the model")
    with LLM(**asdict(config)) as llm:
        check_length(plan, llm.max_model_len)  # a KV cache the user chose may hold less
        engines: list[tuple[str, Engine | str]] = [("yalis", Ours(llm))]
        for name in plan.peer:
            report(f"loading {name}")
            peer = start_peer(name, _peer_setup(config, plan, dtype, device))
            engines.append((name, peer if isinstance(peer, str) else Theirs(peer)))
        turns = [draw_jobs(plan, lines, spec.vocab_size, turn) for turn in range(plan.warmup + plan.repeats)]
        taken = take_turns(engines, turns, plan.warmup, lambda engine, jobs, tell: engine.run(jobs, tell), report)
        described = bandwidth.describe(llm.device)
        topology = topology_of(llm._world)
    ours = taken[0]
    assert not isinstance(ours, str)
    floor = None
    if rates is not None:
        rates = rates.best(_rates(device, dtype, report))  # what it could do at its best in this run
        floor = max(turns[0][-1].arrival, find_floor(ours[-1], config, spec, dtype, rates))
    rows = [
        _row(name, engine, runs, ours, plan, floor, comparable=config.load != "random")
        for (name, engine), runs in zip(engines, taken, strict=True)
    ]
    parameters = {
        **asdict(plan),
        "engine": asdict(config),
        "dtype": str(dtype).removeprefix("torch."),
        **({} if rates is None else asdict(rates)),
        "prompts_digest": digest_of(turns[plan.warmup]),  # of the run that gave these answers
        "answers": [_digest(tokens) for tokens in ours[0].tokens],
    }
    notes = unlike_peers(config, plan.peer)
    return results.new("throughput", parameters, rows, command, [described], notes, topology)


def _leave_room(config: EngineConfig, plan: ThroughputPlan) -> EngineConfig:
    """Beside peers the engine takes as many KV blocks as its work needs, unless told otherwise."""
    config, size = with_block_size(config)
    if not plan.peer or config.kv_blocks is not None or config.kv_memory is not None:
        return config
    (work,) = plan.workloads
    # A sequence starts only where every older one has a block to spare.
    blocks = min(config.max_num_seqs, plan.requests or work.batch) * (-(-work.longest // size) + 1)
    return replace(config, kv_blocks=max(blocks, -(-(config.max_model_len or 0) // size)))


def _peer_setup(config: EngineConfig, plan: ThroughputPlan, dtype: torch.dtype, device: torch.device) -> PeerSetup:
    (work,) = plan.workloads
    return PeerSetup(
        path=locate(config.model, config.load == "auto"),
        random_weights=config.load == "random",
        dtype=dtype,
        device=device,
        longest=work.longest,
        batch=min(config.max_num_seqs, plan.requests or work.batch),
        max_batch_tokens=config.max_batch_tokens,
        peers=len(plan.peer),
    )


def _rates(device: torch.device, dtype: torch.dtype, report: Report) -> bandwidth.DeviceRates:
    report("measuring the device")
    rates = bandwidth.measure(device, dtype)
    release_memory(device)
    return rates


def _digest(tokens: list[int]) -> str:
    """Enough to tell whether two answers are the same."""
    return hashlib.sha256(json.dumps(tokens).encode()).hexdigest()[:12]


def _row(
    name: str,
    engine: Engine | str,
    runs: list[Run] | str,
    ours: list[Run],
    plan: ThroughputPlan,
    floor: float | None,
    comparable: bool,
) -> dict[str, Any]:
    """`comparable`: whether all engines have the same weights."""
    row: dict[str, Any] = dict.fromkeys(result_rows.columns("throughput"))
    row.update(engine=name, version="" if isinstance(engine, str) else engine.version, rate=plan.rate)
    last = ours[-1]
    row.update(requests=last.requests, prompt_tokens=last.prompt_tokens, output_tokens=last.output_tokens)
    if isinstance(runs, str):
        row["status"] = runs
        return row
    seconds = [run.seconds for run in runs]
    speeds = [run.output_tokens / run.seconds for run in runs]
    row.update(
        status="ok",
        seconds=median(seconds),
        tokens_per_s=median(speeds),
        requests_per_s=last.requests / median(seconds),
        cached_tokens=runs[-1].cached_tokens,
        preemptions=sum(run.preemptions for run in runs),
        ratio=median(seconds) / median(run.seconds for run in ours),
    )
    row["seconds_low"], row["seconds_high"] = spread(seconds)
    row["tokens_per_s_low"], row["tokens_per_s_high"] = spread(speeds)
    if floor is not None:
        row.update(floor_s=floor, share_of_floor=floor / row["seconds"])
    first = [1e3 * wait for run in runs for wait in run.first_token]
    later = [1e3 * wait for run in runs for wait in run.per_token]
    for column, waits in (("first_token_ms", first), ("token_ms", later)):
        if waits:  # with one token an answer has no later ones
            row[column], row[f"{column}_p90"], row[f"{column}_p99"] = percentiles(waits, 50, 90, 99)
    if comparable and runs is not ours:
        pairs = [pair for one, two in zip(ours, runs, strict=True) for pair in zip(one.tokens, two.tokens, strict=True)]
        row["same_tokens"] = sum(a == b for a, b in pairs) / len(pairs)
    return row


def find_floor(
    run: Run, config: EngineConfig, spec: ModelSpec, dtype: torch.dtype, rates: bandwidth.DeviceRates
) -> float:
    """Seconds below which the job cannot go: all bytes it must read, or all operations it must do.

    The weights are read once a step, and there are as many steps as the longest answer has tokens, or as it takes to
    give every token with the largest batches. Prompts are computed in the same steps.
    """
    split, dims = split_of(config), ModelDims.of(spec, dtype.itemsize, dtype.itemsize)
    prompt = (run.prompt_tokens - run.cached_tokens) / len(run.tokens)
    seats = config.max_num_seqs * split.replicas
    steps = max(max(map(len, run.tokens)), -(-run.output_tokens // seats))
    work = [decode_work(dims, [prompt + len(tokens) / 2]) for tokens in run.tokens]
    later = [len(tokens) - 1 for tokens in run.tokens]  # the first token comes with the prompt
    read = split.replicas * steps * work[0].weight_bytes
    read += sum(one.kv_bytes * times for one, times in zip(work, later, strict=True))
    flops = prefill_work(dims, [int(prompt)] * len(run.tokens)).flops
    flops += sum(one.flops * times for one, times in zip(work, later, strict=True))
    return max(read / rates.read_bytes_per_s, flops / rates.matmul_flops_per_s) / split.size
