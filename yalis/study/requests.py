"""The requests of a throughput run: random or read from a file, each with its arrival time."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from yalis.batch.input import InvalidLine, parse, read_raw
from yalis.errors import YalisError, count_of
from yalis.study.peers.process import PEERS
from yalis.types import Prompt, SamplingParams
from yalis.workloads import Workload, random_prompt

_MAX_REQUESTS = 1_000_000  # all of them are generated before the first is submitted


@dataclass(frozen=True)
class ThroughputPlan:
    """What `yalis bench throughput` runs. The fields are written to the result as its parameters."""

    workloads: tuple[Workload, ...] = (Workload(16, 64, 64),)  # mixed if several; empty with a dataset
    dataset: str | None = None  # a JSONL file
    requests: int | None = None  # None: every line of the dataset, or the batch sizes of the workloads added up
    vary: float = 0.0  # each length is drawn uniformly from (1 - vary) to (1 + vary) times the workload's
    rate: float | None = None  # requests per second of a Poisson process; None: all at once
    warmup: int = 1
    repeats: int = 3
    peer: tuple[str, ...] = ()  # engines to compare with
    seed: int = 0

    def __post_init__(self) -> None:
        for name, low in (("warmup", 0), ("repeats", 1)):
            if getattr(self, name) < low:
                raise YalisError(f"{name} is {getattr(self, name)}; give a whole number of at least {low}")
        if self.requests is not None and self.requests < 1:
            raise YalisError(f"requests is {self.requests}; give a whole number of at least 1")
        if (count := self.requests or sum(one.batch for one in self.workloads)) > _MAX_REQUESTS:
            raise YalisError(
                f"the workload has {count} requests; give at most {_MAX_REQUESTS}, with a smaller --workload or "
                "--requests"
            )
        if self.rate is not None and not 0 < self.rate < float("inf"):
            raise YalisError(f"rate is {self.rate:g}; give requests per second above 0, or omit --rate")
        if not 0 <= self.vary < 1:
            raise YalisError(f"vary is {self.vary:g}; give a fraction of at least 0 and below 1, such as 0.5")
        if self.dataset is not None and self.vary:
            raise YalisError("--vary applies to workloads, but a dataset has its own lengths; omit --vary")
        if self.dataset is None and not self.workloads:
            raise YalisError("there are no requests to run; give --workload, such as 16x64x64, or --dataset")
        for name in self.peer:
            if name not in PEERS.names():
                raise YalisError(f"unknown peer {name!r}; accepted: {', '.join(PEERS.names())}")
        if self.peer and (self.dataset is not None or self.rate is not None or self.vary or len(self.workloads) > 1):
            raise YalisError(
                "peers run one batch of equal requests; with --peer give one --workload, and omit --dataset, --vary "
                "and --rate"
            )

    @property
    def description(self) -> str:
        """A phrase such as "16 requests of 64 + 64 tokens"."""
        if self.dataset is not None:
            return f"{'all' if self.requests is None else self.requests} lines of {Path(self.dataset).name}"
        count = self.requests or sum(one.batch for one in self.workloads)
        lengths = " or ".join(f"{one.prompt_len} + {one.output_len}" for one in self.workloads)
        return f"{count_of(count, 'request')} of {lengths} tokens" + (f" ± {self.vary:.0%}" if self.vary else "")


@dataclass(frozen=True)
class TimedRequest:
    prompt: Prompt
    sampling: SamplingParams
    arrival: float  # seconds from the start of the run


def read_dataset(path: Path, limit: int | None) -> list[TimedRequest]:
    """Read the first `limit` lines of a JSONL file, all arriving at 0.

    An invalid line is an error: without its answer the figures would describe another workload.
    """
    requests: list[TimedRequest] = []
    try:
        with path.open("rb") as file:
            for raw in read_raw(file):
                line = parse(raw, "", {})
                if isinstance(line, InvalidLine):
                    raise YalisError(f"line {line.line_number} of {path} is invalid: {line.message}")
                requests.append(TimedRequest(line.prompt, line.sampling, 0.0))
                if len(requests) == limit:
                    break
    except OSError as error:
        raise YalisError(f"cannot read {path}: {error.strerror}; give a JSONL file") from error
    if len(requests) < (limit or 1):
        raise YalisError(f"{path} has {count_of(len(requests), 'request')}; give a file with at least {limit or 1}")
    return requests


def digest_requests(requests: Iterable[TimedRequest]) -> str:
    """Hash prompts and sampling parameters, to recognise the same requests whatever their file is called."""
    digest = hashlib.sha256()
    for request in requests:
        digest.update(json.dumps([request.prompt, request.sampling.identity()], sort_keys=True).encode())
    return digest.hexdigest()[:16]


def check_length(plan: ThroughputPlan, limit: int) -> None:
    """Refuse workloads whose sequences may exceed `limit` tokens."""
    if plan.dataset is not None:
        return  # the engine refuses requests that are too long one by one
    max_len = max(_max_len(one.prompt_len, plan.vary) + _max_len(one.output_len, plan.vary) for one in plan.workloads)
    if max_len > limit:
        raise YalisError(
            f"prompt and output of the workload take {max_len} tokens, but the context length is {limit}; "
            "give shorter lengths"
        )


def _max_len(length: int, vary: float) -> int:
    return int(length * (1 + vary))


def make_requests(
    plan: ThroughputPlan, dataset: list[TimedRequest] | None, vocab_size: int, turn: int
) -> list[TimedRequest]:
    """Return the requests of one run in order of arrival. Runs with another `turn` differ only in random prompts."""
    requests = dataset if dataset is not None else _random_requests(plan, vocab_size, turn)
    if plan.rate is None:
        return requests
    gaps = random.Random(f"{plan.seed}/arrivals")
    now, arriving = 0.0, []
    for index, request in enumerate(requests):
        now += gaps.expovariate(plan.rate) if index else 0.0  # the first arrives at once
        arriving.append(replace(request, arrival=now))
    return arriving


def _random_requests(plan: ThroughputPlan, vocab_size: int, turn: int) -> list[TimedRequest]:
    lengths, tokens = random.Random(f"{plan.seed}/lengths"), random.Random(f"{plan.seed}/{turn}")
    shapes = [one for one in plan.workloads for _ in range(one.batch)]
    if plan.requests is not None:
        shapes = lengths.choices(shapes, k=plan.requests)
    elif len(plan.workloads) > 1:
        lengths.shuffle(shapes)

    def draw_length(middle: int) -> int:
        return lengths.randint(max(1, middle - int(middle * plan.vary)), _max_len(middle, plan.vary))

    requests = []
    for shape in shapes:
        prompt = random_prompt(tokens, draw_length(shape.prompt_len), vocab_size)
        sampling = SamplingParams(max_tokens=draw_length(shape.output_len), ignore_eos=True)
        requests.append(TimedRequest(prompt, sampling, 0.0))
    return requests
