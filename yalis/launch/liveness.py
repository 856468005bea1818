"""Liveness monitoring: a connection from every rank to rank 0 that breaks when either process dies.

A process that dies closes its connections at once. A host or network that goes silent is detected by TCP keepalive
(`link.keep_alive`). Rank 0 then reports the failure and tells all other ranks to exit.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from typing import Any

from yalis.launch.link import SILENCE_S, Link, LinkLost
from yalis.launch.local import LocalRanks
from yalis.launch.rank_info import RankInfo

INTERRUPTED = 128 + signal.SIGINT
STUCK_S = 5.0  # for rank 0 to return from its current operation after a rank has died, before it is killed
LEAVE_S = 10.0  # for a serving rank to return after rank 0 has left
IDLE = "idle"  # the phase in which rank 0 is in no collective, so it sees a failure at its next call


def print_error(message: str) -> None:
    """Write a line to stderr, from any thread and in any state of the interpreter."""
    with contextlib.suppress(OSError):
        os.write(2, f"yalis: {message}\n".encode())


class LivenessMonitor(ABC):
    """Tracks on a background thread which ranks are alive. The thread runs from start() to close()."""

    def __init__(self, members: tuple[RankInfo, ...], rank: int) -> None:
        self.members, self.rank = members, rank
        self.failure: str | None = None
        self.departed: set[int] = set()  # ranks that left the job without an error
        self.phase = ""
        self.noticed = threading.Event()  # the failure was raised in the thread that runs the job
        self.closing = False
        self._changed = threading.Condition()  # of failure, departed and closing
        self._sending = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="yalis-liveness", daemon=True)

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

    @abstractmethod
    def fail(self, message: str, background: bool = False) -> None:
        """End the job with this message. `background`: the caller is not the thread that runs the job."""

    @abstractmethod
    def close(self) -> None:
        """Leave the job without an error."""

    @abstractmethod
    def _run(self) -> None:
        """Body of the background thread."""

    def _mark_departed(self, rank: int) -> None:
        with self._changed:
            self.departed.add(rank)
            self._changed.notify_all()

    def _set_failure(self, message: str) -> bool:
        """Record the failure. Returns whether it is the first one."""
        with self._changed:
            if self.failure or self.closing:
                return False
            self.failure = message
            self._changed.notify_all()
            return True

    def _send(self, link: Link, message: Any) -> None:
        with self._sending, contextlib.suppress(LinkLost):  # the reading side handles it
            link.send(message)

    def _describe_death(self, rank: int, lost: LinkLost, phase: str, status: str | None = None) -> str:
        member = self.members[rank]
        during = f" while {phase}" if phase and phase != IDLE else ""
        if lost.silent:
            return (
                f"{member} (pid {member.pid}) has not answered for {SILENCE_S} s{during}: its host or network is down"
            )
        return f"{member} (pid {member.pid}{f', {status}' if status else ''}) died{during}"


class Rank0Monitor(LivenessMonitor):
    """Rank 0's monitor. It has a link to every other rank, and reports failures for the whole job."""

    def __init__(
        self, members: tuple[RankInfo, ...], links: dict[int, Link], local: LocalRanks | None, launched: bool
    ) -> None:
        """`launched`: an external launcher started the ranks."""
        super().__init__(members, 0)
        self._links, self._local, self._launched = links, local, launched
        self._phases: dict[int, str] = {}
        self._wakeup_pipe = os.pipe()
        os.set_blocking(self._wakeup_pipe[1], False)
        self._receives_signals = False
        self._phase_count = 0  # how often rank 0 has entered a phase
        self._interrupts: deque[int] = deque(maxlen=2)  # the phase count at each of the last two Ctrl-C

    def start(self) -> None:
        super().start()
        if threading.current_thread() is threading.main_thread():
            previous = signal.set_wakeup_fd(self._wakeup_pipe[1], warn_on_full_buffer=False)
            self._receives_signals = previous == -1
            if not self._receives_signals:  # it belongs to an event loop, which cannot do without it
                signal.set_wakeup_fd(previous)

    def set_phase(self, phase: str) -> None:
        self._phase_count += 1
        self.phase = phase

    def fail(self, message: str, background: bool = False) -> None:
        if background:
            self._end_job(f"{self.members[0]}: {message}")
            return
        self.noticed.set()
        self._broadcast_failure(f"{self.members[0]}: {message}", print_it=False)  # the caller raises its own error

    def close(self) -> None:
        """Send a goodbye to every rank, so that connections that break from here on are not failures."""
        with self._changed:
            if self.closing:
                return
            self.closing = True
        self.noticed.set()
        for link in self._links.values():
            self._send(link, {"bye": 0})
        os.write(self._wakeup_pipe[1], b"x")
        self._thread.join()
        for link in self._links.values():
            link.close()
        if self._receives_signals:
            if threading.current_thread() is not threading.main_thread():
                return  # only the main thread can reset the wakeup fd, so the pipe stays open
            signal.set_wakeup_fd(-1)
        for end in self._wakeup_pipe:
            os.close(end)

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._wakeup_pipe[0], selectors.EVENT_READ)
            for rank, link in self._links.items():
                selector.register(link, selectors.EVENT_READ, rank)
            while not self.closing:
                for key, _ in selector.select():
                    if not isinstance(key.fileobj, Link):
                        self._handle_signals(os.read(self._wakeup_pipe[0], 64))
                    elif not self._read(key.data, key.fileobj):
                        selector.unregister(key.fileobj)

    def _handle_signals(self, signals: bytes) -> None:
        """End rank 0 at a second Ctrl-C in one phase.

        A collective that another rank holds up never returns to the interpreter, so Python's own handler cannot run.
        """
        self._interrupts.extend([self._phase_count] * signals.count(signal.SIGINT))
        if self.phase == IDLE or list(self._interrupts) != [self._phase_count] * 2:
            return
        phase_count = self._phase_count
        time.sleep(1)  # for Python's own handler to run, if it can
        if (
            self._phase_count == phase_count
            and not self.closing
            and self._broadcast_failure("rank 0 was interrupted", print_it=False)
        ):
            if self._local:
                self._local.stop(0.5)
            os._exit(INTERRUPTED)

    def _read(self, rank: int, link: Link) -> bool:
        """Handle the messages that have arrived. Returns whether the link is still open."""
        while link.poll(0):
            try:
                message = link.receive()
            except LinkLost as lost:
                if rank not in self.departed:
                    self._handle_death(rank, lost)
                return False
            if "phase" in message:
                self._phases[rank] = message["phase"]
            elif "fail" in message:
                self._end_job(f"{self.members[rank]}: {message['fail']}")
            elif "bye" in message:
                self._mark_departed(rank)
        return True

    def _handle_death(self, rank: int, lost: LinkLost) -> None:
        if not self.failure and not self.closing:
            status = self._local.exit_status(rank, 0.3) if self._local else None
            phase = self.phase if self.phase == IDLE else self._phases.get(rank) or self.phase
            self._end_job(self._describe_death(rank, lost, phase, status))

    def _end_job(self, message: str) -> None:
        # Print at once under a launcher: it notices the death too, and may kill this process before anything else.
        if not self._broadcast_failure(message, print_it=self._launched):
            return
        deadline = time.monotonic() + STUCK_S
        if self._local:
            self._local.stop(STUCK_S / 2)
        # receive(), all_gather_object() or explain() raises the failure, unless rank 0 is stuck in a collective.
        if self.phase != IDLE and not self.noticed.wait(max(0.0, deadline - time.monotonic())):
            if not self._launched:
                print_error(message)
            os._exit(1)

    def _broadcast_failure(self, message: str, print_it: bool) -> bool:
        """Tell all ranks to exit. Returns False if the job has failed or is closing already."""
        if not self._set_failure(message):
            return False
        if print_it:
            print_error(message)
        for link in self._links.values():
            self._send(link, {"failed": message})
        return True


class WorkerMonitor(LivenessMonitor):
    """The monitor of every other rank. A failure ends the process without a message: rank 0 has printed it."""

    def __init__(self, members: tuple[RankInfo, ...], rank: int, link: Link) -> None:
        super().__init__(members, rank)
        self._link = link
        self.rank0_left = threading.Event()  # rank 0 has left without an error
        self.serving = False
        self._done_serving = threading.Event()

    def set_phase(self, phase: str) -> None:
        if phase != self.phase:
            self.phase = phase
            self._send(self._link, {"phase": phase})

    def fail(self, message: str, background: bool = False) -> None:
        if self.closing or self.rank0_left.is_set():
            return
        self._send(self._link, {"fail": message})
        time.sleep(STUCK_S)  # rank 0 replies `failed`, which ends this process
        os._exit(1)

    def start_serving(self) -> None:
        """Mark this process as serving rank 0, so that it ends when rank 0 does."""
        self._done_serving.clear()
        self.serving = True

    def stop_serving(self) -> None:
        self.serving = False
        self._done_serving.set()

    def close(self) -> None:
        with self._changed:
            if self.closing:
                return
            self.closing = True
        self.stop_serving()
        self._send(self._link, {"bye": self.rank})
        self._link.close()
        self._thread.join()

    def _run(self) -> None:
        while True:
            try:
                message = self._link.receive()
            except LinkLost as lost:
                if not self.rank0_left.is_set() and not self.closing:
                    print_error(self._describe_death(0, lost, self.phase))
                    os._exit(1)
                return
            if "failed" in message:
                os._exit(1)
            if "bye" in message:
                self._mark_departed(0)
                self.rank0_left.set()
                if self.serving and not self._done_serving.wait(LEAVE_S):  # stuck in a collective that rank 0 has left
                    os._exit(1)
