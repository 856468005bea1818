"""Where time went, from a timeline of calls or kernels: a category for every instant, and the gaps as they are.

Times are whole nanoseconds of one clock. Nothing here knows how a timeline was recorded.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache

#: Where several run at once on different lanes, the first of these has the instant: communication that hides behind
#: computing costs nothing.
CATEGORIES = ("matmul", "attention", "other", "communication")

# Calls on a CPU. Those of native.c and of communicators carry a prefix; torch's own are aten::.
_COMMUNICATES = re.compile(
    r"^comm::|nccl|nvshmem|nvrar|^(void )?(\(anonymous namespace\)::)?(all_reduce|ring|one_shot)_kernel\b",
    re.IGNORECASE,
)
_ATTENDS = re.compile(
    r"^native::attend$|^aten::_?(scaled_dot_product|flash_attention|efficient_attention|flex_attention)"
    r"|^_(paged_)?(prefill|decode|join)(_kernel)?$|flash_?(fwd|attn|attention)|fmha|flex_attention|_sdpa_|cudnn.*(sdpa|attention)",
    re.IGNORECASE,
)
_MULTIPLIES = re.compile(
    r"^native::linear$|^aten::(linear|matmul|mm|addmm|bmm|baddbmm|addmv|mv|dot|einsum|_addmm_activation)$"
    r"|^_(one|few)_rows?$|^_gated_product$|gemm|gemv|nvjet|cutlass|splitk|cublas|_matmul|_mm_",
    re.IGNORECASE,
)
# The host's bookkeeping: nothing is computed, and what is called inside speaks for itself.
_BOOKKEEPING = re.compile(
    r"^aten::(view|_unsafe_view|reshape|_reshape_alias|alias|detach|as_strided|t|transpose|permute|movedim|unsqueeze|squeeze|expand"
    r"|expand_as|flatten|unflatten|narrow|select|slice|split|split_with_sizes|chunk|unbind|lift_fresh|resolve_conj|resolve_neg"
    r"|empty|empty_like|empty_strided|new_empty|new_empty_strided|result_type|to|item|_local_scalar_dense|contiguous|set_|is_\w+)$"
)
_COMPUTES = re.compile(r"^(native|comm|aten)::")


@dataclass(frozen=True)
class Span:
    """One call or kernel."""

    name: str
    start: int
    end: int
    lane: int = 0  # a thread or a stream
    issued: int | None = None  # when the host asked for it; None: when it started


@dataclass(frozen=True)
class Piece:
    """A stretch of time that one span has, less what an earlier span of its lane had already."""

    name: str
    category: str
    start: int
    end: int


@dataclass(frozen=True)
class Breakdown:
    """Nanoseconds of a stretch of time, by category."""

    spent: dict[str, int] = field(default_factory=lambda: dict.fromkeys(CATEGORIES, 0))
    idle: int = 0  # in which nothing ran: the sum of the gaps

    @property
    def total(self) -> int:
        return sum(self.spent.values()) + self.idle


@cache
def categorize(name: str, on_gpu: bool = False) -> str | None:
    """What a call or kernel does; None for those that only hold or arrange others."""
    for category, pattern in (("communication", _COMMUNICATES), ("attention", _ATTENDS), ("matmul", _MULTIPLIES)):
        if pattern.search(name):
            return category
    if on_gpu:
        return "other"
    return "other" if _COMPUTES.search(name) and not _BOOKKEEPING.search(name) else None


def claim(spans: Iterable[Span], on_gpu: bool = False) -> list[Piece]:
    """Who has which time of each lane: whoever was there first, until it ends.

    So a call has the time of those that it makes itself, and a kernel that is launched early (and waits for the one
    before it) begins when that one ends.
    """
    taken: dict[int, int] = {}
    pieces = []
    for span in sorted(spans, key=lambda span: (span.start, -span.end)):
        category = categorize(span.name, on_gpu)
        begin = max(span.start, taken.get(span.lane, span.start))
        if category is not None and begin < span.end:
            taken[span.lane] = span.end
            pieces.append(Piece(span.name, category, begin, span.end))
    return pieces


def flatten(pieces: Iterable[Piece]) -> list[tuple[str, int, int]]:
    """Stretches of one category each, in order, that do not overlap: (category, start, end)."""
    edges = []
    for piece in pieces:
        place = CATEGORIES.index(piece.category)
        edges += [(piece.start, 1, place), (piece.end, -1, place)]
    edges.sort()
    flat: list[tuple[str, int, int]] = []
    running, last = [0] * len(CATEGORIES), 0
    for time, change, place in edges:
        if time > last and any(running):
            category = next(name for name, count in zip(CATEGORIES, running, strict=True) if count)
            if flat and flat[-1][0] == category and flat[-1][2] == last:
                flat[-1] = (category, flat[-1][1], time)
            else:
                flat.append((category, last, time))
        running[place] += change
        last = time
    return flat


def break_down(flat: Sequence[tuple[str, int, int]], windows: Iterable[tuple[int, int]]) -> list[Breakdown]:
    """What happened in each window. Gaps are added up one by one, never found by subtraction."""
    found = []
    ends = [end for _, _, end in flat]
    for begin, end in windows:
        spent, idle, at = dict.fromkeys(CATEGORIES, 0), 0, begin
        for place in range(bisect_right(ends, begin), len(flat)):
            category, start, stop = flat[place]
            if start >= end:
                break
            idle += max(0, start - at)
            spent[category] += min(stop, end) - max(start, begin)
            at = min(stop, end)
        idle += max(0, end - at)
        found.append(Breakdown(spent, idle))
    return found


def host_windows(begins: Sequence[int], end: int) -> list[tuple[int, int]]:
    """Each step from when the host begins it to when it begins the next; the last one to the end."""
    return list(zip(begins, [*begins[1:], end], strict=True))


def device_windows(begins: Sequence[int], end: int, spans: Iterable[Span]) -> list[tuple[int, int]]:
    """Each step from the start of its first kernel to that of the next step's, since the host is ahead of its device.

    The first begins when the host does, or when what was asked for before it is done.
    """
    firsts: list[int | None] = [None] * len(begins)
    before = begins[0]
    for span in spans:
        step = bisect_right(begins, span.start if span.issued is None else span.issued) - 1
        if step < 0:
            before = max(before, span.end)
        else:
            known = firsts[step]
            firsts[step] = span.start if known is None else min(known, span.start)
    starts = [end]
    for first in reversed([before, *firsts[1:]]):
        starts.append(starts[-1] if first is None else min(first, starts[-1]))
    return host_windows(starts[:0:-1], end)


@dataclass(frozen=True)
class NameTime:
    """A name's share of some windows."""

    name: str
    category: str
    count: int
    ns: int


def by_name(pieces: Iterable[Piece], windows: Sequence[tuple[int, int]]) -> list[NameTime]:
    """What began in these windows (in order), the longest first."""
    begins = [begin for begin, _ in windows]
    counts: dict[tuple[str, str], int] = defaultdict(int)
    times: dict[tuple[str, str], int] = defaultdict(int)
    for piece in pieces:
        at = bisect_right(begins, piece.start) - 1
        if at >= 0 and piece.start < windows[at][1]:
            counts[piece.name, piece.category] += 1
            times[piece.name, piece.category] += piece.end - piece.start
    return [NameTime(*key, counts[key], times[key]) for key in sorted(times, key=lambda key: -times[key])]
