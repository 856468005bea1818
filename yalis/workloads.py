"""The `--workload` and `--trace` of benchmarks and planner: how many requests, their lengths and arrival times.

A workload is a batch of equal requests (a name, or batch size x prompt length x output length) or `chat`, whose lengths
are drawn. A trace is a file of lengths and arrival times. Prompts are random token ids, so that any checkpoint can run
them and the prefix cache never hits.
"""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Union

from yalis.errors import YalisError, count_of


@dataclass(frozen=True)
class Workload:
    """`batch` requests of `prompt_len` tokens each, which generate `output_len` tokens each."""

    batch: int
    prompt_len: int
    output_len: int

    def __post_init__(self) -> None:
        if min(self.batch, self.prompt_len, self.output_len) < 1:
            raise YalisError(
                f"workload {self} has a number below 1; give batch x prompt x output, such as 16x2480x2048"
            )

    @property
    def total_len(self) -> int:
        """Length of a finished sequence: prompt and output tokens."""
        return self.prompt_len + self.output_len

    def __str__(self) -> str:
        return f"{self.batch}x{self.prompt_len}x{self.output_len}"


@dataclass(frozen=True)
class ChatWorkload:
    """`batch` requests of different lengths, drawn from log-normal distributions that resemble conversations."""

    batch: int = 768
    name: str = "chat"

    def __post_init__(self) -> None:
        if self.batch < 1:
            raise YalisError(f"workload {self} has no requests; give a number of at least 1, such as chat:200")

    @property
    def total_len(self) -> int:
        """Length of the longest sequence that may be drawn."""
        return _CHAT_MAX_PROMPT + _CHAT_MAX_OUTPUT

    def draw(self, rng: random.Random) -> tuple[int, int]:
        """Return the prompt and output length of the next request."""
        prompt = min(int(rng.lognormvariate(5.3, 0.9)) + 8, _CHAT_MAX_PROMPT)
        return prompt, min(int(rng.lognormvariate(5.2, 0.7)) + 8, _CHAT_MAX_OUTPUT)

    def __str__(self) -> str:
        return f"{self.name}:{self.batch}"


_CHAT_MAX_PROMPT, _CHAT_MAX_OUTPUT = 2000, 1000
AnyWorkload = Union[Workload, ChatWorkload]

NAMED = {
    "poster": Workload(16, 2480, 2048),  # the workload of arXiv 2511.09557
    "prefill-heavy": Workload(16, 2048, 128),
    "decode-heavy": Workload(16, 128, 2048),
}
#: for the help of flags that accept parse_any_workload
ANY_WORKLOAD = f"{', '.join(NAMED)}, chat, chat:N (N requests), or batch x prompt x output"


def parse_workload(text: str) -> Workload:
    """Parse a batch of equal requests: a name such as `poster`, or three numbers such as `16x2480x2048`."""
    if text in NAMED:
        return NAMED[text]
    if not re.fullmatch(r"\d{1,9}x\d{1,9}x\d{1,9}", text):
        raise YalisError(
            f"unknown workload {text!r}; accepted: {', '.join(NAMED)}, or batch x prompt x output such as 8x64x32"
        )
    return Workload(*map(int, text.split("x")))


def parse_any_workload(text: str) -> AnyWorkload:
    """Parse a batch of equal requests as parse_workload() does, or `chat`, or `chat:200` for 200 requests."""
    if text == "chat":
        return ChatWorkload()
    if re.fullmatch(r"chat:\d{1,9}", text):
        return ChatWorkload(int(text.removeprefix("chat:")))
    if text not in NAMED and not re.fullmatch(r"\d{1,9}x\d{1,9}x\d{1,9}", text):
        raise YalisError(f"unknown workload {text!r}; accepted: {ANY_WORKLOAD} such as 8x64x32")
    return parse_workload(text)


@dataclass(frozen=True)
class RequestSize:
    """A request without its tokens."""

    prompt_len: int
    output_len: int
    arrival: float = 0.0  # seconds from the start of the run

    @property
    def total_len(self) -> int:
        return self.prompt_len + self.output_len


def draw_sizes(
    workloads: Sequence[AnyWorkload], seed: int, requests: int | None = None, vary: float = 0.0
) -> list[RequestSize]:
    """Return the requests of `workloads`, all arriving at 0; several workloads are mixed in random order.

    `requests`: draw this many instead of the batch sizes of the workloads added up. `vary`: each length of equal
    requests is drawn uniformly from (1 - vary) to (1 + vary) times the workload's.
    """
    rng = random.Random(f"{seed}/lengths")
    shapes = [one for one in workloads for _ in range(one.batch)]
    if requests is not None:
        shapes = rng.choices(shapes, k=requests)
    elif len(workloads) > 1:
        rng.shuffle(shapes)

    def draw_length(middle: int) -> int:
        return rng.randint(max(1, middle - int(middle * vary)), int(middle * (1 + vary)))

    def draw(shape: AnyWorkload) -> tuple[int, int]:
        if isinstance(shape, ChatWorkload):
            return shape.draw(rng)
        return draw_length(shape.prompt_len), draw_length(shape.output_len)

    return [RequestSize(*draw(shape)) for shape in shapes]


def draw_arrivals(count: int, rate: float | None, seed: int) -> list[float]:
    """Return arrival times in seconds: a Poisson process of `rate` requests per second, or all 0 without a rate."""
    if rate is None:
        return [0.0] * count
    rng = random.Random(f"{seed}/arrivals")
    now, arrivals = 0.0, []
    for index in range(count):
        now += rng.expovariate(rate) if index else 0.0  # the first arrives at once
        arrivals.append(now)
    return arrivals


def read_trace(path: Path, limit: int | None = None) -> list[RequestSize]:
    """Read a trace, and return its requests in order of arrival, or the first `limit` of them.

    Each line is a JSON object such as {"prompt_len": 512, "output_len": 128, "arrival": 0.25}: tokens of the prompt,
    tokens to generate, and seconds from the start, 0 if it is missing. Lines may be in any order; empty ones are
    skipped.
    """
    requests = []
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    requests.append(_parse_trace_line(line, f"line {number} of {path}"))
    except OSError as error:
        raise YalisError(f"cannot read {path}: {error.strerror}; give a JSONL file of lengths and arrivals") from error
    if len(requests) < (limit or 1):
        raise YalisError(f"{path} has {count_of(len(requests), 'request')}; give a trace with at least {limit or 1}")
    return sorted(requests, key=lambda request: request.arrival)[:limit]


def _parse_trace_line(line: str, where: str) -> RequestSize:
    try:
        value: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise YalisError(f"{where} is not valid JSON ({error}); {_TRACE_EXAMPLE}") from None
    if not isinstance(value, dict):
        raise YalisError(f"{where} is not an object; {_TRACE_EXAMPLE}")
    if unknown := sorted(set(value) - {"prompt_len", "output_len", "arrival"}):
        raise YalisError(f"{where} has an unknown field {unknown[0]!r}; {_TRACE_EXAMPLE}")
    for name in ("prompt_len", "output_len"):
        length = value.get(name)
        if isinstance(length, bool) or not isinstance(length, int) or length < 1:
            found = "no" if name not in value else f"{length!r} as"
            raise YalisError(f"{where} has {found} {name}; give a whole number of at least 1")
    arrival = value.get("arrival", 0.0)
    if isinstance(arrival, bool) or not isinstance(arrival, (int, float)) or not 0 <= arrival < math.inf:
        raise YalisError(f"{where} has {arrival!r} as arrival; give seconds of at least 0")
    return RequestSize(value["prompt_len"], value["output_len"], float(arrival))


_TRACE_EXAMPLE = 'give lines such as {"prompt_len": 512, "output_len": 128, "arrival": 0.25}'


def random_prompt(rng: random.Random, length: int, vocab_size: int) -> list[int]:
    return [rng.randrange(vocab_size) for _ in range(length)]
