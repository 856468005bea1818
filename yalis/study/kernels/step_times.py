"""What a GPU does in a decode step: its kernels, how often and how long each runs, and the gaps between them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from yalis.engine.llm import LLM
from yalis.errors import YalisError, YalisFailure
from yalis.perfmodel.timeline import Piece, Span, break_down, by_name, categorize, flatten
from yalis.study.workloads import draw_prompt
from yalis.types import SamplingParams

_WARM = 8  # tokens of each sequence, before any step is watched


@dataclass(frozen=True)
class KernelTime:
    name: str
    count: float  # in a step
    us: float  # in a step


@dataclass(frozen=True)
class StepTimes:
    """All in microseconds, of one step."""

    us: float  # from its begin to the next one's
    gaps: float  # during which nothing runs
    overlap: float  # that kernels run beside others: dependent launches
    kernels: list[KernelTime]  # the longest first


def measure_step(llm: LLM, batch: int, prompt_len: int, steps: int = 16) -> StepTimes:
    """Decode a batch, and watch some of its steps."""
    if llm.device.type != "cuda":
        raise YalisError(f"kernels are watched on a GPU, and this model is on {llm.device}")
    start_decoding(llm, batch, prompt_len, steps + 2 * _WARM)
    activities = [torch.profiler.ProfilerActivity.CUDA]
    before = llm.stats.steps
    with torch.profiler.profile(activities=activities) as watch:
        for _ in range(steps):
            llm.poll()
        torch.cuda.synchronize(llm.device)
    watched = llm.stats.steps - before
    while llm.num_unfinished:
        llm.poll()
    return add_up(_spans(watch), watched)


def start_decoding(llm: LLM, batch: int, prompt_len: int, output_len: int) -> None:
    """Submit a batch, and run until its prompts are over, and whatever happens once."""
    before = llm.stats.output_tokens  # of all that the engine ever answered
    noise = random.Random(0)
    sampling = SamplingParams(max_tokens=output_len, ignore_eos=True)
    for _ in range(batch):
        llm.submit(draw_prompt(noise, prompt_len, llm.spec.vocab_size), sampling)
    while llm.stats.output_tokens - before < _WARM * batch:
        llm.poll()


def _spans(watch: Any) -> list[Span]:
    found = []
    for event in watch.profiler.kineto_results.events():
        if event.device_type().name == "CUDA" and event.duration_ns() > 0:
            found.append(Span(event.name(), event.start_ns(), event.start_ns() + event.duration_ns()))
    if not found:
        raise YalisFailure("the profiler saw no kernel; another one may hold the GPU's counters")
    return found


def add_up(spans: Sequence[Span], steps: int) -> StepTimes:
    """Means over so many equal steps. A kernel has all of its time, whatever runs beside it."""
    window = min(span.start for span in spans), max(span.end for span in spans)
    pieces = [Piece(span.name, categorize(span.name, on_gpu=True) or "other", span.start, span.end) for span in spans]
    (times,) = break_down(flatten(pieces), [window])
    names = by_name(pieces, [window])
    beside = sum(one.ns for one in names) - sum(times.spent.values())
    us = 1e3 * steps  # so many nanoseconds of all are a microsecond of one
    kernels = [KernelTime(one.name, one.count / steps, one.ns / us) for one in names]
    return StepTimes(times.total / us, times.idle / us, beside / us, kernels)
