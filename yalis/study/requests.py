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
from yalis.workloads import (
    AnyWorkload,
    ChatWorkload,
    RequestSize,
    Workload,
    draw_arrivals,
    draw_sizes,
    random_prompt,
    read_trace,
)

_MAX_REQUESTS = 1_000_000  # all of them are generated before the first is submitted


@dataclass(frozen=True)
class ThroughputPlan:
    """What `yalis bench throughput` runs. The fields are written to the result as its parameters."""

    workloads: tuple[AnyWorkload, ...] = (Workload(16, 64, 64),)  # mixed if several; empty with a dataset or trace
    dataset: str | None = None  # a JSONL file of requests
    trace: str | None = None  # a JSONL file of lengths and arrival times
    requests: int | None = None  # None: every line of the file, or the batch sizes of the workloads added up
    vary: float = 0.0  # each length is drawn uniformly from (1 - vary) to (1 + vary) times the workload's
    rate: float | None = None  # requests per second of a Poisson process; None: all at once
    warmup: int = 1
    repeats: int = 3
    peer: tuple[str, ...] = ()  # engines to compare with
    seed: int = 0
    temperature: float = 0.0  # 0: greedy
    top_k: int = 0
    top_p: float = 1.0

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
        SamplingParams(temperature=self.temperature, top_k=self.top_k, top_p=self.top_p)  # refuses invalid values
        if self.temperature == 0 and (self.top_k > 0 or self.top_p < 1):
            raise YalisError("--top-k and --top-p have no effect on greedy sampling; give --temperature too")
        if self.dataset is not None and self.temperature:
            raise YalisError("the lines of a dataset have their own sampling parameters; omit --temperature")
        if not 0 <= self.vary < 1:
            raise YalisError(f"vary is {self.vary:g}; give a fraction of at least 0 and below 1, such as 0.5")
        if self.dataset is not None and self.trace is not None:
            raise YalisError("--dataset and --trace exclude each other; give one of them")
        if self.vary:
            for source, used in (
                ("a dataset", self.dataset is not None),
                ("a trace", self.trace is not None),
                ("chat", any(isinstance(one, ChatWorkload) for one in self.workloads)),
            ):
                if used:
                    raise YalisError(f"--vary applies to equal requests, but {source} has its own lengths; omit --vary")
        if self.trace is not None and self.rate is not None:
            raise YalisError("--rate draws arrival times, but a trace has its own; omit --rate")
        if self.dataset is None and self.trace is None and not self.workloads:
            raise YalisError("there are no requests to run; give --workload, such as 16x64x64, --dataset or --trace")
        for name in self.peer:
            if name not in PEERS.names():
                raise YalisError(f"unknown peer {name!r}; accepted: {', '.join(PEERS.names())}")
        from_file = self.dataset is not None or self.trace is not None
        equal = not from_file and len(self.workloads) == 1 and isinstance(self.workloads[0], Workload)
        if self.peer and (not equal or self.rate is not None or self.vary):
            raise YalisError(
                "peers run one batch of equal requests; with --peer give one --workload, such as 16x64x64, and omit "
                "--dataset, --trace, --vary and --rate"
            )

    def sampling(self, max_tokens: int, index: int) -> SamplingParams:
        """Return the sampling parameters of the request at `index`, past any end-of-sequence token."""
        return SamplingParams(
            max_tokens=max_tokens,
            ignore_eos=True,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            seed=self.seed + index if self.temperature else None,
        )

    @property
    def description(self) -> str:
        """A phrase such as "16 requests of 64 + 64 tokens"."""
        if file := self.dataset or self.trace:
            return f"{'all' if self.requests is None else self.requests} lines of {Path(file).name}"
        count = self.requests or sum(one.batch for one in self.workloads)
        lengths = " or ".join(
            "chat" if isinstance(one, ChatWorkload) else f"{one.prompt_len} + {one.output_len}"
            for one in self.workloads
        )
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


def request_sizes(plan: ThroughputPlan) -> list[RequestSize]:
    """Return lengths and arrival times of a plan without a dataset, the same in every repeat."""
    if plan.trace is not None:
        return read_trace(Path(plan.trace), plan.requests)
    sizes = draw_sizes(plan.workloads, plan.seed, plan.requests, plan.vary)
    arrivals = draw_arrivals(len(sizes), plan.rate, plan.seed)
    return [replace(size, arrival=arrival) for size, arrival in zip(sizes, arrivals, strict=True)]


def check_length(plan: ThroughputPlan, limit: int) -> None:
    """Refuse workloads whose sequences may exceed `limit` tokens."""
    if plan.dataset is not None:
        return  # the engine refuses requests that are too long one by one
    if plan.trace is not None:
        max_len = max(size.total_len for size in request_sizes(plan))
    else:
        max_len = max(_max_len(one, plan.vary) for one in plan.workloads)
    if max_len > limit:
        raise YalisError(
            f"prompt and output of the workload take {max_len} tokens, but the context length is {limit}; "
            "give shorter lengths"
        )


def _max_len(workload: AnyWorkload, vary: float) -> int:
    if isinstance(workload, ChatWorkload):
        return workload.total_len
    return int(workload.prompt_len * (1 + vary)) + int(workload.output_len * (1 + vary))


def make_requests(
    plan: ThroughputPlan, dataset: list[TimedRequest] | None, vocab_size: int, turn: int
) -> list[TimedRequest]:
    """Return the requests of one run in order of arrival. Runs with another `turn` differ only in random prompts."""
    if dataset is not None:
        arrivals = draw_arrivals(len(dataset), plan.rate, plan.seed)
        return [replace(request, arrival=arrival) for request, arrival in zip(dataset, arrivals, strict=True)]
    tokens = random.Random(f"{plan.seed}/{turn}")
    return [
        TimedRequest(
            random_prompt(tokens, size.prompt_len, vocab_size),
            plan.sampling(size.output_len, index),
            size.arrival,
        )
        for index, size in enumerate(request_sizes(plan))
    ]
