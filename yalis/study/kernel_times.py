"""What a GPU does in a decode step: its kernels, how often and how long each runs, and the gaps between them."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from yalis.engine.llm import LLM
from yalis.errors import YalisError, YalisFailure
from yalis.study.workloads import draw_prompt
from yalis.types import SamplingParams


@dataclass(frozen=True)
class Span:
    """One kernel or copy, in microseconds."""

    name: str
    start: float
    end: float


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
    noise = random.Random(0)
    sampling = SamplingParams(max_tokens=steps + 16, ignore_eos=True)
    for _ in range(batch):
        llm.submit(draw_prompt(noise, prompt_len, llm.spec.vocab_size), sampling)
    stats = llm.stats
    while stats.output_tokens < 8 * batch:  # prompts are over, and whatever happens once
        llm.poll()
    activities = [torch.profiler.ProfilerActivity.CUDA]
    before = stats.steps
    with torch.profiler.profile(activities=activities) as watch:
        for _ in range(steps):
            llm.poll()
        torch.cuda.synchronize(llm.device)
    watched = stats.steps - before
    while llm.num_unfinished:
        llm.poll()
    return add_up(_spans(watch), watched)


def _spans(watch: Any) -> list[Span]:
    found = []
    for event in watch.profiler.kineto_results.events():
        if event.device_type().name == "CUDA" and event.duration_ns() > 0:
            start = event.start_ns() / 1e3
            found.append(Span(event.name(), start, start + event.duration_ns() / 1e3))
    if not found:
        raise YalisFailure("the profiler saw no kernel; another one may hold the GPU's counters")
    return found


def add_up(spans: Iterable[Span], steps: int) -> StepTimes:
    """Means over so many equal steps."""
    ordered = sorted(spans, key=lambda span: span.start)
    counts: dict[str, int] = defaultdict(int)
    times: dict[str, float] = defaultdict(float)
    busy, end = 0.0, ordered[0].start
    for span in ordered:
        counts[span.name] += 1
        times[span.name] += span.end - span.start
        busy += max(0.0, span.end - max(end, span.start))
        end = max(end, span.end)
    whole = end - ordered[0].start
    kernels = [KernelTime(name, counts[name] / steps, times[name] / steps) for name in sorted(times, key=times.get)]  # type: ignore[arg-type]
    return StepTimes(whole / steps, (whole - busy) / steps, (sum(times.values()) - busy) / steps, kernels[::-1])
