"""Profiles decode steps on a GPU: the count and time of each kernel, and the gaps between kernels."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from yalis.engine.llm import LLM
from yalis.errors import YalisError, YalisFailure
from yalis.perfmodel.timeline import Interval, Span, break_down, categorize, flatten, time_by_name
from yalis.types import SamplingParams
from yalis.workloads import random_prompt

_WARMUP_TOKENS = 8  # of each sequence, before profiling starts


@dataclass(frozen=True)
class KernelTime:
    name: str
    count: float  # launches per step
    us: float  # microseconds per step


@dataclass(frozen=True)
class StepTimes:
    """Microseconds of one step."""

    us: float  # from its start to the start of the next step
    gaps: float  # with no kernel running
    overlap: float  # with two kernels running, because of programmatic dependent launch
    kernels: list[KernelTime]  # longest first


def measure_step(llm: LLM, batch: int, prompt_len: int, steps: int = 16) -> StepTimes:
    """Decode a batch and profile `steps` of its decode steps."""
    if llm.device.type != "cuda":
        raise YalisError(f"kernels can only be profiled on a GPU, but the model is on {llm.device}; give --device cuda")
    start_decoding(llm, batch, prompt_len, steps + 2 * _WARMUP_TOKENS)
    activities = [torch.profiler.ProfilerActivity.CUDA]
    before = llm.stats.steps
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in range(steps):
            llm.poll()
        torch.cuda.synchronize(llm.device)
    profiled = llm.stats.steps - before
    while llm.num_unfinished:
        llm.poll()
    return average_step(_spans(profiler), profiled)


def start_decoding(llm: LLM, batch: int, prompt_len: int, output_len: int) -> None:
    """Submit a batch, and run steps until prefill and warm-up are over."""
    before = llm.stats.output_tokens  # counts since the engine started
    rng = random.Random(0)
    sampling = SamplingParams(max_tokens=output_len, ignore_eos=True)
    for _ in range(batch):
        llm.submit(random_prompt(rng, prompt_len, llm.spec.vocab_size), sampling)
    while llm.stats.output_tokens - before < _WARMUP_TOKENS * batch:
        llm.poll()


def _spans(profiler: Any) -> list[Span]:
    spans = []
    for event in profiler.profiler.kineto_results.events():
        if event.device_type().name == "CUDA" and event.duration_ns() > 0:
            spans.append(Span(event.name(), event.start_ns(), event.start_ns() + event.duration_ns()))
    if not spans:
        raise YalisFailure("the profiler recorded no kernel; another profiler may be using the GPU")
    return spans


def average_step(spans: Sequence[Span], steps: int) -> StepTimes:
    """Return means over `steps` equal steps. A kernel counts with its full time, even where others overlap it."""
    window = min(span.start for span in spans), max(span.end for span in spans)
    intervals = [
        Interval(span.name, categorize(span.name, on_gpu=True) or "other", span.start, span.end) for span in spans
    ]
    (times,) = break_down(flatten(intervals), [window])
    names = time_by_name(intervals, [window])
    overlap = sum(one.ns for one in names) - sum(times.category_ns.values())
    ns_to_us = 1e3 * steps  # from nanoseconds of all steps to microseconds of one
    kernels = [KernelTime(one.name, one.count / steps, one.ns / ns_to_us) for one in names]
    return StepTimes(times.total / ns_to_us, times.idle_ns / ns_to_us, overlap / ns_to_us, kernels)
