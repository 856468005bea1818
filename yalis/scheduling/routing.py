"""Data parallelism: which replica of the model runs which request. Independent of device, processes and model.

A request goes to the replica with the fewest requests. Requests that have not started are moved to replicas that have
fewer than max_num_seqs requests and none waiting.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from yalis.scheduling.plan import Emitted
from yalis.scheduling.request import Request
from yalis.types import FinishReason, SamplingParams

LOCAL = 0  # the rank that drives the router's own replica


class ReplicaQueue(Protocol):
    """Where the router adds requests to a replica, and ends them. Requests are named by their assignment ids."""

    def add(self, assignment_id: int, prompt: list[int], params: SamplingParams) -> None: ...

    def finish(self, assignment_id: int, reason: FinishReason) -> None: ...


@dataclass
class _Assignment:
    """A request that was assigned to a replica."""

    request: Request
    rank: int  # the replica's driver
    has_token: bool = False  # a token has been received


class RequestRouter:
    """Distributes requests over replicas, which step at their own pace and report after each step.

    Each assignment of a request to a replica has an id of its own. A replica may still report on a request that was
    cancelled or moved; such a report has an id that is no longer assigned, and is ignored.
    """

    def __init__(self, replicas: Mapping[int, ReplicaQueue], max_num_seqs: int, max_model_len: int) -> None:
        """`replicas`: by the rank of their driver, with LOCAL first."""
        self._replicas = replicas
        self.max_model_len = max_model_len
        self._waiting: OrderedDict[int, Request] = OrderedDict()
        self._assignment_ids: dict[int, int | None] = {}  # of every unfinished request; None while it is waiting
        self._assignments: dict[int, _Assignment] = {}  # by assignment id
        self._num_assigned = dict.fromkeys(replicas, 0)
        self._num_without_token = dict.fromkeys(replicas, 0)  # assigned requests without a token
        self._unstarted: dict[int, Sequence[int]] = {rank: [] for rank in replicas}  # ids, as of the last report
        # Token counts are kept here, because two engines may both have counted a request that was moved.
        self.prompt_tokens = self.output_tokens = 0
        self.num_finished = dict.fromkeys(replicas, 0)  # requests that ran to their end on each replica
        self.num_moved = 0  # requests moved from one replica to another before they started
        # Slightly more requests than can run at once, so that a replica has its next request when one finishes.
        self._max_running, self._max_assigned = max_num_seqs, max_num_seqs + max(2, max_num_seqs // 4)
        self._next_id = self._next_assignment_id = 0

    @property
    def has_work(self) -> bool:
        return bool(self._assignment_ids)

    def add(self, prompt: Sequence[int], params: SamplingParams) -> Request:
        """Queue a request. It is assigned by the next call of assign()."""
        max_tokens = self.max_model_len - len(prompt)
        if params.max_tokens > max_tokens:
            params = replace(params, max_tokens=max_tokens, min_tokens=min(params.min_tokens, max_tokens))
        request = Request(self._next_id, prompt, params)
        self._next_id += 1
        self.prompt_tokens += len(prompt)
        self._assignment_ids[request.id] = None
        self._waiting[request.id] = request
        return request

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

    def assign(self) -> None:
        """Assign waiting requests, and move unstarted ones to replicas that have run out of work."""
        self._assign_waiting()
        self._rebalance()

    def apply(
        self, rank: int, emitted: Iterable[Emitted], cached_tokens: Iterable[int], unstarted: Sequence[int]
    ) -> list[Emitted]:
        """Apply a replica's report; returns what it emitted, under the ids of the requests.

        `cached_tokens`: prompt tokens found in the prefix cache, for each of `emitted`. `unstarted`: the ids of
        requests that have not been scheduled yet.
        """
        self._unstarted[rank] = unstarted
        assignments, found = self._assignments, []
        for item, cached in zip(emitted, cached_tokens, strict=True):
            assignment = assignments.get(item.request_id)
            if assignment is None:  # cancelled or moved since
                continue
            request = assignment.request
            request.cached_tokens = cached
            if not assignment.has_token:
                assignment.has_token = True
                self._num_without_token[rank] -= 1
            self.output_tokens += item.token is not None
            if item.finish_reason is not None:
                self._forget(item.request_id)
                del self._assignment_ids[request.id]
                self.num_finished[rank] += 1
            found.append(Emitted(request.id, item.token, item.logprobs, item.finish_reason, item.prompt_logprobs))
        return found

    def _assign_waiting(self) -> None:
        while self._waiting:
            rank = min(self._num_assigned, key=lambda rank: (self._num_assigned[rank], rank == LOCAL))
            if self._num_assigned[rank] >= self._max_assigned:
                return
            self._assign(self._waiting.popitem(last=False)[1], rank)

    def _rebalance(self) -> None:
        """Move half of the longest queue of unstarted requests to each replica that has free capacity and no queue."""
        if self._waiting or not any(self._unstarted.values()):
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
