"""The throughput benchmark: a job of many requests, all at once or arriving at random, and how long each waited.

Work is a mix of workloads with random prompts, or the lines of a JSONL file as `yalis batch` takes them. Lengths and
arrivals are the same in every repeat, so that what repeats differ by is noise; random prompts are fresh.
"""

from __future__ import annotations

import hashlib
import json
import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from yalis import __version__, results
from yalis.checkpoint.resolve import open_checkpoint
from yalis.config import EngineConfig
from yalis.engine.device import release_memory, resolve_device, resolve_dtype
from yalis.engine.llm import LLM
from yalis.engine.offline_input import BadLine, parse, read_raw
from yalis.engine.team import split_of
from yalis.errors import YalisError, YalisFailure
from yalis.perfmodel.floors import ModelDims, decode_work, prefill_flops
from yalis.spec import ModelSpec, read_spec
from yalis.study import bandwidth
from yalis.study.spread import percentiles, spread
from yalis.study.workloads import Workload, draw_prompt
from yalis.types import Completion, Prompt, RequestOutput, SamplingParams

Report = Callable[[str], None]


@dataclass(frozen=True)
class ThroughputPlan:
    workloads: tuple[Workload, ...] = (Workload(16, 64, 64),)  # together the mix; none with a dataset
    dataset: str | None = None  # a JSONL file
    requests: int | None = None  # None: every line, or as many as the batches of the workloads
    vary: float = 0.0  # each length is drawn from this share below to this share above
    rate: float | None = None  # requests a second, as a Poisson process; None: all at once
    warmup: int = 1
    repeats: int = 3
    seed: int = 0

    def __post_init__(self) -> None:
        for name, low in (("warmup", 0), ("repeats", 1)):
            if getattr(self, name) < low:
                raise YalisError(f"{name} is {getattr(self, name)}; give a whole number of at least {low}")
        if self.requests is not None and self.requests < 1:
            raise YalisError(f"requests is {self.requests}; give a whole number of at least 1")
        if self.rate is not None and not 0 < self.rate < float("inf"):
            raise YalisError(f"rate is {self.rate:g}; give requests a second, above 0, or leave it out for all at once")
        if not 0 <= self.vary < 1:
            raise YalisError(f"vary is {self.vary:g}; give a share from 0 to below 1, such as 0.5")
        if self.dataset is not None and self.vary:
            raise YalisError("vary is for workloads, and a dataset has its own lengths; leave --vary out")
        if self.dataset is None and not self.workloads:
            raise YalisError("there is no work; give --workload, such as 16x64x64, or --dataset")

    @property
    def work(self) -> str:
        """ "16 requests of 64 + 64 tokens"."""
        if self.dataset is not None:
            return f"{'all' if self.requests is None else self.requests} lines of {Path(self.dataset).name}"
        count = self.requests or sum(one.batch for one in self.workloads)
        lengths = " or ".join(f"{one.prompt_len} + {one.output_len}" for one in self.workloads)
        return f"{count} requests of {lengths} tokens" + (f", give or take {self.vary:.0%}" if self.vary else "")


@dataclass(frozen=True)
class Job:
    """One request and when it comes, in seconds from the start."""

    prompt: Prompt
    sampling: SamplingParams
    arrival: float


@dataclass(frozen=True)
class Run:
    """All jobs done once."""

    requests: int
    seconds: float
    first_token: list[float]  # of each answer, from its request's arrival on
    per_token: list[float]  # of each answer that has a second token
    tokens: list[list[int]]
    prompt_tokens: int
    cached_tokens: int
    preemptions: int

    @property
    def output_tokens(self) -> int:
        return sum(map(len, self.tokens))


def measure(
    config: EngineConfig, plan: ThroughputPlan, command: str, report: Report = lambda text: None
) -> results.Result:
    """Run the whole benchmark; `report` hears what it is doing."""
    lines = None if plan.dataset is None else _read_dataset(Path(plan.dataset), plan.requests)
    with closing(open_checkpoint(config.model, config.load, config.load_seed)) as checkpoint:
        spec = read_spec(checkpoint.config, checkpoint.label)
    _check_length(plan, config.max_model_len or spec.max_position)
    device = resolve_device(config.device)
    dtype = resolve_dtype(config.dtype, spec.dtype, device)
    alone = _ranks_alone(config, device)
    rates = _rates(device, dtype, report) if alone else None
    report("loading the model")
    with LLM(**asdict(config)) as llm:
        _check_length(plan, llm.max_model_len)  # a KV cache the user chose may hold less
        runs = [
            _run(llm, _jobs(plan, lines, llm.spec.vocab_size, turn), plan, turn, report)
            for turn in range(plan.warmup + plan.repeats)
        ][plan.warmup :]
        described = bandwidth.describe(llm.device)
        assert llm._world is not None
        topology = results.topology([member.node for member in llm._world.members])
    if rates is not None:  # what the device could do at its best in this run
        rates = rates.best(_rates(device, dtype, report))
    row = _row(runs, plan)
    if rates is not None:
        arrival = _jobs(plan, lines, spec.vocab_size, 0)[-1].arrival
        row["floor_s"] = max(arrival, _floor(runs[-1], config, spec, dtype, rates))
        row["share_of_floor"] = row["floor_s"] / row["seconds"]
    parameters = {
        **asdict(plan),
        "engine": asdict(config),
        "dtype": str(dtype).removeprefix("torch."),
        **({} if rates is None else asdict(rates)),
        "answers": [_digest(tokens) for tokens in runs[0].tokens],
    }
    return results.new("throughput", parameters, [row], command, [described], topology=topology)


def _rates(device: torch.device, dtype: torch.dtype, report: Report) -> bandwidth.DeviceRates:
    report("measuring the device")
    rates = bandwidth.measure(device, dtype)
    release_memory(device)
    return rates


def _ranks_alone(config: EngineConfig, device: torch.device) -> bool:
    """Whether every rank has a device to itself, so that the floor of one tells that of all."""
    return split_of(config).size == 1 or (device.type == "cuda" and config.ranks_per_gpu == 1)


# The work


def _read_dataset(path: Path, most: int | None) -> list[Job]:
    """The lines as jobs; one that cannot be used is refused, since its answer would be missing from the figures."""
    jobs: list[Job] = []
    try:
        with path.open("rb") as file:
            for raw in read_raw(file):
                line = parse(raw, "", {})
                if isinstance(line, BadLine):
                    raise YalisError(f"line {line.number} of {path} cannot be used: {line.message}")
                jobs.append(Job(line.prompt, line.sampling, 0.0))
                if len(jobs) == most:
                    break
    except OSError as error:
        raise YalisError(f"cannot read {path}: {error.strerror}; give a JSONL file") from error
    if len(jobs) < (most or 1):
        raise YalisError(f"{path} has {len(jobs)} requests; give a file with at least {most or 1}")
    return jobs


def _check_length(plan: ThroughputPlan, limit: int) -> None:
    if plan.dataset is not None:
        return  # what does not fit is refused one by one
    longest = max(_most(one.prompt_len, plan.vary) + _most(one.output_len, plan.vary) for one in plan.workloads)
    if longest > limit:
        raise YalisError(
            f"prompt and answer of the workload take {longest} tokens, but the context holds {limit}; give less"
        )


def _most(length: int, vary: float) -> int:
    return int(length * (1 + vary))


def _jobs(plan: ThroughputPlan, lines: list[Job] | None, vocab_size: int, turn: int) -> list[Job]:
    """The jobs of one run, in order of arrival; only random prompts depend on `turn`."""
    jobs = lines if lines is not None else _draw(plan, vocab_size, turn)
    if plan.rate is None:
        return jobs
    gaps = random.Random(f"{plan.seed}/arrivals")
    now, arriving = 0.0, []
    for number, job in enumerate(jobs):
        now += gaps.expovariate(plan.rate) if number else 0.0  # the first comes at once
        arriving.append(replace(job, arrival=now))
    return arriving


def _draw(plan: ThroughputPlan, vocab_size: int, turn: int) -> list[Job]:
    lengths, tokens = random.Random(f"{plan.seed}/lengths"), random.Random(f"{plan.seed}/{turn}")
    shapes = [one for one in plan.workloads for _ in range(one.batch)]
    if plan.requests is not None:
        shapes = lengths.choices(shapes, k=plan.requests)
    elif len(plan.workloads) > 1:
        lengths.shuffle(shapes)

    def length(middle: int) -> int:
        return lengths.randint(max(1, middle - int(middle * plan.vary)), _most(middle, plan.vary))

    jobs = []
    for shape in shapes:
        prompt = draw_prompt(tokens, length(shape.prompt_len), vocab_size)
        jobs.append(Job(prompt, SamplingParams(max_tokens=length(shape.output_len), ignore_eos=True), 0.0))
    return jobs


# One run


def _run(llm: LLM, jobs: Sequence[Job], plan: ThroughputPlan, turn: int, report: Report) -> Run:
    kind = f"repeat {turn - plan.warmup + 1}/{plan.repeats}" if turn >= plan.warmup else "warm-up"
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
        tokens = llm.stats.output_tokens - begun
        report(f"{kind}: {len(done)} of {len(jobs)} requests, {tokens / (time.perf_counter() - start):.1f} tokens/s")
    seconds = time.perf_counter() - start
    outputs = [done[id] for id in late]  # in order of arrival
    for job, output in zip(jobs, outputs, strict=True):
        check_answers(job, output.completions)
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


def check_answers(job: Job, answers: Sequence[Completion]) -> None:
    """A request that did not give what was asked for measures something else."""
    for one in answers:
        given, asked = len(one.token_ids), job.sampling.max_tokens
        if given == 0 or (job.sampling.ignore_eos and given != asked):
            raise YalisFailure(
                f"a request for {asked} tokens gave {given} (its end: {one.finish_reason}), so nothing was measured; "
                "give shorter lengths, or a larger --max-model-len or --kv-memory"
            )


def _digest(tokens: list[int]) -> str:
    """Enough to tell whether two answers are the same."""
    return hashlib.sha256(json.dumps(tokens).encode()).hexdigest()[:12]


# What the runs come to


def _row(runs: Sequence[Run], plan: ThroughputPlan) -> dict[str, Any]:
    row: dict[str, Any] = dict.fromkeys(results.columns("throughput"))
    seconds = [run.seconds for run in runs]
    speeds = [run.output_tokens / run.seconds for run in runs]
    first = [1e3 * wait for run in runs for wait in run.first_token]
    later = [1e3 * wait for run in runs for wait in run.per_token]
    row.update(
        engine="yalis",
        version=__version__,
        status="ok",
        requests=runs[-1].requests,
        prompt_tokens=runs[-1].prompt_tokens,
        output_tokens=runs[-1].output_tokens,
        rate=plan.rate,
        seconds=median(seconds),
        tokens_per_s=median(speeds),
        requests_per_s=runs[-1].requests / median(seconds),
        cached_tokens=runs[-1].cached_tokens,
        preemptions=sum(run.preemptions for run in runs),
        ratio=1.0,
    )
    row["seconds_low"], row["seconds_high"] = spread(seconds)
    row["tokens_per_s_low"], row["tokens_per_s_high"] = spread(speeds)
    for name, waits in (("first_token_ms", first), ("token_ms", later)):
        if waits:  # with one token an answer has no later ones
            row[name], row[f"{name}_p90"], row[f"{name}_p99"] = percentiles(waits, 50, 90, 99)
    return row


def _floor(run: Run, config: EngineConfig, spec: ModelSpec, dtype: torch.dtype, rates: bandwidth.DeviceRates) -> float:
    """Seconds below which the job cannot go: all bytes it must read, or all operations it must do.

    The weights are read once a step, and there are as many steps as the longest answer has tokens, or as it takes to
    give every token with the largest batches. Prompts are computed in the same steps.
    """
    split, dims = split_of(config), ModelDims.of(spec, dtype.itemsize, dtype.itemsize)
    prompt = (run.prompt_tokens - run.cached_tokens) / len(run.tokens)
    contexts = [prompt + len(tokens) / 2 for tokens in run.tokens]
    seats = config.max_num_seqs * split.replicas
    steps = max(max(map(len, run.tokens)), -(-run.output_tokens // seats))
    work = [
        (decode_work(dims, [context]), len(tokens) - 1) for context, tokens in zip(contexts, run.tokens, strict=True)
    ]
    read = split.replicas * steps * work[0][0].weight_bytes + sum(one.kv_bytes * times for one, times in work)
    flops = sum(one.flops * times for one, times in work) + prefill_flops(dims, [int(prompt)] * len(run.tokens))
    ranks = split.size
    return max(read / (ranks * rates.read_bytes_per_s), flops / (ranks * rates.matmul_flops_per_s))
