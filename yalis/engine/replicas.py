"""Several replicas of a model behind the interface of one engine: a request goes to whichever has the least to do."""

from __future__ import annotations

import selectors
from collections import deque
from dataclasses import asdict, fields

import torch

from yalis.engine.engine import Engine, EngineStats
from yalis.launch.link import Link
from yalis.scheduling.plan import Emitted
from yalis.scheduling.request import Request
from yalis.scheduling.wire import decode_emitted, decode_params, encode_emitted, encode_params
from yalis.types import FinishReason, SamplingParams


class Replicas:
    """Rank 0's own engine and, over links, those of the other replicas, which step at their own pace."""

    def __init__(self, own: Engine, links: dict[int, Link], max_num_seqs: int) -> None:
        self.own = own
        self._links = links
        self._waiting: deque[Request] = deque()
        self._given: dict[int, int | None] = {}  # request to the rank of its replica; None: our own
        self._load = dict.fromkeys([None, *links], 0)
        self._requests: dict[int, Request] = {}  # those without an end yet
        self._own: dict[int, Request] = {}  # of them, what our own engine made of its share
        self._stats = dict.fromkeys(links, EngineStats())
        # A little more than runs at a time, so that a replica has its next request before it asks.
        self._most = max_num_seqs + max(2, max_num_seqs // 4)
        self._next_id = 0

    @property
    def device(self) -> torch.device:
        return self.own.device

    @property
    def max_model_len(self) -> int:
        return self.own.max_model_len

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    @property
    def stats(self) -> EngineStats:
        """Summed over the replicas."""
        everyone = [self.own.stats, *self._stats.values()]
        names = [one.name for one in fields(EngineStats)]
        return EngineStats(**{name: sum(getattr(stats, name) for stats in everyone) for name in names})

    def add(self, prompt: list[int], params: SamplingParams) -> Request:
        request = Request(self._next_id, prompt, params)
        self._next_id += 1
        self._requests[request.id] = request
        self._waiting.append(request)
        return request

    def step(self) -> list[Emitted]:
        """Hand out what waits, take a step of our own if there is one to take, and gather what the others sent."""
        self._hand_out()
        emitted = []
        if self.own.has_work:
            emitted = self.own.step()
            for item in emitted:
                self._note(item, self._own[item.request_id].cached_tokens)
        emitted += self._gather(wait=not emitted and self._is_only_remote())
        return emitted

    def cancel(self, request_id: int) -> list[Emitted]:
        return [Emitted(request_id, None, None, "cancelled")] if self.finish(request_id, "cancelled") else []

    def finish(self, request_id: int, reason: FinishReason = "stop") -> bool:
        request = self._requests.pop(request_id, None)
        if request is None:
            return False
        if request_id not in self._given:
            self._waiting.remove(request)
            return True
        replica = self._given.pop(request_id)
        self._load[replica] -= 1
        if replica is None:
            self.own.finish(request_id, reason)
            del self._own[request_id]
        else:
            self._links[replica].send(["finish", request_id, reason])
        return True

    def close(self) -> None:
        for link in self._links.values():
            link.send(["end"])
            link.close()
        self.own.close()

    def _hand_out(self) -> None:
        while self._waiting:
            replica = min(self._load, key=lambda one: (self._load[one], one is None))
            if self._load[replica] >= self._most:
                return
            request = self._waiting.popleft()
            self._given[request.id] = replica
            self._load[replica] += 1
            if replica is None:
                self._own[request.id] = self.own.add(list(request.prompt), request.params, request.id)
            else:
                self._links[replica].send(["add", request.id, request.prompt, encode_params(request.params)])

    def _is_only_remote(self) -> bool:
        return not self.own.has_work and any(replica is not None for replica in self._given.values())

    def _gather(self, wait: bool) -> list[Emitted]:
        emitted = [item for rank in self._links for item in self._receive(rank)]
        if wait and not emitted:
            with selectors.DefaultSelector() as selector:
                for link in self._links.values():
                    selector.register(link, selectors.EVENT_READ)
                selector.select()
        return emitted

    def _receive(self, rank: int) -> list[Emitted]:
        link, emitted = self._links[rank], []
        while link.poll(0):
            items, cached, stats = link.receive()
            self._stats[rank] = EngineStats(**stats)
            for value, known in zip(items, cached, strict=True):
                item = decode_emitted(value)
                if self._given.get(item.request_id, -1) == rank:  # else it was cancelled meanwhile
                    self._note(item, known)
                    emitted.append(item)
        return emitted

    def _note(self, item: Emitted, cached_tokens: int) -> None:
        self._requests[item.request_id].cached_tokens = cached_tokens
        if item.finish_reason is not None:
            self._load[self._given.pop(item.request_id)] -= 1
            self._own.pop(item.request_id, None)
            del self._requests[item.request_id]


def serve_replica(engine: Engine, link: Link) -> None:
    """The driver of another replica: take requests from rank 0, step, give back tokens, until sent home."""
    requests: dict[int, Request] = {}
    while True:
        while not engine.has_work or link.poll(0):
            kind, *rest = link.receive()
            if kind == "end":
                engine.close()
                return
            if kind == "add":
                request_id, prompt, params = rest
                requests[request_id] = engine.add(prompt, decode_params(params), request_id)
            else:
                engine.finish(*rest)
                requests.pop(rest[0], None)
        emitted = engine.step()
        found = [requests[item.request_id].cached_tokens for item in emitted]
        for item in emitted:
            if item.finish_reason is not None:
                del requests[item.request_id]
        link.send([[encode_emitted(item) for item in emitted], found, asdict(engine.stats)])
