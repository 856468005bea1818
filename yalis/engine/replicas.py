"""Several replicas of a model behind the interface of one engine: a request goes to whichever has the least to do."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import torch

from yalis.engine.engine import Engine, EngineStats
from yalis.errors import YalisFailure
from yalis.launch.link import Link, wait_any
from yalis.scheduling.plan import Emitted
from yalis.scheduling.request import Request
from yalis.scheduling.wire import decode_emitted, decode_params, encode_emitted, encode_params
from yalis.types import FinishReason, SamplingParams

OWN = 0  # rank 0's replica


@dataclass(frozen=True)
class Report:
    """What a step of a replica gave, and how it stands. Requests are named by their tickets."""

    emitted: list[Emitted]
    cached: list[int]  # prompt tokens found in the cache, for each of `emitted`
    queued: list[int]  # not begun yet
    stats: EngineStats


class Share:
    """A replica's share of the requests, beside its engine."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._requests: dict[int, Request] = {}

    def add(self, ticket: int, prompt: list[int], params: SamplingParams) -> None:
        self._requests[ticket] = self.engine.add(prompt, params, ticket)

    def finish(self, ticket: int, reason: FinishReason) -> None:
        self.engine.finish(ticket, reason)
        self._requests.pop(ticket, None)  # absent where the end is already on its way to rank 0

    def step(self) -> Report:
        emitted = self.engine.step()
        cached = [self._requests[item.request_id].cached_tokens for item in emitted]
        for item in emitted:
            if item.finish_reason is not None:
                del self._requests[item.request_id]
        queued = [ticket for ticket, request in self._requests.items() if not request.admissions]
        return Report(emitted, cached, queued, self.engine.stats)


class RemoteShare:
    """The share of a replica at the other end of a link, where `serve_replica` runs."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.max_model_len: int = link.receive()

    def add(self, ticket: int, prompt: list[int], params: SamplingParams) -> None:
        self.link.send(["add", ticket, prompt, encode_params(params)])

    def finish(self, ticket: int, reason: FinishReason) -> None:
        self.link.send(["finish", ticket, reason])

    def reports(self) -> Iterable[Report]:
        """Those that are here; waits for none."""
        while self.link.poll(0):
            emitted, cached, queued, stats = self.link.receive()
            yield Report([decode_emitted(item) for item in emitted], cached, queued, EngineStats(**stats))

    def close(self) -> None:
        with contextlib.suppress(YalisFailure):  # it went first, which whoever ran the last step was told
            self.link.send(["end"])
            while self.link.receive() != "end":
                pass
        self.link.close()


def serve_replica(engine: Engine, link: Link) -> None:
    """The driver of another replica: take requests from rank 0, step, give back tokens, until sent home."""
    share = Share(engine)
    link.send(engine.max_model_len)
    while True:
        while not engine.has_work or link.poll(0):
            kind, *rest = link.receive()
            if kind == "end":
                engine.drain()
                link.send("end")  # the last word, so that rank 0 leaves nothing unread
                return
            if kind == "add":
                ticket, prompt, params = rest
                share.add(ticket, prompt, decode_params(params))
            else:
                share.finish(*rest)
        link.send(_encode(share.step()))


def _encode(report: Report) -> Any:
    return [[encode_emitted(item) for item in report.emitted], report.cached, report.queued, asdict(report.stats)]


@dataclass
class _Given:
    """A request in the hands of a replica."""

    request: Request
    rank: int
    begun: bool = False  # a token has come


class Replicas:
    """Rank 0's own engine and, over links, those of the other replicas, which step at their own pace.

    Every giving of a request has a ticket of its own, so that what a replica still says of one that was cancelled, or
    moved to another replica, is told from what counts.
    """

    def __init__(self, own: Engine, links: dict[int, Link], max_num_seqs: int) -> None:
        self.own = own
        self._own = Share(own)
        self._remote = {rank: RemoteShare(link) for rank, link in links.items()}
        self._links = list(links.values())
        self._shares: dict[int, Share | RemoteShare] = {OWN: self._own, **self._remote}
        #: an answer may be as long as the smallest replica allows, so that it does not matter where it is made
        self.max_model_len = min([own.max_model_len, *(one.max_model_len for one in self._remote.values())])
        self._waiting: OrderedDict[int, Request] = OrderedDict()
        self._tickets: dict[int, int | None] = {}  # of every request without an end; None while it waits
        self._given: dict[int, _Given] = {}  # by ticket
        self._load = dict.fromkeys(self._shares, 0)
        self._fresh = dict.fromkeys(self._shares, 0)  # of the load, what no token has come from
        self._queued: dict[int, list[int]] = {rank: [] for rank in self._shares}  # as of its last report
        self._stats = {**dict.fromkeys(self._shares, EngineStats()), OWN: own.stats}
        self._tokens = EngineStats()  # prompts and outputs are counted here: a moved request may be in two engines
        self.served = dict.fromkeys(self._shares, 0)  # requests that came to their end there
        self.moved = 0  # requests taken from a replica that had not begun them, and given to another
        # A little more than runs at a time, so that a replica has its next request before it asks.
        self._seats, self._most = max_num_seqs, max_num_seqs + max(2, max_num_seqs // 4)
        self._next_id = self._next_ticket = 0

    @property
    def device(self) -> torch.device:
        return self.own.device

    @property
    def has_work(self) -> bool:
        return bool(self._tickets)

    @property
    def stats(self) -> EngineStats:
        """Summed over the replicas."""
        sums = {
            one.name: sum(getattr(stats, one.name) for stats in self._stats.values()) for one in fields(EngineStats)
        }
        return EngineStats(
            **{**sums, "prompt_tokens": self._tokens.prompt_tokens, "output_tokens": self._tokens.output_tokens}
        )

    def add(self, prompt: list[int], params: SamplingParams) -> Request:
        room = self.max_model_len - len(prompt)
        if params.max_tokens > room:
            params = replace(params, max_tokens=room, min_tokens=min(params.min_tokens, room))
        request = Request(self._next_id, prompt, params)
        self._next_id += 1
        self._tokens.prompt_tokens += len(prompt)
        self._tickets[request.id] = None
        self._waiting[request.id] = request
        return request

    def step(self) -> list[Emitted]:
        """Hand out what waits, take a step of our own if there is one to take, and gather what the others sent."""
        self._hand_out()
        self._even_out()
        emitted = self._take(OWN, self._own.step()) if self.own.has_work else []
        emitted += self._gather()
        if not emitted and not self.own.has_work and any(self._load[rank] for rank in self._remote):
            wait_any(self._links)
            emitted = self._gather()
        return emitted

    def cancel(self, request_id: int) -> list[Emitted]:
        return [Emitted(request_id, None, None, "cancelled")] if self.finish(request_id, "cancelled") else []

    def finish(self, request_id: int, reason: FinishReason = "stop") -> bool:
        """End a request for a reason only the caller sees; False if it has already ended."""
        if request_id not in self._tickets:
            return False
        ticket = self._tickets.pop(request_id)
        if ticket is None:
            del self._waiting[request_id]
        else:
            self._take_back(ticket, reason)
        return True

    def close(self) -> None:
        for share in self._remote.values():
            share.close()
        self.own.close()

    def _hand_out(self) -> None:
        while self._waiting:
            rank = min(self._load, key=lambda rank: (self._load[rank], rank == OWN))
            if self._load[rank] >= self._most:
                return
            self._give(self._waiting.popitem(last=False)[1], rank)

    def _even_out(self) -> None:
        """A replica with a free seat and nothing left to begin takes half of what another has not begun."""
        if self._waiting:
            return
        for rank in self._shares:
            if self._load[rank] < self._seats and not self._fresh[rank]:
                left = {one: [t for t in self._queued[one] if t in self._given] for one in self._shares if one != rank}
                queued = max(left.values(), key=len)
                for ticket in queued[len(queued) // 2 :]:
                    request = self._given[ticket].request
                    self._take_back(ticket, "cancelled")
                    self._give(request, rank)
                    self.moved += 1

    def _give(self, request: Request, rank: int) -> None:
        ticket, self._next_ticket = self._next_ticket, self._next_ticket + 1
        self._tickets[request.id] = ticket
        self._given[ticket] = _Given(request, rank)
        self._load[rank] += 1
        self._fresh[rank] += 1
        self._shares[rank].add(ticket, list(request.prompt), request.params)

    def _take_back(self, ticket: int, reason: FinishReason) -> None:
        self._shares[self._drop(ticket)].finish(ticket, reason)

    def _drop(self, ticket: int) -> int:
        """Forget a ticket; returns the rank that had it."""
        given = self._given.pop(ticket)
        self._load[given.rank] -= 1
        self._fresh[given.rank] -= not given.begun
        return given.rank

    def _gather(self) -> list[Emitted]:
        return [
            item
            for rank, share in self._remote.items()
            for report in share.reports()
            for item in self._take(rank, report)
        ]

    def _take(self, rank: int, report: Report) -> list[Emitted]:
        self._queued[rank], self._stats[rank] = report.queued, report.stats
        emitted = []
        for item, cached in zip(report.emitted, report.cached, strict=True):
            given = self._given.get(item.request_id)
            if given is None:  # it was cancelled or moved meanwhile
                continue
            given.request.cached_tokens = cached
            self._fresh[rank] -= not given.begun
            given.begun = True
            self._tokens.output_tokens += item.token is not None
            if item.finish_reason is not None:
                self._drop(item.request_id)
                del self._tickets[given.request.id]
                self.served[rank] += 1
            emitted.append(replace(item, request_id=given.request.id))
        return emitted
