"""Profile the steps of one rank: torch's profiler records what ran, and the time of each step is split by category.

On a CPU the timeline is the thread that runs the step: torch operations, native calls (also those of a recorded step)
and communicator calls. On a GPU it is the kernels and copies of every stream.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
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
#: Kernels or operations reported for each phase.
MAX_NAMES = 24
_MARKER = "yalis::profile"


@dataclass(frozen=True)
class StepInfo:
    phase: str  # PREFILL or DECODE
    step_id: int
    num_sequences: int
    prompt_tokens: int


@dataclass(frozen=True)
class StepProfile:
    """Where the time of one step went, in nanoseconds."""

    info: StepInfo
    category_ns: dict[str, int]
    idle_ns: int

    @property
    def total_ns(self) -> int:
        return sum(self.category_ns.values()) + self.idle_ns


@dataclass(frozen=True)
class RankProfile:
    """The steps that one rank ran between start_profiling() and stop_profiling()."""

    end_ns: int  # when the last step finished, on the rank's monotonic clock
    steps: list[StepProfile]
    names: dict[str, list[NameTime]]  # by phase: the kernels or operations that took longest, longest first
    expert_pairs: int = 0  # pairs of a token and an expert that this rank multiplied, if they are counted

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> RankProfile:
        steps = [StepProfile(StepInfo(**step["info"]), step["category_ns"], step["idle_ns"]) for step in value["steps"]]
        names = {phase: [NameTime(**name) for name in found] for phase, found in value["names"].items()}
        return cls(value["end_ns"], steps, names, value["expert_pairs"])


class Profile:
    """The steps of an `llm.profile()` block. `steps` grows while the block runs; `ranks` is filled when it ends."""

    def __init__(self, steps: Sequence[StepInfo]) -> None:
        self.steps = steps
        self.ranks: list[RankProfile] = []

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens computed so far."""
        return sum(step.prompt_tokens for step in self.steps)

    @property
    def decode_tokens(self) -> int:
        """Tokens decoded so far: one for each sequence of each decode step."""
        return sum(step.num_sequences for step in self.steps if step.phase == DECODE)


class StepProfiler:
    """The profiler of one rank. While it is stopped, its only cost is one NVTX range per step on a GPU."""

    def __init__(
        self, device: torch.device, groups: Sequence[Communicator], count_pairs: Callable[[], int] = lambda: 0
    ) -> None:
        """`groups`: the communicators whose calls are timed on a CPU. `count_pairs` returns the pairs of a token and an
        expert that this rank has multiplied so far."""
        self._on_gpu, self._device, self._groups = device.type == "cuda", device, groups
        self._count_pairs = count_pairs
        self._session: _Session | None = None

    @contextmanager
    def step(self, plan: StepPlan) -> Iterator[None]:
        """Record the step launched inside the block, if the profiler is running."""
        if self._session is not None:
            self._session.begin_step(plan)
        if not self._on_gpu:
            yield
            return
        torch.cuda.nvtx.range_push(f"{phase_of(plan)} {plan.step_id}")
        try:
            yield
        finally:
            torch.cuda.nvtx.range_pop()

    @property
    def running(self) -> bool:
        return self._session is not None

    def start(self) -> Sequence[StepInfo]:
        """Start recording. Returns the list to which every launched step is appended."""
        if self._session is not None:
            raise ValueError("the profiler is running already")
        self._session = _Session(self._device, self._groups, self._count_pairs)
        return self._session.steps

    def stop(self) -> RankProfile:
        """Wait for the launched steps to finish, stop recording and return what was recorded."""
        if self._session is None:
            raise ValueError("the profiler is not running")
        session, self._session = self._session, None
        return session.close()


def phase_of(plan: StepPlan) -> str:
    """Return PREFILL for a step that computes any prompt tokens, else DECODE."""
    return DECODE if all(step.num_tokens == 1 and step.output_len for step in plan.sequences) else PREFILL


class _Session:
    """What is recorded between start() and stop()."""

    def __init__(self, device: torch.device, groups: Sequence[Communicator], count_pairs: Callable[[], int]) -> None:
        env.silence_profiler()
        activity = torch.profiler.ProfilerActivity
        self._device, self._on_gpu = device, device.type == "cuda"
        self.steps: list[StepInfo] = []
        self._begins: list[int] = []
        self._calls: list[tuple[str, int, int]] = []  # native and communicator calls: name, begin, end
        self._stack = ExitStack()
        if self._on_gpu:
            torch.cuda.synchronize(device)
        else:
            self._stack.enter_context(native.timed(self._call_recorder("native::")))
            self._stack.enter_context(time_calls(groups, self._call_recorder("comm::")))
        self._count_pairs, self._pairs_before = count_pairs, count_pairs()
        # The profiler stamps events with wall-clock time; everything here uses the monotonic clock.
        self._offset = native.now() - time.time_ns()
        self._profiler = torch.profiler.profile(activities=[activity.CUDA if self._on_gpu else activity.CPU])
        self._profiler.start()
        with torch.profiler.record_function(_MARKER):
            pass  # marks the thread that runs the steps

    def _call_recorder(self, prefix: str) -> native.CallListener:
        append = self._calls.append  # bound once: this runs inside the step

        def record(name: str, begin: int, end: int) -> None:
            append((prefix + name, begin, end))

        return record

    def begin_step(self, plan: StepPlan) -> None:
        prompt_tokens = sum(step.num_tokens for step in plan.sequences if not step.output_len)
        self.steps.append(StepInfo(phase_of(plan), plan.step_id, len(plan.sequences), prompt_tokens))
        self._begins.append(native.now())

    def close(self) -> RankProfile:
        if self._on_gpu:
            torch.cuda.synchronize(self._device)
        end = native.now()
        self._profiler.stop()
        pairs = self._count_pairs() - self._pairs_before
        self._stack.close()
        if not self.steps:
            return RankProfile(end, [], {})
        events = self._profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
        spans = (
            self._kernels(events)
            if self._on_gpu
            else [*self._operations(events), *itertools.starmap(Span, self._calls)]
        )
        if not spans:
            raise YalisFailure("the profiler recorded no kernels; another profiler may be using the GPU's counters")
        if self._on_gpu:
            windows = timeline.device_windows(self._begins, end, spans)
        else:
            windows = timeline.host_windows(self._begins, end)
        intervals = timeline.assign_time(spans, self._on_gpu)
        times_by_step = timeline.break_down(timeline.flatten(intervals), windows)
        names = {}
        for phase in PHASES:
            phase_windows = [window for window, step in zip(windows, self.steps, strict=True) if step.phase == phase]
            names[phase] = timeline.time_by_name(intervals, phase_windows)[:MAX_NAMES]
        steps = [
            StepProfile(info, times.category_ns, times.idle_ns)
            for info, times in zip(self.steps, times_by_step, strict=True)
        ]
        return RankProfile(end, steps, names, pairs)

    def _operations(self, events: Sequence[Any]) -> list[Span]:
        """Return torch's operations on the thread that runs the steps, on the monotonic clock."""
        thread = next(event.start_thread_id() for event in events if event.name() == _MARKER)
        return [
            Span(event.name(), begin, begin + event.duration_ns())
            for event in events
            if event.start_thread_id() == thread and event.name().startswith("aten::")
            for begin in (event.start_ns() + self._offset,)
        ]

    def _kernels(self, events: Sequence[Any]) -> list[Span]:
        """Return what ran on the GPU with the time of its launch, which all kernels of a CUDA graph share."""
        launches: dict[int, int] = {}
        for event in events:
            # Only driver and runtime calls: torch's own operations number their correlation ids separately.
            if event.device_type().name == "CPU" and event.name().startswith(("cuda", "cu")):
                launches[event.correlation_id()] = event.start_ns() + self._offset
        spans = []
        for event in events:
            if event.device_type().name == "CUDA" and event.duration_ns() > 0 and event.name() != _MARKER:
                begin = event.start_ns() + self._offset
                issued = launches.get(event.correlation_id())
                spans.append(Span(event.name(), begin, begin + event.duration_ns(), event.device_resource_id(), issued))
        return spans
