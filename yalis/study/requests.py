"""The requests of a throughput run: drawn from workloads or read from a file, and when each of them comes."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from yalis.batch.input import BadLine, parse, read_raw
from yalis.errors import YalisError
from yalis.study.peers.process import PEERS
from yalis.study.workloads import Workload, draw_prompt
from yalis.types import Prompt, SamplingParams

_MOST_REQUESTS = 1_000_000  # all are drawn before the first is sent


@dataclass(frozen=True)
class ThroughputPlan:
    workloads: tuple[Workload, ...] = (Workload(16, 64, 64),)  # together the mix; none with a dataset
    dataset: str | None = None  # a JSONL file
    requests: int | None = None  # None: every line, or as many as the batches of the workloads
    vary: float = 0.0  # each length is drawn from this share below to this share above
    rate: float | None = None  # requests a second, as a Poisson process; None: all at once
    warmup: int = 1
    repeats: int = 3
    peer: tuple[str, ...] = ()  # engines to measure beside ours
    seed: int = 0

    def __post_init__(self) -> None:
        for name, low in (("warmup", 0), ("repeats", 1)):
            if getattr(self, name) < low:
                raise YalisError(f"{name} is {getattr(self, name)}; give a whole number of at least {low}")
        if self.requests is not None and self.requests < 1:
            raise YalisError(f"requests is {self.requests}; give a whole number of at least 1")
        if (count := self.requests or sum(one.batch for one in self.workloads)) > _MOST_REQUESTS:
            raise YalisError(
                f"the work is {count} requests; give at most {_MOST_REQUESTS}, by a smaller --workload or --requests"
            )
        if self.rate is not None and not 0 < self.rate < float("inf"):
            raise YalisError(f"rate is {self.rate:g}; give requests a second, above 0, or leave it out for all at once")
        if not 0 <= self.vary < 1:
            raise YalisError(f"vary is {self.vary:g}; give a share from 0 to below 1, such as 0.5")
        if self.dataset is not None and self.vary:
            raise YalisError("vary is for workloads, and a dataset has its own lengths; leave --vary out")
        if self.dataset is None and not self.workloads:
            raise YalisError("there is no work; give --workload, such as 16x64x64, or --dataset")
        for name in self.peer:
            if name not in PEERS.names():
                raise YalisError(f"unknown peer {name!r}; accepted: {', '.join(PEERS.names())}")
        if self.peer and (self.dataset is not None or self.rate is not None or self.vary or len(self.workloads) > 1):
            raise YalisError(
                "peers take like requests all at once; beside --peer give one --workload, and leave --dataset, --vary "
                "and --rate out"
            )

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


def read_dataset(path: Path, most: int | None) -> list[Job]:
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


def digest_of(jobs: Iterable[Job]) -> str:
    """Equal where the requests are, whatever the file is called that they came from."""
    told = hashlib.sha256()
    for job in jobs:
        told.update(json.dumps([job.prompt, asdict(job.sampling)], sort_keys=True).encode())
    return told.hexdigest()[:16]


def check_length(plan: ThroughputPlan, limit: int) -> None:
    if plan.dataset is not None:
        return  # what does not fit is refused one by one
    longest = max(_most(one.prompt_len, plan.vary) + _most(one.output_len, plan.vary) for one in plan.workloads)
    if longest > limit:
        raise YalisError(
            f"prompt and answer of the workload take {longest} tokens, but the context holds {limit}; give less"
        )


def _most(length: int, vary: float) -> int:
    return int(length * (1 + vary))


def draw_jobs(plan: ThroughputPlan, lines: list[Job] | None, vocab_size: int, turn: int) -> list[Job]:
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
