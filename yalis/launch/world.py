"""The `World`: all ranks of a job, messages between them, and the failure that ends the job."""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from yalis.errors import PeerLost, RankTraceback, YalisError, YalisFailure, describe_error
from yalis.launch.auth import JobKey
from yalis.launch.fan_out import FAN_OUT, FanOut, tree_parents
from yalis.launch.heartbeat import Progress
from yalis.launch.link import Link, LinkLost, encode_frame, listen
from yalis.launch.liveness import LivenessMonitor, WorkerMonitor
from yalis.launch.local import LocalRanks
from yalis.launch.peer_links import CONNECT_S, accept_followers, connect_to_leader
from yalis.launch.rank0_monitor import Rank0Monitor
from yalis.launch.rank_info import RankInfo

_EXPLAIN_S = 3.0  # after a lost connection, for the failed rank to report its error; normally milliseconds
_RANK0_EXPLAIN_S = 5.0  # longer, because a rank whose wait ends without an explanation reports its own error to rank 0
_MAX_TRACEBACK = 16 << 10  # characters; of a longer traceback only the end is sent
_EXIT_S = 8.0  # for the processes of LocalRanks to exit, after all ranks have left

__all__ = ["RankInfo", "World"]


class World:
    """All ranks of a job, as seen by one of them. Failures of any rank surface here as `YalisFailure`."""

    def __init__(
        self,
        rank: int,
        members: tuple[RankInfo, ...],
        controls: dict[int, Link] | None = None,
        monitor: LivenessMonitor | None = None,
        key: JobKey | None = None,
        local: LocalRanks | None = None,
        persistent: bool = False,
    ) -> None:
        """`controls`: on rank 0 a link to each other rank, elsewhere {0: link}. A persistent world outlives close()."""
        self.rank, self.members = rank, members
        self._controls = controls or {}
        self._links: weakref.WeakSet[Link] = weakref.WeakSet()
        self._key = key  # authenticates the connections of open_links()
        self._openings = 0  # how often open_links() was called, the same on every rank
        self._monitor, self._local, self._persistent = monitor, local, persistent
        self._own_failure: str | None = None
        #: counters that the engine and the communicators increment
        self.progress = monitor.progress if monitor else Progress()
        self._pid = os.getpid()
        self._closed = False
        for peer, link in self._controls.items():
            link.failure_source, link.peer = self, self.name(peer)
        if monitor:
            monitor.start()
            atexit.register(self._at_exit)

    @classmethod
    def single_process(cls) -> World:
        """Return a world of this process only, without sockets or threads."""
        return cls(0, (RankInfo(0, socket.gethostname(), 0, 0, "127.0.0.1", os.getpid()),))

    @property
    def size(self) -> int:
        return len(self.members)

    def name(self, rank: int) -> str:
        """Return "rank 3 on HOST"."""
        return str(self.members[rank])

    @property
    def phase(self) -> str:
        """What this rank is doing, for the message if it dies; rank 0 is "idle" while no request runs."""
        return self._monitor.phase if self._monitor else ""

    @phase.setter
    def phase(self, phase: str) -> None:
        if self._monitor:
            self._monitor.set_phase(phase)

    def set_step_timeout(self, seconds: float) -> None:
        """End the job if a step makes no progress for this long; 0: no limit. Only the value on rank 0 counts."""
        if self._monitor:
            self._monitor.set_step_timeout(seconds)

    def set_idle(self) -> None:
        """Tell the other ranks that no request runs on rank 0: its silence is then no failure, until its next phase."""
        if isinstance(self._monitor, Rank0Monitor):
            self._monitor.set_idle()

    @property
    def failure(self) -> str | None:
        """The failure message of the job, or None while it is healthy."""
        return self._monitor.failure if self._monitor else self._own_failure

    @property
    def rank0_left(self) -> bool:
        """Whether rank 0 has left the job without an error. Always False on rank 0."""
        return isinstance(self._monitor, WorkerMonitor) and self._monitor.rank0_left.is_set()

    def wait_rank0_left(self, timeout: float) -> bool:
        """Wait up to `timeout` seconds for rank 0 to leave. Returns whether it has."""
        return isinstance(self._monitor, WorkerMonitor) and self._monitor.rank0_left.wait(timeout)

    @property
    def rank0_stopping(self) -> bool:
        """Whether rank 0 ends because of a Ctrl-C or SIGTERM. Always False on rank 0."""
        return isinstance(self._monitor, WorkerMonitor) and self._monitor.rank0_stopping

    @contextlib.contextmanager
    def serving_rank0(self) -> Iterator[None]:
        """Mark the block as work for rank 0: the process is killed if it is stuck there after rank 0 has left."""
        if isinstance(self._monitor, WorkerMonitor):
            self._monitor.start_serving()
        try:
            yield
        finally:
            if isinstance(self._monitor, WorkerMonitor):
                self._monitor.stop_serving()

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return the values of all ranks, by rank. Collective; a value is anything that JSON can represent.

        All ranks receive all values: use reduce_object() for large ones.
        """
        values: list[Any] = self.reduce_object(value, lambda values: values)
        return values

    def reduce_object(self, value: Any, combine: Callable[[list[Any]], Any]) -> Any:
        """Return `combine` of the values of all ranks, by rank. Collective; only rank 0 calls `combine`."""
        self._check()
        with self.progress.waiting():
            if self.rank:
                self._controls[0].send(value)
                return self._controls[0].receive()
            combined = combine([value, *(self._controls[rank].receive() for rank in range(1, self.size))])
            frame = encode_frame(combined)
            for link in self._controls.values():
                link.send_frame(frame)
        return combined

    def broadcast_object(self, value: Any) -> Any:
        """Return rank 0's value, after all ranks have called this. Collective."""
        return self.reduce_object(None if self.rank else value, lambda values: values[0])

    def open_links(self, leader: int | None) -> dict[int, Link]:
        """Open a link between each leader and its followers. Collective: each rank passes the rank of its leader.

        A leader passes its own rank and gets a link to each follower; a follower gets {leader: link}. A rank that
        passes None gets no link.
        """
        above, below = self._open(self._gather_leaders(leader))
        return {**above, **below}

    def open_fan_out(self, leader: int | None, fan_out: int = FAN_OUT) -> FanOut:
        """Open links as open_links() does, and if there are many followers a tree for the leader's messages."""
        leaders = self._gather_leaders(leader)
        above, below = self._open(leaders)
        groups: dict[int, list[int]] = {}
        for rank, chosen in enumerate(leaders):
            if chosen is not None and chosen != rank:
                groups.setdefault(chosen, [chosen]).append(rank)
        tree_above, tree_below = above, below
        if any(len(group) - 1 > fan_out for group in groups.values()):
            parents: list[int | None] = [None] * self.size
            for group in groups.values():
                for rank, parent in zip(group, tree_parents(len(group) - 1, fan_out), strict=True):
                    parents[rank] = group[parent]
            tree_above, tree_below = self._open(parents)
        return FanOut({**above, **below}, next(iter(tree_above.values()), None), list(tree_below.values()))

    def _gather_leaders(self, leader: int | None) -> list[int | None]:
        leaders = self.all_gather_object(leader)
        for rank, chosen in enumerate(leaders):
            if chosen is not None and leaders[chosen] != chosen:
                raise ValueError(f"rank {rank} follows rank {chosen}, which is not a leader")
        return leaders

    def _open(self, parents: Sequence[int | None]) -> tuple[dict[int, Link], dict[int, Link]]:
        """Open a link between each rank and its parent. Collective; `parents` is the same on every rank.

        Returns this rank's link to its parent and those to its children, by rank. A rank without a parent passes None
        or its own rank. Parents are connected before their children, because they accept only then.
        """
        parent = parents[self.rank]
        children = [rank for rank, chosen in enumerate(parents) if chosen == self.rank != rank]
        self._openings += 1
        server = listen(self.members[self.rank].address, 0) if children else None
        try:
            ports = self.all_gather_object(server.getsockname()[1] if server else None)
            above: dict[int, Link] = {}
            with self.progress.waiting():
                if parent is not None and parent != self.rank:
                    above = {parent: self._connect(parent, ports[parent])}
                return above, self._accept_followers(server, children) if server else {}
        finally:
            if server:
                server.close()

    def fail(self, error: BaseException | str, background: bool = False) -> None:
        """End the job because this rank cannot continue. Returns on rank 0 only; other ranks exit.

        `background`: the caller is not the thread that runs the job, which may be stuck.
        """
        message = error if isinstance(error, str) else describe_error(error)
        if self._monitor:
            self._monitor.fail(message, background, None if isinstance(error, str) else _format_traceback(error))
        else:
            self._own_failure = message

    def explain(self, error: BaseException) -> YalisFailure | None:
        """Return the failure that ended the job if it caused `error`, else None.

        If `error` is a PeerLost, waits a few seconds for the lost rank to report its own error.
        """
        if not self._monitor or self._closed:
            return None
        if isinstance(error, PeerLost):
            peer = error.peer if isinstance(error, LinkLost) else None
            self._monitor.wait(peer, _EXPLAIN_S if self.rank else _RANK0_EXPLAIN_S)
            if not self._monitor.failure and self._monitor.has_left(peer):
                return YalisFailure(f"{peer} has already ended")
        return self._job_failure()

    def abort(self, error: BaseException) -> BaseException:
        """End the job after an error on rank 0. Returns the exception to raise.

        That is the failure of another rank if it caused `error`. In a job of several ranks, an error that was not
        written for the user becomes a YalisFailure that names rank 0.
        """
        if isinstance(error, Exception) and (failure := self.explain(error)) is not None:
            return failure
        self.fail(error)
        if self.size == 1 or isinstance(error, YalisError) or not isinstance(error, Exception):
            return error
        failure = YalisFailure(f"{self.name(0)}: {describe_error(error)}")
        failure.__cause__ = error
        return failure

    def _job_failure(self) -> YalisFailure | None:
        """Return the failure that ended the job as an exception to raise, or None while the job is healthy."""
        if not self._monitor or not self._monitor.failure:
            return YalisFailure(self._own_failure) if self._own_failure else None
        self._monitor.mark_failure_handled()
        failure, traceback = YalisFailure(self._monitor.failure), self._monitor.failure_traceback
        failure.printed = self._monitor.failure_printed
        failure.__cause__ = RankTraceback(f"\n{traceback}") if traceback else None
        return failure

    def close(self) -> None:
        """Leave the job. A persistent world stays until the process exits, for the next engine to use."""
        if not self._persistent:
            self._leave()

    def _leave(self) -> None:
        if self._closed or self._pid != os.getpid():  # a forked child is not a rank of the job
            return
        self._closed = True
        atexit.unregister(self._at_exit)
        grace = 0.5
        try:
            if self._monitor:
                self._monitor.leave()
            for link in (*self._controls.values(), *self._links):
                link.close()
            if self._monitor:
                self._monitor.close()
                if not self.failure and len(self._monitor.departed) == self.size - 1:
                    grace = _EXIT_S
        finally:
            if self._local:
                self._local.stop(grace)

    def _at_exit(self) -> None:
        if self.rank and self._pid == os.getpid():
            uncaught = getattr(sys, "last_value", None)
            if uncaught is not None and not self.rank0_left:
                self.fail(uncaught)
        self._leave()

    def _check(self) -> None:
        if self._closed:
            raise YalisFailure("this rank has left its job")
        if failure := self._job_failure():
            raise failure

    def _accept_followers(self, server: socket.socket, followers: list[int]) -> dict[int, Link]:
        assert self._key is not None
        links = accept_followers(server, self._key, self._links_purpose(), followers, self._check)
        if missing := [self.name(rank) for rank in followers if rank not in links]:
            leader = self.members[self.rank]
            raise YalisFailure(
                f"{', '.join(missing)} did not reach {leader} at {leader.address} within {CONNECT_S:g} s; hosts of one "
                "job must reach each other's ports"
            )
        for rank, link in links.items():
            link.peer, link.failure_source = self.name(rank), self
            self._links.add(link)
        return {rank: links[rank] for rank in followers}

    def _connect(self, leader: int, port: int) -> Link:
        assert self._key is not None
        try:
            link = connect_to_leader(self.members[leader], port, self._key, self._links_purpose(), self.rank)
        except YalisFailure as error:
            failure = PeerLost(f"{self.name(self.rank)} {error}; hosts of one job must reach each other's ports")
            raise self.explain(failure) or failure from error
        link.failure_source = self
        self._links.add(link)
        return link

    def _links_purpose(self) -> bytes:
        return f"links {self._openings}".encode()


def _format_traceback(error: BaseException) -> str:
    from traceback import format_exception  # takes 1 ms of the join

    return "".join(format_exception(error))[-_MAX_TRACEBACK:]


def make_world(
    rank: int,
    members: tuple[RankInfo, ...],
    controls: dict[int, Link],
    liveness_links: dict[int, Link],
    key: JobKey,
    local: LocalRanks | None = None,
    persistent: bool = False,
) -> World:
    """Return the world of this rank after the rendezvous."""
    monitor: LivenessMonitor
    if rank:
        monitor = WorkerMonitor(members, rank, liveness_links[0])
    else:
        monitor = Rank0Monitor(members, liveness_links, local, launched=persistent)
    return World(rank, members, controls, monitor, key, local, persistent)
