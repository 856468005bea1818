"""A rank watching its own steps: what ran when, under torch's profiler, told as time by category.

On a CPU the timeline is the step's own thread: torch's operations, native calls (those of a tape too) and calls of
communicators. On a GPU it is the kernels and copies of every stream, whoever launched them.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from yalis import env
from yalis.comm.base import Communicator
from yalis.comm.call_timer import time_calls
from yalis.errors import YalisFailure
from yalis.kernels import native
from yalis.perfmodel import timeline
from yalis.perfmodel.timeline import NameTime, Span
from yalis.scheduling.plan import StepPlan

PREFILL, DECODE = PHASES = ("prefill", "decode")
# Names told of each phase.
MOST_NAMES = 24
_MARK = "yalis::watch"


@dataclass(frozen=True)
class StepFacts:
    phase: str
    number: int
    sequences: int
    prompt_tokens: int


@dataclass(frozen=True)
class WatchedStep:
    """Nanoseconds of one step."""

    step: StepFacts
    spent: dict[str, int]  # by category
    idle: int

    @property
    def total(self) -> int:
        return sum(self.spent.values()) + self.idle


@dataclass(frozen=True)
class Watched:
    """What a rank saw between the begin and the end of its watch."""

    ended: int  # when the last step was done, by the rank's own clock
    steps: list[WatchedStep]
    names: dict[str, list[NameTime]]  # of each phase, the longest first

    @classmethod
    def of(cls, told: dict[str, Any]) -> Watched:
        """From JSON."""
        steps = [WatchedStep(StepFacts(**one["step"]), one["spent"], one["idle"]) for one in told["steps"]]
        names = {phase: [NameTime(**one) for one in found] for phase, found in told["names"].items()}
        return cls(told["ended"], steps, names)


class StepWatch:
    """Of one rank. While nobody watches, a step costs the mark that external profilers show, on a GPU alone."""

    def __init__(self, device: torch.device, groups: Sequence[Communicator]) -> None:
        self._on_gpu, self._device, self._groups = device.type == "cuda", device, groups
        self._session: _Session | None = None

    @contextmanager
    def step(self, plan: StepPlan) -> Iterator[None]:
        """Around the launch of a step."""
        if self._session is not None:
            self._session.note_step(plan)
        if not self._on_gpu:
            yield
            return
        torch.cuda.nvtx.range_push(f"{phase_of(plan)} {plan.number}")
        try:
            yield
        finally:
            torch.cuda.nvtx.range_pop()

    def begin(self) -> None:
        if self._session is None:
            self._session = _Session(self._device, self._groups)

    def end(self) -> Watched:
        """Wait for what was launched since, and stop watching."""
        if self._session is None:
            raise ValueError("nobody watches")
        session, self._session = self._session, None
        return session.close()

    @property
    def prompt_tokens(self) -> int:
        """Of prompts, in the steps since the watch began."""
        return sum(step.prompt_tokens for step in self._session.steps) if self._session is not None else 0

    @property
    def decoded(self) -> int:
        """Sequences in the decode steps since the watch began, counted once a step."""
        steps = self._session.steps if self._session is not None else ()
        return sum(step.sequences for step in steps if step.phase == DECODE)


def phase_of(plan: StepPlan) -> str:
    """A step that computes any prompt tokens is prefill."""
    return DECODE if all(step.count == 1 and step.output_len for step in plan.sequences) else PREFILL


class _Session:
    """From the begin to the end of a watch."""

    def __init__(self, device: torch.device, groups: Sequence[Communicator]) -> None:
        env.quiet_profiler()
        activity = torch.profiler.ProfilerActivity
        self._device, self._on_gpu = device, device.type == "cuda"
        self.steps: list[StepFacts] = []
        self._begins: list[int] = []
        self._calls: list[tuple[str, int, int]] = []  # native ones and those of communicators
        self._stack = ExitStack()
        if self._on_gpu:
            torch.cuda.synchronize(device)
        else:
            self._stack.enter_context(native.timed(self._hear("native::")))
            self._stack.enter_context(time_calls(groups, self._hear("comm::")))
        # The profiler's clock is that of the date.
        self._offset = native.now() - time.time_ns()
        self._profiler = torch.profiler.profile(activities=[activity.CUDA if self._on_gpu else activity.CPU])
        self._profiler.start()
        with torch.profiler.record_function(_MARK):
            pass  # its thread is ours

    def _hear(self, prefix: str) -> native.Listener:
        keep = self._calls.append  # quick: it is the step's time

        def hear(name: str, begin: int, end: int) -> None:
            keep((prefix + name, begin, end))

        return hear

    def note_step(self, plan: StepPlan) -> None:
        prompt_tokens = sum(step.count for step in plan.sequences if not step.output_len)
        self.steps.append(StepFacts(phase_of(plan), plan.number, len(plan.sequences), prompt_tokens))
        self._begins.append(native.now())

    def close(self) -> Watched:
        if self._on_gpu:
            torch.cuda.synchronize(self._device)
        ended = native.now()
        self._profiler.stop()
        self._stack.close()
        if not self.steps:
            return Watched(ended, [], {})
        events = self._profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
        spans = (
            self._kernels(events)
            if self._on_gpu
            else [*self._operations(events), *itertools.starmap(Span, self._calls)]
        )
        if not spans:
            raise YalisFailure("the profiler saw nothing run; another one may hold the device's counters")
        if self._on_gpu:
            windows = timeline.device_windows(self._begins, ended, spans)
        else:
            windows = timeline.host_windows(self._begins, ended)
        pieces = timeline.claim(spans, self._on_gpu)
        broken_down = timeline.break_down(timeline.flatten(pieces), windows)
        names = {}
        for phase in PHASES:
            own = [window for window, step in zip(windows, self.steps, strict=True) if step.phase == phase]
            names[phase] = timeline.by_name(pieces, own)[:MOST_NAMES]
        found = zip(self.steps, broken_down, strict=True)
        return Watched(ended, [WatchedStep(step, times.spent, times.idle) for step, times in found], names)

    def _operations(self, events: Sequence[Any]) -> list[Span]:
        """torch's operations on this thread, by our clock."""
        own = next(event.start_thread_id() for event in events if event.name() == _MARK)
        return [
            Span(event.name(), begin, begin + event.duration_ns())
            for event in events
            if event.start_thread_id() == own and event.name().startswith("aten::")
            for begin in (event.start_ns() + self._offset,)
        ]

    def _kernels(self, events: Sequence[Any]) -> list[Span]:
        """What ran on the device, each beside the host's call that launched it: for all of a graph, its launch."""
        launches: dict[int, int] = {}
        for event in events:
            # Ids of the profiler's own operations are counted apart from those of the driver.
            if event.device_type().name == "CPU" and event.name().startswith(("cuda", "cu")):
                launches[event.correlation_id()] = event.start_ns() + self._offset
        spans = []
        for event in events:
            if event.device_type().name == "CUDA" and event.duration_ns() > 0 and event.name() != _MARK:
                begin = event.start_ns() + self._offset
                issued = launches.get(event.correlation_id())
                spans.append(Span(event.name(), begin, begin + event.duration_ns(), event.device_resource_id(), issued))
        return spans
