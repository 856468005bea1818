"""The throughput benchmark: many requests, all at once or with random arrivals, and the latency of each.

Lengths and arrival times are the same in every repeat, so that repeats differ only by noise; random prompts are new.
YALIS and its peers run one after the other in every repeat, so that a machine that slows down affects all of them.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import deque
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import mean, median
from typing import Any, Protocol

import torch

from yalis import __version__
from yalis.checkpoint.resolve import locate, open_checkpoint
from yalis.config import EngineConfig
from yalis.engine.device import release_memory, resolve_device, resolve_dtype, with_block_size
from yalis.engine.expert_choice import resolve_experts, split_of
from yalis.engine.llm import LLM
from yalis.errors import YalisFailure, count_of
from yalis.perfmodel.floors import ModelDims, decode_work, prefill_work
from yalis.spec import ModelSpec, read_spec
from yalis.study import bandwidth, results
from yalis.study.peers.interleaving import Report, run_interleaved
from yalis.study.peers.peer import Peer, PeerSetup
from yalis.study.peers.process import start_peer
from yalis.study.requests import (
    ThroughputPlan,
    TimedRequest,
    check_length,
    digest_requests,
    make_requests,
    read_dataset,
)
from yalis.study.spread import percentiles, spread
from yalis.study.topology import has_floor, llm_topology, note_peer_devices, note_routing
from yalis.types import RequestOutput


@dataclass(frozen=True)
class Run:
    """One run of all requests."""

    requests: int
    seconds: float
    first_token: list[float]  # of each completion, in seconds from the arrival of its request
    per_token: list[float]  # mean time per output token, of each completion with at least two
    tokens: list[list[int]]
    prompt_tokens: int
    cached_tokens: int = 0
    preemptions: int = 0
    #: prompt tokens, output tokens and arrival of each completion, in order of arrival; empty for peers
    sizes: list[tuple[int, int, float]] = field(default_factory=list)
    steps: int | None = None  # of all replicas together; None if the engine does not count them
    schedule_seconds: float | None = None  # host time of the driver, as in EngineStats
    launch_seconds: float | None = None

    @property
    def output_tokens(self) -> int:
        return sum(map(len, self.tokens))


class Engine(Protocol):
    name: str
    version: str

    def run(self, requests: Sequence[TimedRequest], report: Report) -> Run: ...


class YalisEngine:
    """Submits requests to an LLM at their arrival times."""

    name = "yalis"
    version = __version__

    def __init__(self, llm: LLM) -> None:
        self._llm = llm

    def run(self, requests: Sequence[TimedRequest], report: Report) -> Run:
        llm = self._llm
        before = replace(llm.stats)
        waiting = deque(requests)
        delays: dict[int, float] = {}  # by request id: seconds between arrival and submission
        done: dict[int, RequestOutput] = {}
        start = time.perf_counter()
        while len(done) < len(requests):
            now = time.perf_counter() - start
            while waiting and waiting[0].arrival <= now:
                request = waiting.popleft()
                id = llm.submit(request.prompt, request.sampling)
                delays[id] = time.perf_counter() - start - request.arrival  # it arrived during a step
            if len(done) == len(delays):  # idle until the next request arrives
                time.sleep(waiting[0].arrival - now)
                continue
            done.update(llm.poll())
            tokens, seconds = llm.stats.output_tokens - before.output_tokens, time.perf_counter() - start
            report(f"{len(done)} of {count_of(len(requests), 'request')}, {tokens / seconds:.1f} tokens/s")
        seconds = time.perf_counter() - start
        stats = llm.stats
        outputs = [done[id] for id in delays]  # in order of arrival
        for request, output in zip(requests, outputs, strict=True):
            for completion in output.completions:
                _check_length(request, completion.token_ids)
        completions = [(delays[id], completion) for id in delays for completion in done[id].completions]
        return Run(
            requests=len(requests),
            seconds=seconds,
            first_token=[delay + one.metrics.time_to_first_token for delay, one in completions],
            per_token=[one.metrics.time_per_token for _, one in completions if one.metrics.output_tokens > 1],
            tokens=[one.token_ids for _, one in completions],
            prompt_tokens=sum(output.metrics.prompt_tokens for output in outputs),
            cached_tokens=sum(output.metrics.cached_tokens for output in outputs),
            preemptions=stats.preemptions - before.preemptions,
            sizes=[
                (output.metrics.prompt_tokens, len(one.token_ids), request.arrival)
                for request, output in zip(requests, outputs, strict=True)
                for one in output.completions
            ],
            steps=stats.steps - before.steps,
            schedule_seconds=stats.schedule_seconds - before.schedule_seconds,
            launch_seconds=stats.launch_seconds - before.launch_seconds,
        )


class PeerEngine:
    """Runs equal requests on a peer as one batch."""

    def __init__(self, peer: Peer) -> None:
        self._peer, self.name, self.version = peer, peer.name, peer.version

    def run(self, requests: Sequence[TimedRequest], report: Report) -> Run:
        prompts: list[list[int]] = []
        for request in requests:
            assert isinstance(request.prompt, list), "peers receive token ids"
            prompts.append([token for token in request.prompt if isinstance(token, int)])
        timing = self._peer.run(prompts, requests[0].sampling.max_tokens)
        for request, tokens in zip(requests, timing.tokens, strict=True):
            _check_length(request, tokens)
        return Run(
            requests=len(requests),
            seconds=timing.total,
            first_token=[timing.first_token] * len(requests),
            per_token=[mean(timing.steps)] * len(requests) if timing.steps else [],
            tokens=timing.tokens,
            prompt_tokens=sum(map(len, prompts)),
        )


def _check_length(request: TimedRequest, tokens: list[int]) -> None:
    """Refuse an output that is shorter than requested: its times are not those of the workload."""
    count, max_tokens = len(tokens), request.sampling.max_tokens
    if count == 0 or (request.sampling.ignore_eos and count != max_tokens):
        raise YalisFailure(
            f"a request for {max_tokens} tokens returned {count}, so the times are not valid; give shorter lengths, "
            "or a larger --max-model-len or --kv-memory"
        )


def prepare(config: EngineConfig, plan: ThroughputPlan) -> tuple[ModelSpec, list[TimedRequest] | None]:
    """Read the model's config and the dataset, if any, and check the lengths before any weights are loaded."""
    dataset = None if plan.dataset is None else read_dataset(Path(plan.dataset), plan.requests)
    with closing(open_checkpoint(config.model, config.load, config.load_seed)) as checkpoint:
        spec = read_spec(checkpoint.config, checkpoint.label)
    check_length(plan, config.max_model_len or spec.max_position)
    return spec, dataset


def measure(
    config: EngineConfig, plan: ThroughputPlan, command: str, report: Report = lambda text: None
) -> results.Result:
    """Run the benchmark; `report` is called with progress messages."""
    spec, dataset = prepare(config, plan)
    config = resolve_experts(config, spec, config.model)
    config = _limit_kv_cache(config, plan)
    device = resolve_device(config.device)
    dtype = resolve_dtype(config.dtype, spec.dtype, device)
    rates = _measure_rates(device, dtype, report) if has_floor(config, device) else None
    report("loading the model")
    with LLM(**asdict(config)) as llm:
        check_length(plan, llm.max_model_len)  # a small --kv-memory or --kv-blocks lowers it
        engines: list[tuple[str, Engine | str]] = [("yalis", YalisEngine(llm))]
        for name in plan.peer:
            report(f"loading {name}")
            peer = start_peer(name, _peer_setup(config, plan, dtype, device))
            engines.append((name, peer if isinstance(peer, str) else PeerEngine(peer)))
        turns = [make_requests(plan, dataset, spec.vocab_size, turn) for turn in range(plan.warmup + plan.repeats)]
        runs = run_interleaved(
            engines, turns, plan.warmup, lambda engine, requests, progress: engine.run(requests, progress), report
        )
        device_facts = bandwidth.describe_device(llm.device)
        topology, scheduler = llm_topology(llm), llm.scheduler_settings
    ours = runs[0]
    assert not isinstance(ours, str)
    floor = None
    if rates is not None:
        rates = rates.best(_measure_rates(device, dtype, report))  # the best seen in this run
        floor = max(turns[0][-1].arrival, find_floor(ours[-1], config, spec, dtype, rates))
    rows = [
        _row(name, engine, engine_runs, ours, plan, floor, comparable=config.load != "random")
        for (name, engine), engine_runs in zip(engines, runs, strict=True)
    ]
    parameters = {
        **asdict(plan),
        "engine": asdict(config),
        "dtype": str(dtype).removeprefix("torch."),
        **({} if rates is None else asdict(rates)),
        "prompts_digest": digest_requests(turns[plan.warmup]),  # of the run whose answers follow
        "answers": [_digest(tokens) for tokens in ours[0].tokens],
        # What the planner needs to replay the run: see study/replay.py.
        "sizes": ours[0].sizes,
        "scheduler": scheduler,
    }
    notes = note_peer_devices(config, plan.peer) + note_routing(config, spec)
    return results.new("throughput", parameters, rows, command, [device_facts], notes, topology)


def _limit_kv_cache(config: EngineConfig, plan: ThroughputPlan) -> EngineConfig:
    """With peers, allocate only the KV blocks that the workload needs, unless the user gave a KV cache size."""
    config, size = with_block_size(config)
    if not plan.peer or config.kv_blocks is not None or config.kv_memory is not None:
        return config
    (workload,) = plan.workloads
    # The scheduler admits a sequence only if every running one can still get another block.
    blocks = min(config.max_num_seqs, plan.requests or workload.batch) * (-(-workload.total_len // size) + 1)
    return replace(config, kv_blocks=max(blocks, -(-(config.max_model_len or 0) // size)))


def _peer_setup(config: EngineConfig, plan: ThroughputPlan, dtype: torch.dtype, device: torch.device) -> PeerSetup:
    (workload,) = plan.workloads
    return PeerSetup(
        path=locate(config.model, config.load == "auto"),
        random_weights=config.load == "random",
        dtype=dtype,
        device=device,
        max_model_len=workload.total_len,
        max_num_seqs=min(config.max_num_seqs, plan.requests or workload.batch),
        max_batch_tokens=config.max_batch_tokens,
        num_peers=len(plan.peer),
        routing=config.routing,
    )


def _measure_rates(device: torch.device, dtype: torch.dtype, report: Report) -> bandwidth.DeviceRates:
    report("measuring the device's bandwidth")
    rates = bandwidth.measure_rates(device, dtype)
    release_memory(device)
    return rates


def _digest(tokens: list[int]) -> str:
    """Hash an answer, to compare it with those of other runs."""
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
    """Return the row of one engine. `comparable` is false if the engines have different (random) weights."""
    row: dict[str, Any] = results.empty_row("throughput")
    row.update(engine=name, version="" if isinstance(engine, str) else engine.version, rate=plan.rate)
    last = ours[-1]
    row.update(requests=last.requests, prompt_tokens=last.prompt_tokens, output_tokens=last.output_tokens)
    if isinstance(runs, str):
        row["status"] = runs
        return row
    seconds = [run.seconds for run in runs]
    throughputs = [run.output_tokens / run.seconds for run in runs]
    row.update(
        status="ok",
        seconds=median(seconds),
        tokens_per_s=median(throughputs),
        requests_per_s=last.requests / median(seconds),
        cached_tokens=runs[-1].cached_tokens,
        preemptions=sum(run.preemptions for run in runs),
        ratio=median(seconds) / median(run.seconds for run in ours),
    )
    if runs is ours:
        row.update(steps=runs[-1].steps, schedule_s=runs[-1].schedule_seconds, launch_s=runs[-1].launch_seconds)
    row["seconds_low"], row["seconds_high"] = spread(seconds)
    row["tokens_per_s_low"], row["tokens_per_s_high"] = spread(throughputs)
    if floor is not None:
        row.update(floor_s=floor, share_of_floor=floor / row["seconds"])
    ttft = [1e3 * seconds for run in runs for seconds in run.first_token]
    tpot = [1e3 * seconds for run in runs for seconds in run.per_token]
    for column, latencies in (("first_token_ms", ttft), ("token_ms", tpot)):
        if latencies:  # answers of one token have no time per output token
            row[column], row[f"{column}_p90"], row[f"{column}_p99"] = percentiles(latencies, 50, 90, 99)
    if comparable and runs is not ours:
        pairs = [pair for one, two in zip(ours, runs, strict=True) for pair in zip(one.tokens, two.tokens, strict=True)]
        row["same_tokens"] = sum(a == b for a, b in pairs) / len(pairs)
    return row


def find_floor(
    run: Run, config: EngineConfig, spec: ModelSpec, dtype: torch.dtype, rates: bandwidth.DeviceRates
) -> float:
    """Return a lower bound in seconds for `run`: the larger of reading all bytes and doing all operations.

    The weights are read once per step, of a mixture of experts those of the experts that the step reaches. The number
    of steps is the length of the longest answer, or all output tokens over the largest batch, whichever is larger.
    Prefill is assumed to run in the same steps.
    """
    split, dims = split_of(config), ModelDims.of(spec, dtype.itemsize, dtype.itemsize)
    prompt = (run.prompt_tokens - run.cached_tokens) / len(run.tokens)
    max_batch = config.max_num_seqs * split.replicas
    steps = max(max(map(len, run.tokens)), -(-run.output_tokens // max_batch))
    work = [decode_work(dims, [prompt + len(tokens) / 2]) for tokens in run.tokens]
    decode_steps = [len(tokens) - 1 for tokens in run.tokens]  # the first token comes from prefill
    largest = -(-min(max_batch, len(run.tokens)) // split.replicas)
    read = split.replicas * least_weight_bytes(dims, steps, run.output_tokens / split.replicas, largest)
    read += sum(one.kv_bytes * count for one, count in zip(work, decode_steps, strict=True))
    flops = prefill_work(dims, [int(prompt)] * len(run.tokens)).flops
    flops += sum(one.flops * count for one, count in zip(work, decode_steps, strict=True))
    return max(read / rates.read_bytes_per_s, flops / rates.matmul_flops_per_s) / split.size


def least_weight_bytes(dims: ModelDims, steps: int, tokens: float, largest: int) -> float:
    """Return the least bytes of weights that `steps` decode steps read, which compute `tokens` tokens together.

    `largest`: tokens of the largest step. Tokens share experts, so the bytes of a step are a concave function of its
    tokens, and some steps of `largest` tokens among steps of one read the least."""
    alone, full = (decode_work(dims, [0.0] * count).weight_bytes for count in (1, largest))
    further = (full - alone) / (largest - 1) if largest > 1 else 0.0
    return steps * alone + max(0.0, tokens - steps) * further
