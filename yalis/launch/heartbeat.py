"""Heartbeats: what they carry, and how rank 0 finds the rank that holds up the job.

An open connection does not show that a process is stopped, that its host hangs or that a step never ends. So once a
second every rank sends its progress to rank 0, and rank 0 sends a sign of life to every rank.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from yalis.launch.rank_info import RankInfo

BEAT_S = 1.0
SILENCE_S = 30.0  # without a heartbeat, at most, until a rank counts as stopped
STEP_TIMEOUT_S = 600.0
JOIN_STOPPED_S = 10.0  # that a process of this host may be stopped while the ranks join
_LATE_S = 3.0  # without a heartbeat, until a rank is suspected of holding up a step
IDLE, LOADING, CLOSING = "idle", "loading the model", "closing"


class Progress:
    """How far a rank has come. The threads that work increment these plain integers; the monitor thread reads them."""

    __slots__ = ("begun", "bytes_read", "done", "entered", "left")

    def __init__(self) -> None:
        self.begun = 0  # steps, and other operations of all ranks
        self.done = 0
        self.entered = 0  # collectives, and other waits for another rank
        self.left = 0
        self.bytes_read: Callable[[], int] = int  # of the checkpoint so far, while weights are read

    def counters(self) -> tuple[int, int, int, int, int]:
        return self.begun, self.done, self.entered, self.left, self.bytes_read()

    @contextmanager
    def reading(self, bytes_read: Callable[[], int]) -> Iterator[None]:
        """Count the block as a step that begins anew whenever `bytes_read` returns another number."""
        self.begun, self.bytes_read = self.begun + 1, bytes_read
        try:
            yield
        finally:
            self.done, self.bytes_read = self.done + 1, int


class RankState:
    """What rank 0 knows of a rank from its heartbeats. Times are in seconds while rank 0 itself was running."""

    def __init__(self) -> None:
        self.counters = (0, 0, 0, 0, 0)
        self.silent_s = 0.0  # since the last heartbeat
        self.unchanged_s = 0.0  # since the counters changed
        self.step_s = 0.0  # since the current step began; 0 outside of a step

    @property
    def in_step(self) -> bool:
        return self.counters[0] > self.counters[1]

    @property
    def waiting(self) -> bool:
        """Whether the rank waits for another one."""
        return self.counters[2] > self.counters[3]

    def update(self, counters: Sequence[int]) -> None:
        """Record a heartbeat."""
        begun, done, entered, left, bytes_read = counters
        if (begun, bytes_read) != (self.counters[0], self.counters[4]):
            self.step_s = 0.0
        if (begun, done, entered, left, bytes_read) != self.counters:
            self.unchanged_s = 0.0
            self.counters = (begun, done, entered, left, bytes_read)
        self.silent_s = 0.0

    def advance(self, seconds: float) -> None:
        self.silent_s += seconds
        self.unchanged_s += seconds
        self.step_s = self.step_s + seconds if self.in_step else 0.0


def silence_limit(step_timeout: float) -> float:
    """Return the seconds without a heartbeat after which a rank counts as stopped."""
    return max(3 * BEAT_S, min(SILENCE_S, step_timeout)) if step_timeout else SILENCE_S


def find_culprit(states: Sequence[RankState]) -> int | None:
    """Return the rank that the others wait for, or None if the heartbeats do not show it.

    That is a rank without heartbeats, or one in a step that computes while others wait in a collective.
    """
    late = max(range(len(states)), key=lambda rank: states[rank].silent_s)
    if states[late].silent_s > _LATE_S:
        return late
    stuck = [rank for rank, state in enumerate(states) if state.in_step and state.unchanged_s > _LATE_S]
    computing = [rank for rank in stuck if not states[rank].waiting]
    return min(computing, key=lambda rank: states[rank].counters) if 0 < len(computing) < len(states) else None


def describe_silence(member: RankInfo, seconds: float, phase: str, same_host: bool) -> str:
    """Return the sentence about a rank that sends no heartbeats. `same_host`: its process can be looked up here."""
    stopped = same_host and is_stopped(member.pid)
    reason = "it is stopped (SIGSTOP)" if stopped else "its process is stopped, or its host or network is down"
    return f"{member} (pid {member.pid}) has not answered for {seconds:.0f} s{while_in(phase)}: {reason}"


def while_in(phase: str) -> str:
    return f" while {phase}" if phase and phase != IDLE else ""


class StopWatch:
    """Measures how long a process of this host is stopped, for the time before heartbeats begin."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._since: float | None = None

    def is_over(self) -> bool:
        """Return whether it has been stopped for JOIN_STOPPED_S. Call this repeatedly."""
        if not is_stopped(self.pid):
            self._since = None
            return False
        self._since = self._since or time.monotonic()
        return time.monotonic() - self._since > JOIN_STOPPED_S


def is_stopped(pid: int) -> bool:
    """Return whether a process of this host is stopped by a signal or a debugger."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in ("T", "t")
    except (OSError, IndexError):
        return False
