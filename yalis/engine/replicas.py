"""Data parallelism: several replicas of the model with the interface of one Engine.

Rank 0 runs the ReplicaRouter. It assigns each request to the replica with the fewest requests, and moves requests that
have not started to replicas that have fewer than max_num_seqs requests and none waiting. Rank 0's own replica is an
Engine in the same process. Every other replica is an Engine on that replica's driver rank, which runs `serve_replica`
at the other end of a TCP link.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import torch

from yalis.engine.engine import Engine, EngineStats
from yalis.errors import YalisFailure
from yalis.launch.heartbeat import Progress
from yalis.launch.link import Link, wait_any
from yalis.scheduling.plan import Emitted
from yalis.scheduling.request import Request
from yalis.scheduling.wire import decode_emitted, decode_params, encode_emitted, encode_params
from yalis.types import FinishReason, SamplingParams

LOCAL = 0  # the rank that drives rank 0's own replica


@dataclass(frozen=True)
class ReplicaReport:
    """The output of one step of a replica, and its state after it. Requests are named by their assignment ids."""

    emitted: list[Emitted]
    cached_tokens: list[int]  # prompt tokens found in the prefix cache, for each of `emitted`
    unstarted: list[int]  # requests that have not been scheduled yet
    stats: EngineStats


class LocalReplica:
    """A replica whose engine runs in this process."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._requests: dict[int, Request] = {}

    def add(self, assignment_id: int, prompt: list[int], params: SamplingParams) -> None:
        self._requests[assignment_id] = self.engine.add(prompt, params, assignment_id)

    def finish(self, assignment_id: int, reason: FinishReason) -> None:
        self.engine.finish(assignment_id, reason)
        self._requests.pop(assignment_id, None)  # absent if it has finished and rank 0 has not received that report yet

    def step(self) -> ReplicaReport:
        emitted = self.engine.step()
        cached_tokens = [self._requests[item.request_id].cached_tokens for item in emitted]
        for item in emitted:
            if item.finish_reason is not None:
                del self._requests[item.request_id]
        unstarted = [id for id, request in self._requests.items() if not request.num_admissions]
        return ReplicaReport(emitted, cached_tokens, unstarted, self.engine.stats)


class RemoteReplica:
    """A replica whose engine runs on another rank, in `serve_replica`."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.max_model_len: int = link.receive()

    def add(self, assignment_id: int, prompt: list[int], params: SamplingParams) -> None:
        self.link.send(["add", assignment_id, prompt, encode_params(params)])

    def finish(self, assignment_id: int, reason: FinishReason) -> None:
        with contextlib.suppress(YalisFailure):  # if the replica is lost, the next step raises it
            self.link.send(["finish", assignment_id, reason])

    def received_reports(self) -> Iterable[ReplicaReport]:
        """Yield the reports that have arrived, without waiting for more."""
        while self.link.poll(0):
            emitted, cached_tokens, unstarted, stats = self.link.receive()
            items = [decode_emitted(item) for item in emitted]
            yield ReplicaReport(items, cached_tokens, unstarted, EngineStats(**stats))

    def close(self, progress: Progress) -> None:
        with contextlib.suppress(YalisFailure):  # if the replica died, the last step has raised it
            self.link.send(["end"])
            with progress.waiting():
                while self.link.receive() != "end":
                    pass
        self.link.close()


def serve_replica(engine: Engine, link: Link) -> None:
    """Run on the driver of another replica until rank 0 ends it: receive requests from rank 0, step, send reports."""
    replica, progress = LocalReplica(engine), engine.ranks.world.progress
    link.send(engine.max_model_len)
    while True:
        while not engine.has_work or link.poll(0):
            message, *arguments = link.receive()
            if message == "end":
                engine.drain()
                link.send("end")  # the last message, so that rank 0 can read everything before it closes the link
                return
            if message == "add":
                assignment_id, prompt, params = arguments
                replica.add(assignment_id, prompt, decode_params(params))
            else:
                replica.finish(*arguments)
        with progress.step():
            report = replica.step()
        link.send(_encode(report))


def _encode(report: ReplicaReport) -> Any:
    emitted = [encode_emitted(item) for item in report.emitted]
    return [emitted, report.cached_tokens, report.unstarted, asdict(report.stats)]


@dataclass
class _Assignment:
    """A request that was assigned to a replica."""

    request: Request
    rank: int  # the replica's driver
    has_token: bool = False  # a token has been received


class ReplicaRouter:
    """Distributes requests over rank 0's engine and the remote replicas, which step at their own pace.

    Each assignment of a request to a replica has an id of its own. A replica may still report on a request that was
    cancelled or moved; such a report has an id that is no longer assigned, and is ignored.
    """

    def __init__(self, local: Engine, links: dict[int, Link], max_num_seqs: int) -> None:
        """`links`: to the drivers of the other replicas, by rank."""
        self.local = local
        self._local_replica = LocalReplica(local)
        with local.ranks.world.progress.waiting():
            self._remote = {rank: RemoteReplica(link) for rank, link in links.items()}
        self._links = list(links.values())
        self._replicas: dict[int, LocalReplica | RemoteReplica] = {LOCAL: self._local_replica, **self._remote}
        #: the minimum over replicas, so that the length of a completion does not depend on where it runs
        self.max_model_len = min([local.max_model_len, *(replica.max_model_len for replica in self._remote.values())])
        self._waiting: OrderedDict[int, Request] = OrderedDict()
        self._assignment_ids: dict[int, int | None] = {}  # of every unfinished request; None while it is waiting
        self._assignments: dict[int, _Assignment] = {}  # by assignment id
        self._num_assigned = dict.fromkeys(self._replicas, 0)
        self._num_without_token = dict.fromkeys(self._replicas, 0)  # assigned requests without a token
        self._unstarted: dict[int, list[int]] = {rank: [] for rank in self._replicas}  # ids, as of the last report
        self._stats = {**dict.fromkeys(self._replicas, EngineStats()), LOCAL: local.stats}
        # Token counts are kept here, because two engines may both have counted a request that was moved.
        self._tokens = EngineStats()
        self.num_finished = dict.fromkeys(self._replicas, 0)  # requests that ran to their end on each replica
        self._emitted: list[Emitted] = []  # not returned yet; a step that raises leaves some here
        self.num_moved = 0  # requests moved from one replica to another before they started
        # Slightly more requests than can run at once, so that a replica has its next request when one finishes.
        self._max_running, self._max_assigned = max_num_seqs, max_num_seqs + max(2, max_num_seqs // 4)
        self._next_id = self._next_assignment_id = 0

    @property
    def device(self) -> torch.device:
        return self.local.device

    @property
    def has_work(self) -> bool:
        return bool(self._assignment_ids)

    @property
    def stats(self) -> EngineStats:
        """Counters summed over the replicas."""
        sums = {
            field.name: sum(getattr(stats, field.name) for stats in self._stats.values())
            for field in fields(EngineStats)
        }
        return EngineStats(
            **{**sums, "prompt_tokens": self._tokens.prompt_tokens, "output_tokens": self._tokens.output_tokens}
        )

    def add(self, prompt: list[int], params: SamplingParams) -> Request:
        max_tokens = self.max_model_len - len(prompt)
        if params.max_tokens > max_tokens:
            params = replace(params, max_tokens=max_tokens, min_tokens=min(params.min_tokens, max_tokens))
        request = Request(self._next_id, prompt, params)
        self._next_id += 1
        self._tokens.prompt_tokens += len(prompt)
        self._assignment_ids[request.id] = None
        self._waiting[request.id] = request
        return request

    def step(self) -> list[Emitted]:
        """Assign waiting requests, run a step of the local engine if it has work, and collect the remote reports.

        Waits for a report only if nothing was emitted and only remote replicas have work.
        """
        self._assign_waiting()
        self._rebalance()
        if self.local.has_work:
            self._emitted += self._apply(LOCAL, self._local_replica.step())
        self._apply_received()
        if not self._emitted and not self.local.has_work and any(self._num_assigned[rank] for rank in self._remote):
            with self.local.ranks.world.progress.waiting():
                wait_any(self._links)
            self._apply_received()
        return self._take_emitted()

    def cancel(self, request_id: int) -> list[Emitted]:
        cancelled = [Emitted(request_id, None, None, "cancelled")] if self.finish(request_id, "cancelled") else []
        return self._take_emitted() + cancelled

    def finish(self, request_id: int, reason: FinishReason = "stop") -> bool:
        """End a request early, for example at a stop string; False if it has already ended."""
        if request_id not in self._assignment_ids:
            return False
        assignment_id = self._assignment_ids.pop(request_id)
        if assignment_id is None:
            del self._waiting[request_id]
        else:
            self._withdraw(assignment_id, reason)
        return True

    def close(self) -> None:
        for replica in self._remote.values():
            replica.close(self.local.ranks.world.progress)
        self.local.close()

    def _assign_waiting(self) -> None:
        while self._waiting:
            rank = min(self._num_assigned, key=lambda rank: (self._num_assigned[rank], rank == LOCAL))
            if self._num_assigned[rank] >= self._max_assigned:
                return
            self._assign(self._waiting.popitem(last=False)[1], rank)

    def _rebalance(self) -> None:
        """Move half of the longest queue of unstarted requests to each replica that has free capacity and no queue."""
        if self._waiting:
            return
        for rank in self._replicas:
            if self._num_assigned[rank] < self._max_running and not self._num_without_token[rank]:
                queues = [
                    [id for id in self._unstarted[other] if id in self._assignments]
                    for other in self._replicas
                    if other != rank
                ]
                queue = max(queues, key=len)
                for assignment_id in queue[len(queue) // 2 :]:
                    request = self._assignments[assignment_id].request
                    self._withdraw(assignment_id, "cancelled")
                    self._assign(request, rank)
                    self.num_moved += 1

    def _assign(self, request: Request, rank: int) -> None:
        assignment_id, self._next_assignment_id = self._next_assignment_id, self._next_assignment_id + 1
        self._assignment_ids[request.id] = assignment_id
        self._assignments[assignment_id] = _Assignment(request, rank)
        self._num_assigned[rank] += 1
        self._num_without_token[rank] += 1
        self._replicas[rank].add(assignment_id, list(request.prompt), request.params)

    def _withdraw(self, assignment_id: int, reason: FinishReason) -> None:
        self._replicas[self._forget(assignment_id)].finish(assignment_id, reason)

    def _forget(self, assignment_id: int) -> int:
        """Remove an assignment and return its rank."""
        assignment = self._assignments.pop(assignment_id)
        self._num_assigned[assignment.rank] -= 1
        self._num_without_token[assignment.rank] -= not assignment.has_token
        return assignment.rank

    def _apply_received(self) -> None:
        for rank, replica in self._remote.items():
            for report in replica.received_reports():
                self._emitted += self._apply(rank, report)

    def _take_emitted(self) -> list[Emitted]:
        emitted, self._emitted = self._emitted, []
        return emitted

    def _apply(self, rank: int, report: ReplicaReport) -> list[Emitted]:
        """Update the assignments from a replica's report; returns what it emitted, under the ids of the requests."""
        self._unstarted[rank], self._stats[rank] = report.unstarted, report.stats
        emitted = []
        for item, cached_tokens in zip(report.emitted, report.cached_tokens, strict=True):
            assignment = self._assignments.get(item.request_id)
            if assignment is None:  # cancelled or moved since
                continue
            assignment.request.cached_tokens = cached_tokens
            self._num_without_token[rank] -= not assignment.has_token
            assignment.has_token = True
            self._tokens.output_tokens += item.token is not None
            if item.finish_reason is not None:
                self._forget(item.request_id)
                del self._assignment_ids[assignment.request.id]
                self.num_finished[rank] += 1
            emitted.append(replace(item, request_id=assignment.request.id))
        return emitted
