"""Heartbeats: what they carry, and how rank 0 finds the rank that holds up the job.

An open connection does not show that a process is stopped, that its host hangs or that a step never ends. So once a
second every rank sends its progress counters to rank 0, and rank 0 sends a heartbeat to every rank.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from yalis.launch.rank_info import RankInfo

BEAT_S = 1.0
SILENCE_S = 60.0  # without a heartbeat, after which a rank on another host counts as lost; see silence_limit()
STEP_TIMEOUT_S = 600.0
JOIN_STOPPED_S = 10.0  # that a process on this host may be stopped (SIGSTOP) before heartbeats begin
LATE_S = 3.0  # without a heartbeat or progress, after which a rank may be the one that holds up a step
IDLE, CLOSING = "idle", "closing"
OPENING, CONNECTING, LOADING, WARMING_UP = "opening the model", "connecting", "loading the model", "warming up"


class Progress:
    """Progress counters of a rank. The threads that run the job increment them; the monitor thread sends them."""

    __slots__ = ("begun", "bytes_read", "done", "entered", "left")

    def __init__(self) -> None:
        self.begun = 0  # steps, and other operations that all ranks run
        self.done = 0  # of those begun
        self.entered = 0  # collectives, and other waits for another rank
        self.left = 0  # of those entered: the wait is over
        self.bytes_read: Callable[[], int] = int  # of the checkpoint; returns 0 unless weights are being read

    def counters(self) -> tuple[int, int, int, int, int]:
        return self.begun, self.done, self.entered, self.left, self.bytes_read()

    @contextmanager
    def step(self) -> Iterator[None]:
        """Count the block as one step: it must make progress within the step timeout."""
        self.begun += 1
        try:
            yield
        finally:
            self.done += 1

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the block as a wait for another rank or for a device."""
        self.entered += 1
        try:
            yield
        finally:
            self.left += 1

    @contextmanager
    def reading(self, bytes_read: Callable[[], int]) -> Iterator[None]:
        """Count a change of the number that `bytes_read` returns as progress inside the block."""
        self.bytes_read = bytes_read
        try:
            yield
        finally:
            self.bytes_read = int


class RankState:
    """The state of a rank according to its heartbeats. Times exclude those in which rank 0 itself was stopped."""

    def __init__(self) -> None:
        self.counters = (0, 0, 0, 0, 0)
        self.silent_s = 0.0  # since the last heartbeat
        self.unchanged_s = 0.0  # since the counters changed

    @property
    def in_step(self) -> bool:
        return self.counters[0] > self.counters[1]

    @property
    def step_s(self) -> float:
        """Seconds without progress in the current step; 0 outside of a step."""
        return self.unchanged_s if self.in_step else 0.0

    @property
    def waiting(self) -> bool:
        """Whether the rank is in a collective, or waits for another rank in some other way."""
        return self.counters[2] > self.counters[3]

    def update(self, counters: Sequence[int]) -> None:
        """Record a heartbeat."""
        begun, done, entered, left, bytes_read = counters
        if (begun, done, entered, left, bytes_read) != self.counters:
            self.unchanged_s = 0.0
            self.counters = (begun, done, entered, left, bytes_read)
        self.silent_s = 0.0

    def advance(self, seconds: float) -> None:
        self.silent_s += seconds
        self.unchanged_s += seconds


def silence_limit(step_timeout: float) -> float:
    """Return the seconds without a heartbeat after which a rank counts as lost; infinite if steps have no limit."""
    if not step_timeout:
        return math.inf
    return max(3 * BEAT_S, min(SILENCE_S, step_timeout), step_timeout / 10)


def find_culprit(states: Sequence[RankState]) -> int | None:
    """Return the rank that the others wait for, or None if heartbeats do not show which one that is.

    That is a rank without heartbeats, or one in a step that computes while others wait in a collective.
    """
    late = max(range(len(states)), key=lambda rank: states[rank].silent_s)
    if states[late].silent_s > LATE_S:
        return late
    stuck = [rank for rank, state in enumerate(states) if state.in_step and state.unchanged_s > LATE_S]
    computing = [rank for rank in stuck if not states[rank].waiting]
    return min(computing, key=lambda rank: states[rank].counters) if 0 < len(computing) < len(states) else None


def describe_silence(member: RankInfo, seconds: float, phase: str, same_host: bool) -> str:
    """Return the error message for a rank that sends no heartbeats. `same_host`: /proc here has its process."""
    if same_host and is_stopped(member.pid):
        reason = "it is stopped (SIGSTOP)"
    elif same_host and is_running(member.pid):
        reason = "its process runs, but hangs or does not release Python's GIL"
    else:
        reason = "its process is stopped, or its host or network is down"
    return f"{member} (pid {member.pid}) has not answered for {seconds:.0f} s{while_in(phase)}: {reason}"


def while_in(phase: str) -> str:
    """Return " while PHASE" for an error message; empty if idle."""
    return f" while {phase}" if phase and phase != IDLE else ""


class StoppedTimer:
    """Measures how long a process on this host has been stopped (SIGSTOP), while there are no heartbeats yet."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._since: float | None = None

    def expired(self) -> bool:
        """Return whether it has been stopped for JOIN_STOPPED_S. Call this repeatedly."""
        if not is_stopped(self.pid):
            self._since = None
            return False
        self._since = self._since or time.monotonic()
        return time.monotonic() - self._since > JOIN_STOPPED_S


def is_stopped(pid: int) -> bool:
    """Return whether a process on this host is stopped by a signal or a debugger."""
    return _process_state(pid) in ("T", "t")


def is_running(pid: int) -> bool:
    """Return whether a process on this host runs or sleeps: it has not ended and is not stopped."""
    return _process_state(pid) not in ("", "T", "t", "Z", "X", "x")


def _process_state(pid: int) -> str:
    """Return the state in /proc/PID/stat; empty if there is no such process, or it is in another PID namespace."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""
