"""Who is alive: a connection from every rank to rank 0 that ends when either process does.

A process that dies closes its connections at once; a machine or network that goes silent is noticed by the kernel
(`link.keep_alive`). Rank 0 then tells everyone and speaks for all.
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
from yalis.launch.member import Member

INTERRUPTED = 128 + signal.SIGINT
STUCK_S = 5.0  # for rank 0 to come out of whatever it is in, once a rank is known to be dead
LEAVE_S = 10.0  # for a serving rank to come to an end, once rank 0 has left
IDLE = "idle"  # a phase in which rank 0 is in no collective, and may hear of a failure whenever it asks


def say(sentence: str) -> None:
    """To standard error, from any thread and whatever state Python is in."""
    with contextlib.suppress(OSError):
        os.write(2, f"yalis: {sentence}\n".encode())


class Watch(ABC):
    """What this rank knows about the others' lives. The thread runs from start() to close()."""

    def __init__(self, members: tuple[Member, ...], rank: int) -> None:
        self.members, self.rank = members, rank
        self.failure: str | None = None
        self.departed: set[int] = set()  # ranks that said goodbye
        self.phase = ""
        self.noticed = threading.Event()  # the failure has reached the code that uses the world
        self.closing = False
        self._news = threading.Condition()
        self._sending = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="yalis-watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wait(self, peer: str | None, timeout: float) -> None:
        """Until a failure is known, or that this peer has left in good order."""
        with self._news:
            self._news.wait_for(lambda: self.failure or self.has_left(peer), timeout)

    def has_left(self, peer: str | None) -> bool:
        return any(str(self.members[rank]) == peer for rank in self.departed)

    def set_phase(self, phase: str) -> None:
        self.phase = phase

    @abstractmethod
    def fail(self, sentence: str, aside: bool = False) -> None:
        """End the job with this sentence; `aside`: the thread that runs the job does not know of it."""

    @abstractmethod
    def close(self) -> None:
        """Leave in good order."""

    @abstractmethod
    def _run(self) -> None:
        """What the thread does."""

    def _depart(self, rank: int) -> None:
        with self._news:
            self.departed.add(rank)
            self._news.notify_all()

    def _set_failure(self, sentence: str) -> bool:
        """Whether this is the first."""
        with self._news:
            if self.failure or self.closing:
                return False
            self.failure = sentence
            self._news.notify_all()
            return True

    def _send(self, link: Link, message: Any) -> None:
        with self._sending, contextlib.suppress(LinkLost):  # the reading side notices
            link.send(message)

    def _obituary(self, rank: int, lost: LinkLost, phase: str, end: str | None = None) -> str:
        member = self.members[rank]
        during = f" while {phase}" if phase and phase != IDLE else ""
        if lost.silent:
            return (
                f"{member} (pid {member.pid}) has not answered for {SILENCE_S} s{during}: its host or network is gone"
            )
        return f"{member} (pid {member.pid}{f', {end}' if end else ''}) died{during}"


class HubWatch(Watch):
    """Rank 0's."""

    def __init__(
        self, members: tuple[Member, ...], links: dict[int, Link], local: LocalRanks | None, launched: bool
    ) -> None:
        super().__init__(members, 0)
        self._links, self._local, self._launched = links, local, launched
        self._phases: dict[int, str] = {}
        self._waker = os.pipe()
        os.set_blocking(self._waker[1], False)
        self._hears_signals = False
        self._turns = 0  # how often rank 0 went on to something else
        self._interrupts: deque[int] = deque(maxlen=2)  # in which turn each Ctrl-C came

    def start(self) -> None:
        super().start()
        if threading.current_thread() is threading.main_thread():
            before = signal.set_wakeup_fd(self._waker[1], warn_on_full_buffer=False)
            self._hears_signals = before == -1
            if not self._hears_signals:  # an event loop's, which needs it more
                signal.set_wakeup_fd(before)

    def set_phase(self, phase: str) -> None:
        self._turns += 1
        self.phase = phase

    def fail(self, sentence: str, aside: bool = False) -> None:
        if aside:
            self._end_job(f"{self.members[0]}: {sentence}")
            return
        self.noticed.set()
        self._spread(f"{self.members[0]}: {sentence}", aloud=False)  # whoever calls this has its own words for it

    def close(self) -> None:
        """Say goodbye, so that what ends from here on is no death."""
        with self._news:
            if self.closing:
                return
            self.closing = True
        self.noticed.set()
        for link in self._links.values():
            self._send(link, {"bye": 0})
        os.write(self._waker[1], b"x")
        self._thread.join()
        for link in self._links.values():
            link.close()
        if self._hears_signals:
            if threading.current_thread() is not threading.main_thread():
                return  # signals go on to use the pipe
            signal.set_wakeup_fd(-1)
        for end in self._waker:
            os.close(end)

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._waker[0], selectors.EVENT_READ)
            for rank, link in self._links.items():
                selector.register(link, selectors.EVENT_READ, rank)
            while not self.closing:
                for key, _ in selector.select():
                    if not isinstance(key.fileobj, Link):
                        self._heed(os.read(self._waker[0], 64))
                    elif not self._read(key.data, key.fileobj):
                        selector.unregister(key.fileobj)

    def _heed(self, signals: bytes) -> None:
        """A second Ctrl-C ends rank 0 even in a collective that another rank holds up, where Python hears nothing."""
        self._interrupts.extend([self._turns] * signals.count(signal.SIGINT))
        if self.phase == IDLE or list(self._interrupts) != [self._turns] * 2:
            return
        turn = self._turns
        time.sleep(1)  # in which Python's own handler would have run
        if self._turns == turn and not self.closing and self._spread("rank 0 was interrupted", aloud=False):
            if self._local:
                self._local.stop(0.5)
            os._exit(INTERRUPTED)

    def _read(self, rank: int, link: Link) -> bool:
        """Whether there may be more."""
        while link.poll(0):
            try:
                message = link.receive()
            except LinkLost as lost:
                if rank not in self.departed:
                    self._bury(rank, lost)
                return False
            if "phase" in message:
                self._phases[rank] = message["phase"]
            elif "fail" in message:
                self._end_job(f"{self.members[rank]}: {message['fail']}")
            elif "bye" in message:
                self._depart(rank)
        return True

    def _bury(self, rank: int, lost: LinkLost) -> None:
        if not self.failure and not self.closing:
            end = self._local.ended(rank, 0.3) if self._local else None
            phase = self.phase if self.phase == IDLE else self._phases.get(rank) or self.phase
            self._end_job(self._obituary(rank, lost, phase, end))

    def _end_job(self, sentence: str) -> None:
        # Under a launcher at once: it notices too, and may leave this process no time.
        if not self._spread(sentence, aloud=self._launched):
            return
        deadline = time.monotonic() + STUCK_S
        if self._local:
            self._local.stop(STUCK_S / 2)
        # The failure comes out of receive(), exchange() or explain(), unless rank 0 is stuck in a collective.
        if self.phase != IDLE and not self.noticed.wait(max(0.0, deadline - time.monotonic())):
            if not self._launched:
                say(sentence)
            os._exit(1)

    def _spread(self, sentence: str, aloud: bool) -> bool:
        if not self._set_failure(sentence):
            return False
        if aloud:
            say(sentence)
        for link in self._links.values():
            self._send(link, {"failed": sentence})
        return True


class SpokeWatch(Watch):
    """Every other rank's. A failure ends the process: rank 0 has spoken."""

    def __init__(self, members: tuple[Member, ...], rank: int, link: Link) -> None:
        super().__init__(members, rank)
        self._link = link
        self.over = threading.Event()  # rank 0 has said goodbye
        self.serving = False
        self._left = threading.Event()

    def set_phase(self, phase: str) -> None:
        if phase != self.phase:
            self.phase = phase
            self._send(self._link, {"phase": phase})

    def fail(self, sentence: str, aside: bool = False) -> None:
        if self.closing or self.over.is_set():
            return
        self._send(self._link, {"fail": sentence})
        time.sleep(STUCK_S)  # the answer ends this process
        os._exit(1)

    def serve(self) -> None:
        """From here on the process works for rank 0 alone."""
        self._left.clear()
        self.serving = True

    def leave(self) -> None:
        """This rank has ended what it did for rank 0."""
        self.serving = False
        self._left.set()

    def close(self) -> None:
        with self._news:
            if self.closing:
                return
            self.closing = True
        self.leave()
        self._send(self._link, {"bye": self.rank})
        self._link.close()
        self._thread.join()

    def _run(self) -> None:
        while True:
            try:
                message = self._link.receive()
            except LinkLost as lost:
                if not self.over.is_set() and not self.closing:
                    say(self._obituary(0, lost, self.phase))
                    os._exit(1)
                return
            if "failed" in message:
                os._exit(1)
            if "bye" in message:
                self._depart(0)
                self.over.set()
                if self.serving and not self._left.wait(LEAVE_S):  # stuck in a collective that rank 0 left
                    os._exit(1)
