"""Break a timeline of calls or kernels down into categories and idle gaps.

Times are integer nanoseconds of one clock. How the timeline was recorded does not matter here.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache

#: In order of priority: while several run at once on different lanes, the time counts for the first of them. So
#: communication that overlaps with computation costs nothing.
CATEGORIES = ("matmul", "attention", "other", "communication")

# Names of kernels on a GPU and of calls on a CPU: native:: is native.c, comm:: a communicator, aten:: torch.
_COMMUNICATION = re.compile(
    r"^comm::|nccl|nvshmem|nvrar|^(void )?(\(anonymous namespace\)::)?(all_reduce|ring|one_shot)_kernel\b",
    re.IGNORECASE,
)
_ATTENTION = re.compile(
    r"^native::attend$|^aten::_?(scaled_dot_product|flash_attention|efficient_attention|flex_attention)"
    r"|^_(paged_)?(prefill|decode|join)(_kernel)?$|flash_?(fwd|attn|attention)|fmha|flex_attention|_sdpa_|cudnn.*(sdpa|attention)",
    re.IGNORECASE,
)
_MATMUL = re.compile(
    r"^native::(expert_)?linear$|^aten::(linear|matmul|mm|addmm|bmm|baddbmm|addmv|mv|dot|einsum|_addmm_activation)$"
    r"|^_(one|few)_rows?$|^_gated_product$|gemm|gemv|nvjet|cutlass|splitk|cublas|_matmul|_mm_",
    re.IGNORECASE,
)
# Host bookkeeping that computes nothing itself; calls nested in it are categorized on their own.
_BOOKKEEPING = re.compile(
    r"^aten::(view|_unsafe_view|reshape|_reshape_alias|alias|detach|as_strided|t|transpose|permute|movedim|unsqueeze|squeeze|expand"
    r"|expand_as|flatten|unflatten|narrow|select|slice|split|split_with_sizes|chunk|unbind|lift_fresh|resolve_conj|resolve_neg"
    r"|empty|empty_like|empty_strided|new_empty|new_empty_strided|result_type|to|item|_local_scalar_dense|contiguous|set_|is_\w+)$"
)
_COMPUTE = re.compile(r"^(native|comm|aten)::")


@dataclass(frozen=True)
class Span:
    """One call or kernel on the timeline."""

    name: str
    start: int
    end: int
    lane: int = 0  # a thread or a stream
    issued: int | None = None  # when the host launched it; None: when it started


@dataclass(frozen=True)
class Interval:
    """The time assigned to one span: its own, less what an earlier span of the same lane was assigned."""

    name: str
    category: str
    start: int
    end: int


@dataclass(frozen=True)
class Breakdown:
    """Nanoseconds of a time window by category."""

    category_ns: dict[str, int] = field(default_factory=lambda: dict.fromkeys(CATEGORIES, 0))
    idle_ns: int = 0  # the sum of the gaps in which nothing ran

    @property
    def total(self) -> int:
        return sum(self.category_ns.values()) + self.idle_ns


@cache
def categorize(name: str, on_gpu: bool = False) -> str | None:
    """Return the category of a call or kernel; None for calls that only wrap others or do bookkeeping."""
    for category, pattern in (("communication", _COMMUNICATION), ("attention", _ATTENTION), ("matmul", _MATMUL)):
        if pattern.search(name):
            return category
    if on_gpu:
        return "other"
    return "other" if _COMPUTE.search(name) and not _BOOKKEEPING.search(name) else None


def assign_time(spans: Iterable[Span], on_gpu: bool = False) -> list[Interval]:
    """Assign the time of each lane to the span that started first, until that one ends.

    So a call includes the calls nested in it, and a kernel that is launched early with programmatic dependent launch
    begins when the kernel before it ends."""
    busy_until: dict[int, int] = {}
    intervals = []
    for span in sorted(spans, key=lambda span: (span.start, -span.end)):
        category = categorize(span.name, on_gpu)
        begin = max(span.start, busy_until.get(span.lane, span.start))
        if category is not None and begin < span.end:
            busy_until[span.lane] = span.end
            intervals.append(Interval(span.name, category, begin, span.end))
    return intervals


def flatten(intervals: Iterable[Interval]) -> list[tuple[str, int, int]]:
    """Merge the lanes into (category, start, end) in order of time, without overlap."""
    edges = []
    for interval in intervals:
        priority = CATEGORIES.index(interval.category)
        edges += [(interval.start, 1, priority), (interval.end, -1, priority)]
    edges.sort()
    flat: list[tuple[str, int, int]] = []
    running, last = [0] * len(CATEGORIES), 0
    for time, change, priority in edges:
        if time > last and any(running):
            category = next(name for name, count in zip(CATEGORIES, running, strict=True) if count)
            if flat and flat[-1][0] == category and flat[-1][2] == last:
                flat[-1] = (category, flat[-1][1], time)
            else:
                flat.append((category, last, time))
        running[priority] += change
        last = time
    return flat


def break_down(flat: Sequence[tuple[str, int, int]], windows: Iterable[tuple[int, int]]) -> list[Breakdown]:
    """Return the time by category in each window. Idle time is the sum of the gaps, not a difference."""
    found = []
    ends = [end for _, _, end in flat]
    for begin, end in windows:
        category_ns, idle_ns, covered_until = dict.fromkeys(CATEGORIES, 0), 0, begin
        for index in range(bisect_right(ends, begin), len(flat)):
            category, start, stop = flat[index]
            if start >= end:
                break
            idle_ns += max(0, start - covered_until)
            category_ns[category] += min(stop, end) - max(start, begin)
            covered_until = min(stop, end)
        idle_ns += max(0, end - covered_until)
        found.append(Breakdown(category_ns, idle_ns))
    return found


def host_windows(begins: Sequence[int], end: int) -> list[tuple[int, int]]:
    """Return the window of each step on the host: from its begin to the begin of the next one, or to `end`."""
    return list(zip(begins, [*begins[1:], end], strict=True))


def device_windows(begins: Sequence[int], end: int, spans: Iterable[Span]) -> list[tuple[int, int]]:
    """Return the window of each step on the device: from its first kernel to the first kernel of the next step.

    The host runs ahead of the device, so these differ from the host's windows. The first window begins when the host
    begins the step, or when the kernels launched before it end."""
    firsts: list[int | None] = [None] * len(begins)
    before = begins[0]
    for span in spans:
        step = bisect_right(begins, span.start if span.issued is None else span.issued) - 1
        if step < 0:
            before = max(before, span.end)
        else:
            first = firsts[step]
            firsts[step] = span.start if first is None else min(first, span.start)
    starts = [end]
    for first in reversed([before, *firsts[1:]]):
        starts.append(starts[-1] if first is None else min(first, starts[-1]))
    return host_windows(starts[:0:-1], end)


@dataclass(frozen=True)
class NameTime:
    """Calls and total time of one name within some windows."""

    name: str
    category: str
    count: int
    ns: int


def time_by_name(intervals: Iterable[Interval], windows: Sequence[tuple[int, int]]) -> list[NameTime]:
    """Return the total time of each name, longest first. An interval counts if it begins in one of the windows.

    The windows are in order of time."""
    begins = [begin for begin, _ in windows]
    counts: dict[tuple[str, str], int] = defaultdict(int)
    times: dict[tuple[str, str], int] = defaultdict(int)
    for interval in intervals:
        index = bisect_right(begins, interval.start) - 1
        if index >= 0 and interval.start < windows[index][1]:
            counts[interval.name, interval.category] += 1
            times[interval.name, interval.category] += interval.end - interval.start
    return [NameTime(*key, counts[key], times[key]) for key in sorted(times, key=lambda key: -times[key])]
