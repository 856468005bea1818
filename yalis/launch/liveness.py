"""Liveness monitoring over a connection between every rank and rank 0 that breaks when either process dies.

A process that dies closes its connections at once. A process that is stopped, a host that hangs and a step that never
ends are found by heartbeats (`heartbeat.py`). Rank 0 then reports the failure and sends it to all other ranks, which
exit. `rank0_monitor.py` has the monitor of rank 0, this file that of the other ranks.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from yalis.errors import describe_error
from yalis.launch.heartbeat import (
    BEAT_S,
    STEP_TIMEOUT_S,
    Progress,
    describe_silence,
    is_running,
    silence_limit,
    while_in,
)
from yalis.launch.link import KEEPALIVE_S, Link, LinkLost, encode_frame
from yalis.launch.rank_info import RankInfo

STUCK_S = 5.0  # after a failure, for rank 0 to return from its current operation before its process is ended
PRINT_S = 1.0  # for stderr to accept a message
LEAVE_S = 10.0  # after rank 0 has left, for a rank that serves it to finish

#: A rank stops sending heartbeats when rank 0 has sent none for this long: they would fill the socket if it is stopped.
_MAX_UNREAD_S = 20.0

#: Applied to printed messages. The command line sets it, to name flags instead of keyword arguments.
reword: Callable[[str], str] = str


def print_error(message: str) -> None:
    """Write a line to stderr, from any thread and in any state of the interpreter.

    Gives up after PRINT_S if stderr does not accept it, such as a full pipe or a terminal after Ctrl-S: the caller is
    about to end the process, and other ranks must not wait for that.
    """
    unwritten = f"yalis: {reword(message)}\n".encode(errors="backslashreplace")
    deadline = time.monotonic() + PRINT_S
    poller = select.poll()
    poller.register(2, select.POLLOUT)
    with contextlib.suppress(OSError):
        while unwritten and poller.poll(max(0.0, deadline - time.monotonic()) * 1000):
            # A pipe that is writable accepts this many bytes without blocking.
            unwritten = unwritten[os.write(2, unwritten[: select.PIPE_BUF]) :]


class LivenessMonitor(ABC):
    """Tracks on a background thread which ranks are alive. The thread runs from start() to close()."""

    def __init__(self, members: tuple[RankInfo, ...], rank: int) -> None:
        self.members, self.rank = members, rank
        self.progress = Progress()
        self.step_timeout = STEP_TIMEOUT_S  # seconds; 0: no limit
        self.failure: str | None = None
        self.failure_traceback: str | None = None  # if an exception on another rank caused the failure
        self.failure_printed = False  # by this monitor
        self.departed: set[int] = set()  # ranks that left the job without an error
        self.phase = ""
        self._phase_thread = threading.get_ident()  # the thread that runs the job
        self.failure_handled = threading.Event()  # the thread that runs the job has raised the failure, or leaves
        self.closing = False
        self._changed = threading.Condition()  # of failure, departed and closing
        self._sending = threading.Lock()
        self._thread = threading.Thread(target=self._run_or_exit, name="yalis-liveness", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wait(self, peer: str | None, timeout: float) -> None:
        """Wait until the job has failed or `peer` has left it without an error, at most `timeout` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: self.failure or self.has_left(peer), timeout)

    def has_left(self, peer: str | None) -> bool:
        return any(str(self.members[rank]) == peer for rank in self.departed)

    def set_phase(self, phase: str) -> None:
        self.phase = phase

    def set_step_timeout(self, seconds: float) -> None:
        self.step_timeout = seconds

    def mark_failure_handled(self) -> None:
        """Record that the caller raises the failure. Does nothing unless the caller is the thread that runs the job."""
        if threading.get_ident() == self._phase_thread:
            self.failure_handled.set()

    @abstractmethod
    def fail(self, message: str, background: bool = False, traceback: str | None = None) -> None:
        """End the job with this message. `background`: the caller is not the thread that runs the job."""

    @abstractmethod
    def leave(self) -> None:
        """Announce that this rank leaves, so that connections that break from now on are not failures."""

    @abstractmethod
    def close(self) -> None:
        """Leave the job without an error and end the background thread."""

    @abstractmethod
    def _run(self) -> None:
        """Body of the background thread."""

    @abstractmethod
    def _broadcast_failure(self, message: str, print_it: bool, traceback: str | None = None) -> bool:
        """Send the failure to the ranks that this one has a link to. Returns False if the job has ended already."""

    def _run_or_exit(self) -> None:
        """Run the background thread. Without it no failure would be noticed, so an error in it ends the job."""
        try:
            self._run()
        except Exception as error:
            message = f"{self.members[self.rank]}: the liveness monitor failed ({describe_error(error)})"
            with contextlib.suppress(Exception):
                self._broadcast_failure(message, print_it=False)
            if not self.closing:
                print_error(message)
                os._exit(1)

    def _mark_departed(self, rank: int) -> None:
        with self._changed:
            self.departed.add(rank)
            self._changed.notify_all()

    def _set_failure(self, message: str, traceback: str | None = None, printed: bool = False) -> bool:
        """Record the failure. `printed`: by this monitor. Returns whether it is the first one."""
        with self._changed:
            if self.failure or self.closing:
                return False
            self.failure, self.failure_traceback, self.failure_printed = message, traceback, printed
            self._changed.notify_all()
            return True

    def _send(self, link: Link, message: Any) -> None:
        self._send_frame(link, encode_frame(message))

    def _send_frame(self, link: Link, frame: bytes) -> None:
        with self._sending, contextlib.suppress(LinkLost):  # the thread that reads the link handles it
            link.send_frame(frame)

    def _name(self, rank: int, status: str | None = None) -> str:
        member = self.members[rank]
        return f"{member} (pid {member.pid}{f', {status}' if status else ''})"

    def _describe_death(self, rank: int, lost: LinkLost, phase: str, status: str | None = None) -> str:
        if lost.silent:
            return f"{self._name(rank)} cannot be reached{while_in(phase)}: its host or network is down"
        return f"{self._name(rank, status)} died{while_in(phase)}"

    def _describe_silence(self, rank: int, seconds: float, phase: str) -> str:
        return describe_silence(self.members[rank], seconds, phase, self._is_on_this_host(rank))

    def _is_on_this_host(self, rank: int) -> bool:
        return self.members[rank].node == self.members[self.rank].node

    def _runs_here(self, rank: int) -> bool:
        """Return whether the rank's process runs on this host, according to /proc.

        If it sends no heartbeats nevertheless, some code in it does not release Python's GIL: a long sum() or
        json.load() of the user, for example. That is no failure before the step timeout.
        """
        return self._is_on_this_host(rank) and is_running(self.members[rank].pid)


class WorkerMonitor(LivenessMonitor):
    """The monitor of ranks other than 0. A failure ends the process without a message, because rank 0 prints it."""

    def __init__(self, members: tuple[RankInfo, ...], rank: int, link: Link) -> None:
        super().__init__(members, rank)
        self._link = link
        self.rank0_left = threading.Event()  # rank 0 has left without an error
        self.rank0_stopping = False  # rank 0 has received Ctrl-C or SIGTERM
        self._rank0_idle = False  # no request runs on rank 0
        self.serving = False
        self._done_serving = threading.Event()

    def set_phase(self, phase: str) -> None:
        if phase != self.phase:
            self.phase = phase
            self._send(self._link, {"phase": phase})

    def set_step_timeout(self, seconds: float) -> None:
        if seconds != self.step_timeout:
            super().set_step_timeout(seconds)
            # While rank 0 is idle its silence is no failure, so only TCP notices that its host or network is down.
            self._link.set_keepalive(min(KEEPALIVE_S, silence_limit(seconds)))

    def fail(self, message: str, background: bool = False, traceback: str | None = None) -> None:
        if not self._broadcast_failure(message, print_it=False, traceback=traceback):
            return
        self.rank0_left.wait(STUCK_S)  # rank 0 answers `failed`, which ends this process, unless it has left
        os._exit(1)

    def start_serving(self) -> None:
        """Mark this process as serving rank 0, so that it ends when rank 0 does."""
        self._done_serving.clear()
        self.serving = True

    def stop_serving(self) -> None:
        self.serving = False
        self._done_serving.set()

    def leave(self) -> None:
        with self._changed:
            if self.closing:
                return
            self.closing = True
        self.stop_serving()
        self._send(self._link, {"bye": self.rank})

    def close(self) -> None:
        self.leave()
        self._link.close()
        self._thread.join()

    def _run(self) -> None:
        silent_s = 0.0
        ticked = counted = time.monotonic()  # counted: until when silent_s has been counted
        while True:
            if self._link.poll(max(0.0, ticked + BEAT_S - time.monotonic())):
                try:
                    message = self._link.receive()
                except LinkLost as lost:
                    if not self.rank0_left.is_set() and not self.closing:
                        print_error(self._describe_death(0, lost, self.phase))
                        os._exit(1)
                    return
                silent_s, counted = 0.0, time.monotonic()
                self._handle(message)
            now = time.monotonic()
            if now - ticked >= BEAT_S:
                silent_s += min(now - counted, 2 * BEAT_S)  # if this process was stopped, it read no heartbeats
                ticked = counted = now
                if silent_s < _MAX_UNREAD_S:
                    self._send(self._link, {"beat": self.progress.counters()})
                if self._is_rank0_lost(silent_s) and not self.rank0_left.is_set() and not self.closing:
                    print_error(self._describe_silence(0, silent_s, self.phase))
                    os._exit(1)

    def _is_rank0_lost(self, silent_s: float) -> bool:
        """Return whether to exit because rank 0 has sent no heartbeat for this long.

        While rank 0 is idle, code of the user runs there, and the user may stop it with Ctrl-Z: only a connection that
        breaks ends this process then.
        """
        if self._rank0_idle or not self.step_timeout or silent_s <= silence_limit(self.step_timeout):
            return False
        return silent_s > self.step_timeout or not self._runs_here(0)

    def _broadcast_failure(self, message: str, print_it: bool, traceback: str | None = None) -> bool:
        if self.closing or self.rank0_left.is_set():
            return False
        self._send(self._link, {"fail": message, "traceback": traceback})
        return True

    def _handle(self, message: dict[str, Any]) -> None:
        if "failed" in message:
            os._exit(1)
        if "beat" in message:
            step_timeout, self._rank0_idle, self.rank0_stopping = message["beat"]
            self.set_step_timeout(step_timeout)
        if "bye" in message:
            self._mark_departed(0)
            self.rank0_left.set()
            if self.serving and not self._done_serving.wait(LEAVE_S):  # stuck in a collective that rank 0 has left
                os._exit(1)
