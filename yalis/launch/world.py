"""The ranks of a job as one of them sees it."""

from __future__ import annotations

import atexit
import contextlib
import os
import secrets
import socket
import sys
import time
import weakref
from collections.abc import Iterator
from typing import Any

from yalis.errors import YalisFailure, first_line
from yalis.launch.link import MAX_FRAME, Link, LinkLost, listen
from yalis.launch.local import LocalRanks
from yalis.launch.member import Member
from yalis.launch.watch import HubWatch, SpokeWatch, Watch

_EXPLAIN_S = 3.0  # the watch hears of a death within milliseconds
_PEERS_FAULT = (YalisFailure, RuntimeError, OSError)  # what links, torch's and MPI's collectives raise
_LINK_S = 60.0
_GRACE_S = 8.0  # for self-started ranks to end on their own

__all__ = ["Member", "World"]


class World:
    """All ranks of a job."""

    def __init__(
        self,
        rank: int,
        members: tuple[Member, ...],
        controls: dict[int, Link] | None = None,
        watch: Watch | None = None,
        local: LocalRanks | None = None,
        kept: bool = False,
    ) -> None:
        """`controls` go from rank 0 to each rank, and from those to rank 0. A kept world outlives close()."""
        self.rank, self.members = rank, members
        self._controls = controls or {}
        self._links: weakref.WeakSet[Link] = weakref.WeakSet()
        self._watch, self._local, self._kept = watch, local, kept
        self._own_failure: str | None = None
        self._pid = os.getpid()
        self._closed = False
        for peer, link in self._controls.items():
            link.guard, link.peer = self, self.name(peer)
        if watch:
            watch.start()
            atexit.register(self._at_exit)

    @classmethod
    def alone(cls) -> World:
        """A job of this process only: no socket, no thread."""
        return cls(0, (Member(0, socket.gethostname(), 0, 0, "127.0.0.1", os.getpid()),))

    @property
    def size(self) -> int:
        return len(self.members)

    def name(self, rank: int) -> str:
        """ "rank 3 on HOST"."""
        return str(self.members[rank])

    @property
    def phase(self) -> str:
        """What this rank is doing, for the sentence that is said if it dies; "idle" in rank 0 while nothing runs."""
        return self._watch.phase if self._watch else ""

    @phase.setter
    def phase(self, phase: str) -> None:
        if self._watch:
            self._watch.set_phase(phase)

    @property
    def failure(self) -> str | None:
        """The sentence of what broke the job, once known."""
        return self._watch.failure if self._watch else self._own_failure

    @property
    def over(self) -> bool:
        """Whether rank 0 has said goodbye to this rank."""
        return isinstance(self._watch, SpokeWatch) and self._watch.over.is_set()

    def wait_over(self, timeout: float) -> bool:
        """Whether rank 0 says goodbye within this time."""
        return isinstance(self._watch, SpokeWatch) and self._watch.over.wait(timeout)

    @contextlib.contextmanager
    def in_service(self) -> Iterator[None]:
        """Inside, this rank has no purpose of its own: it is ended if it cannot come out after rank 0's goodbye."""
        if isinstance(self._watch, SpokeWatch):
            self._watch.serve()
        try:
            yield
        finally:
            if isinstance(self._watch, SpokeWatch):
                self._watch.leave()

    def exchange(self, value: Any) -> list[Any]:
        """Everyone's value (anything JSON can carry), by rank; everyone calls this."""
        self._check()
        if self.rank:
            self._controls[0].send(value)
            everyone: list[Any] = self._controls[0].receive()
            return everyone
        everyone = [value, *(self._controls[rank].receive() for rank in range(1, self.size))]
        for link in self._controls.values():
            link.send(everyone)
        return everyone

    def links(self, leader: int | None) -> dict[int, Link]:
        """Links from each leader to its followers; everyone calls this, naming its leader.

        A leader names itself and gets a link to each follower, a follower gets {leader: link}, None takes no part.
        """
        leaders = self.exchange(leader)
        for rank, chosen in enumerate(leaders):
            if chosen is not None and leaders[chosen] != chosen:
                raise ValueError(f"rank {rank} follows rank {chosen}, which does not lead")
        followers = [rank for rank, chosen in enumerate(leaders) if chosen == self.rank != rank]
        server = listen(self.members[self.rank].address, 0) if followers else None
        try:
            door = [server.getsockname()[1], secrets.token_hex(16)] if server else None
            doors = self.exchange(door)
            if server and door:
                return self._receive_followers(server, door[1], followers)
        finally:
            if server:
                server.close()
        return {} if leader is None or leader == self.rank else {leader: self._follow(leader, *doors[leader])}

    def fail(self, sentence: str, aside: bool = False) -> None:
        """Tell everyone that this rank cannot go on; returns in rank 0 only. `aside`: said by a thread that looks on,
        while another one may be stuck in the job."""
        if self._watch:
            self._watch.fail(sentence, aside)
        else:
            self._own_failure = sentence

    def explain(self, error: BaseException) -> YalisFailure | None:
        """What ended the job, if `error` follows from it; waits a little for that to become known."""
        if not self._watch or self._closed or not isinstance(error, _PEERS_FAULT):
            return None
        peer = error.peer if isinstance(error, LinkLost) else None
        self._watch.wait(peer, _EXPLAIN_S)
        if self._watch.failure:
            self._watch.noticed.set()
            return YalisFailure(self._watch.failure)
        return YalisFailure(f"{peer} has already ended") if self._watch.has_left(peer) else None

    def close(self) -> None:
        """Leave the job. Under a launcher the ranks stay together for the next engine until the process ends."""
        if not self._kept:
            self._leave()

    def _leave(self) -> None:
        if self._closed or self._pid != os.getpid():  # a fork has no part in this
            return
        self._closed = True
        atexit.unregister(self._at_exit)
        failed = self.failure is not None
        try:
            if self._watch:
                self._watch.close()
            for link in (*self._controls.values(), *self._links):
                link.close()
        finally:
            if self._local:
                self._local.stop(0.5 if failed else _GRACE_S)

    def _at_exit(self) -> None:
        if self.rank and self._pid == os.getpid():
            uncaught = getattr(sys, "last_value", None)
            if uncaught is not None and not self.over:
                self.fail(first_line(uncaught))
        self._leave()

    def _check(self) -> None:
        if self._closed:
            raise YalisFailure("this rank has left its job")
        if self.failure:
            if self._watch:
                self._watch.noticed.set()
            raise YalisFailure(self.failure)

    def _receive_followers(self, server: socket.socket, secret: str, followers: list[int]) -> dict[int, Link]:
        links: dict[int, Link] = {}
        deadline = time.monotonic() + _LINK_S
        server.settimeout(0.5)
        while len(links) < len(followers):
            try:
                sock, _ = server.accept()
            except TimeoutError:
                self._check()
                if time.monotonic() > deadline:
                    late = ", ".join(self.name(rank) for rank in followers if rank not in links)
                    raise YalisFailure(
                        f"{late} did not reach {self.name(self.rank)} at {self.members[self.rank].address} within "
                        f"{_LINK_S:g} s; hosts of one job must reach each other's ports"
                    ) from None
                continue
            link = Link(sock, "an unknown process", limit=1 << 10)
            hello = None
            with contextlib.suppress(LinkLost):  # that was no follower
                hello = link.receive() if link.poll(5) else None
            if not isinstance(hello, list) or len(hello) != 2 or hello[0] != secret or hello[1] not in followers:
                link.close()
                continue
            link.peer, link.guard, link.limit = self.name(hello[1]), self, MAX_FRAME
            links[hello[1]] = link
            self._links.add(link)
        return {rank: links[rank] for rank in followers}

    def _follow(self, leader: int, port: int, secret: str) -> Link:
        address = self.members[leader].address
        try:
            sock = socket.create_connection((address, port), timeout=_LINK_S)
        except OSError as error:
            failure = YalisFailure(
                f"{self.name(self.rank)} cannot reach {self.name(leader)} at {address}, port {port} "
                f"({error.strerror or error}); hosts of one job must reach each other's ports"
            )
            raise self.explain(failure) or failure from error
        link = Link(sock, self.name(leader), self)
        self._links.add(link)
        link.send([secret, self.rank])
        return link


def make_world(
    rank: int,
    members: tuple[Member, ...],
    controls: dict[int, Link],
    watches: dict[int, Link],
    local: LocalRanks | None = None,
    kept: bool = False,
) -> World:
    """A world of ranks that have met."""
    watch = SpokeWatch(members, rank, watches[0]) if rank else HubWatch(members, watches, local, kept)
    return World(rank, members, controls, watch, local, kept)
