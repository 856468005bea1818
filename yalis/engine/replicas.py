"""Data parallelism: several replicas of the model with the interface of one Engine.

Rank 0 runs the ReplicaRouter, whose policy is scheduling/routing.py. Rank 0's own replica is an Engine in the same
process. Every other replica is an Engine on that replica's driver rank, which runs `serve_replica`
at the other end of a TCP link.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch

from yalis.engine.engine import Engine, EngineStats
from yalis.errors import YalisFailure
from yalis.launch.heartbeat import Progress
from yalis.launch.link import Link, wait_any
from yalis.scheduling.plan import Emitted
from yalis.scheduling.request import Request
from yalis.scheduling.routing import LOCAL, RequestRouter
from yalis.scheduling.wire import decode_emitted, decode_params, encode_emitted, encode_params
from yalis.types import FinishReason, SamplingParams


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


class ReplicaRouter(RequestRouter):
    """Routes requests to rank 0's engine and to the remote replicas, with the interface of one Engine."""

    def __init__(self, local: Engine, links: dict[int, Link], max_num_seqs: int) -> None:
        """`links`: to the drivers of the other replicas, by rank."""
        self.local = local
        self._local_replica = LocalReplica(local)
        with local.ranks.world.progress.waiting():
            self._remote = {rank: RemoteReplica(link) for rank, link in links.items()}
        self._links = list(links.values())
        # The minimum over replicas, so that the length of a completion does not depend on where it runs.
        max_model_len = min([local.max_model_len, *(replica.max_model_len for replica in self._remote.values())])
        super().__init__({LOCAL: self._local_replica, **self._remote}, max_num_seqs, max_model_len)
        self._stats = {**dict.fromkeys(self._replicas, EngineStats()), LOCAL: local.stats}
        self._emitted: list[Emitted] = []  # not returned yet; a step that raises leaves some here

    @property
    def device(self) -> torch.device:
        return self.local.device

    @property
    def has_work(self) -> bool:
        return super().has_work or self.local.has_work  # steps in flight of a request that was cancelled

    @property
    def stats(self) -> EngineStats:
        """The sums over the replicas, and the expert load of all their ranks, as of their last reports."""
        self._stats[LOCAL] = self.local.stats
        for rank, stats in self._stats.items():
            if not self._num_assigned[rank]:  # a replica does not report that its last request was cancelled
                stats.running = stats.waiting = stats.used_blocks = 0
        sums = {
            field.name: sum(getattr(stats, field.name) for stats in self._stats.values())
            for field in fields(EngineStats)
            if field.name != "expert_load"
        }
        load = [pairs for stats in self._stats.values() for pairs in stats.expert_load]
        sums["waiting"] += len(self._waiting)
        counted = {"prompt_tokens": self.prompt_tokens, "output_tokens": self.output_tokens, "expert_load": load}
        return EngineStats(**{**sums, **counted})

    def step(self) -> list[Emitted]:
        """Assign waiting requests, run a step of the local engine if it has work, and collect the remote reports.

        Waits for a report only if nothing was emitted and only remote replicas have work.
        """
        self.assign()
        if self.local.has_work:
            self._apply(LOCAL, self._local_replica.step())
        self._apply_received()
        if not self._emitted and not self.local.has_work and any(self._num_assigned[rank] for rank in self._remote):
            with self.local.ranks.world.progress.waiting():
                wait_any(self._links)
            self._apply_received()
        return self._take_emitted()

    def cancel(self, request_id: int) -> list[Emitted]:
        cancelled = [Emitted(request_id, None, None, "cancelled")] if self.finish(request_id, "cancelled") else []
        return self._take_emitted() + cancelled

    def close(self) -> None:
        for replica in self._remote.values():
            replica.close(self.local.ranks.world.progress)
        self.local.close()

    def _apply_received(self) -> None:
        for rank, replica in self._remote.items():
            for report in replica.received_reports():
                self._apply(rank, report)

    def _apply(self, rank: int, report: ReplicaReport) -> None:
        self._stats[rank] = report.stats
        self._emitted += self.apply(rank, report.emitted, report.cached_tokens, report.unstarted)

    def _take_emitted(self) -> list[Emitted]:
        emitted, self._emitted = self._emitted, []
        return emitted
