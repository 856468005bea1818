"""Decides which tokens of which requests make up each step. Knows no device and no model.

One rule orders everything: first come, first served. At each step the requests take their turns in order of arrival; an
older request may take blocks from a younger one, never the other way round, so the oldest always moves on.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

from yalis.cache.blocks import BlockAllocator
from yalis.errors import YalisError
from yalis.scheduling.plan import FED, Emitted, SequenceStep, StepOutput, StepPlan
from yalis.scheduling.portion import Portion, even_portion
from yalis.scheduling.request import Request
from yalis.types import FinishReason


@dataclass(frozen=True)
class SchedulerConfig:
    max_num_seqs: int  # sequences that run at a time
    max_batch_tokens: int  # tokens in one step
    max_model_len: int  # tokens of prompt and output together
    block_size: int
    max_outstanding: int = 1  # plans handed out before the first of them is committed
    feed_on_device: bool = False  # a sampled token reaches the next step without passing the host
    recompute_at: int | None = None  # past this length keys are rotated otherwise: a sequence is computed anew there
    prefix_reuse: bool = True
    spread: bool = False  # cut the work into max_outstanding like portions, so that every stage of a pipeline has one

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_batch_tokens", "max_model_len", "block_size", "max_outstanding"):
            if getattr(self, name) < 1:
                raise YalisError(f"{name} is {getattr(self, name)}; give a whole number of at least 1")


@dataclass
class SchedulerCounters:
    plans: int = 0
    chunked_prefills: int = 0  # parts of a prompt that did not reach its end
    preemptions: int = 0
    rope_switches: int = 0
    prefix_hit_tokens: int = 0  # over all admissions
    deferrals: int = 0  # turns let pass because another request was computing the same prefix
    fed_tokens: int = 0  # tokens that reached a step on the device
    dropped_tokens: int = 0  # sampled after the request's end


@dataclass(frozen=True)
class _InFlight:
    """A plan handed out and not committed."""

    plan: StepPlan
    requests: list[Request]  # one per sequence of the plan
    filling: list[bytes]  # names of the blocks it completes


class Scheduler:
    """Requests in, plans out. The caller alternates schedule() and commit(), up to max_outstanding plans apart."""

    def __init__(self, config: SchedulerConfig, num_blocks: int) -> None:
        room = num_blocks * config.block_size
        if config.max_model_len > room:
            raise YalisError(
                f"the KV cache is too small for one sequence: max_model_len is {config.max_model_len} and {num_blocks} "
                f"blocks of {config.block_size} hold {room} tokens; give max_model_len={room}, or more kv_memory"
            )
        self.config = config
        self.counters = SchedulerCounters()
        self.blocks = BlockAllocator(num_blocks, config.block_size, config.prefix_reuse)
        self._requests: dict[int, Request] = {}  # everything that holds or will hold something
        self._waiting: deque[Request] = deque()  # by arrival, as is _running
        self._running: list[Request] = []
        self._free_request_slots = list(
            range(config.max_num_seqs)
        )  # a heap: low slots first, so that few rows are in use
        self._in_flight: deque[_InFlight] = deque()
        self._filling: Counter[bytes] = Counter()  # names of blocks that plans in flight will complete
        self._arrivals = 0
        self._admitting = True  # within schedule(): whether waiting requests may still start
        self._held: set[Request] = set()  # within schedule(): left out so that their blocks can be taken soon

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def has_work(self) -> bool:
        """Whether there is something to schedule or to commit."""
        return bool(self._running or self._waiting or self._in_flight)

    def add(self, request: Request) -> None:
        """Queue a request behind those that came before it."""
        if request.id in self._requests:
            raise ValueError(f"request {request.id} is already here")
        size = len(request.tokens)
        if size == 0:
            raise YalisError("the prompt is empty; give at least one token")
        if size + 1 > self.config.max_model_len:
            raise YalisError(
                f"the prompt has {size} tokens and there is room for {self.config.max_model_len} with the answer; "
                f"give a prompt of at most {self.config.max_model_len - 1} tokens, or a larger max_model_len"
            )
        request.limit = min(size + request.params.max_tokens, self.config.max_model_len)
        request.arrival = self._arrivals
        self._arrivals += 1
        self._requests[request.id] = request
        self._waiting.append(request)

    def cancel(self, request_id: int) -> list[Emitted]:
        """End a request now; its last word is returned here, and no commit mentions it again. Empty if it had ended.

        Plans in flight may still compute for it: its blocks and slot come back when the last of them is committed.
        """
        return [Emitted(request_id, None, None, "cancelled")] if self.finish(request_id, "cancelled") else []

    def finish(self, request_id: int, reason: FinishReason = "stop") -> bool:
        """End a request for a reason only the caller sees, such as a stop string; nothing more is emitted for it.

        False if it has already ended.
        """
        request = self._requests.get(request_id)
        if request is None or request.finish_reason is not None:
            return False
        self._end(request, reason)
        return True

    def schedule(self) -> StepPlan | None:
        """The next step; None when nothing can be computed before a commit (or an add)."""
        if len(self._in_flight) >= self.config.max_outstanding:
            return None
        self._admitting = True
        self._held.clear()
        turns = self._turns()
        portion = self._portion(turns)
        steps: list[SequenceStep] = []
        requests: list[Request] = []
        filling: list[bytes] = []
        for request in turns:
            if portion.full:
                break
            if not portion.admits(self._left(request)):
                self._admitting &= request.request_slot is not None  # nobody starts before those that came earlier
            elif self._ready(request):
                step = self._step(request, portion.room, filling)
                portion.take(step.count, step.samples)
                steps.append(step)
                requests.append(request)
        if not steps:
            return None
        plan = StepPlan(self.counters.plans, tuple(steps))
        self.counters.plans += 1
        self._in_flight.append(_InFlight(plan, requests, filling))
        return plan

    def commit(self, output: StepOutput) -> list[Emitted]:
        """Take in what the oldest plan in flight sampled; returns the tokens that are now sure."""
        if not self._in_flight or self._in_flight[0].plan.number != output.number:
            expected = self._in_flight[0].plan.number if self._in_flight else "none"
            raise ValueError(f"step {output.number} was committed out of order; expected: {expected}")
        flown = self._in_flight.popleft()
        self._filling.subtract(flown.filling)
        for name in flown.filling:
            if not self._filling[name]:
                del self._filling[name]
        emitted: list[Emitted] = []
        for step, request in zip(flown.plan.sequences, flown.requests, strict=True):
            request.outstanding -= 1
            self._register(request, step.start + step.count)
            request.pending -= step.samples
            if request.finish_reason is not None:  # it ended while this plan was in flight
                self.counters.dropped_tokens += step.samples
                if request.outstanding == 0:
                    self._retire(request)
            elif step.samples:
                token = output.tokens[request.id]
                reason = request.accept(token)
                emitted.append(Emitted(request.id, token, output.logprobs.get(request.id), reason))
                if reason is not None:
                    self._end(request, reason)
        return emitted

    def check(self) -> None:
        """Raise where blocks or slots and their holders disagree; cheap enough for whenever the engine is idle."""
        self.blocks.check()
        if Counter(b for request in self._requests.values() for b in request.blocks) != self.blocks.references():
            raise RuntimeError("the blocks in use are not those that requests hold")
        slots = [request.request_slot for request in self._requests.values() if request.request_slot is not None]
        if sorted(slots + self._free_request_slots) != list(range(self.config.max_num_seqs)):
            raise RuntimeError("a slot is held twice, or lost")
        for queue in (list(self._waiting), self._running):
            if queue != sorted(queue, key=_by_arrival):
                raise RuntimeError("requests are not in order of arrival")
        if not self._in_flight and (self._filling or len(self._requests) != len(self._running) + len(self._waiting)):
            raise RuntimeError("something is left of a plan or a request that is over")

    def _turns(self) -> list[Request]:
        """Who may move, by arrival: all that run, and as many that wait as there are slots for."""
        turns = list(self._running)
        if self._free_request_slots and self._waiting:
            turns.extend(islice(self._waiting, len(self._free_request_slots)))
            turns.sort(key=_by_arrival)
        return turns

    def _portion(self, turns: list[Request]) -> Portion:
        config = self.config
        if not config.spread:
            return Portion(config.max_batch_tokens, len(turns))
        ready = [self._left(request) for request in self._running if not request.pending]
        ready += self._startable(request for request in turns if request.request_slot is None)
        flying = []
        for flown in self._in_flight:
            steps = zip(flown.plan.sequences, flown.requests, strict=True)
            alive = [step for step, request in steps if request.finish_reason is None]
            flying.append((sum(step.count for step in alive), sum(step.samples for step in alive)))
        return even_portion(config.max_outstanding, config.max_batch_tokens, ready, flying)

    def _startable(self, waiting: Iterable[Request]) -> list[int]:
        """The tokens to compute of each of these that could start now, as far as one can tell without starting them."""
        found: list[int] = []
        names, fresh = set(self._filling), len(self._running)
        for request in waiting:
            shared, coming = self._prefix(request)
            if coming is not None:
                if coming in names:  # it will wait for that block
                    continue
                names.add(coming)
            size = len(request.tokens)
            fresh += -(-size // self.config.block_size) - len(shared)
            if self.blocks.shortage(shared, fresh) > 0:
                break
            fresh += 1  # room to grow for the next one's elder
            found.append(size - len(shared) * self.config.block_size)
        return found

    def _left(self, request: Request) -> int:
        """Tokens the request has yet to compute; all of them while it waits."""
        return request.length - (0 if request.request_slot is None else request.planned)

    def _ready(self, request: Request) -> bool:
        """Whether the request, whose turn it is, has tokens to compute and the blocks to hold them."""
        if request.request_slot is None:
            return self._admit(request)
        length = request.length
        if length >= request.limit or request in self._held:
            return False
        if request.pending and (not self.config.feed_on_device or request.params.needs_history):
            return False
        if self._is_long(length) and not request.long_rope:
            if request.outstanding:
                return False
            self._vacate(request)
            self.counters.rope_switches += 1
            return self._admit(request)
        if length > len(request.blocks) * self.config.block_size:
            if not self._make_room(request, [], 1):
                return False
            request.blocks += tuple(self.blocks.allocate(1))
        return True

    def _is_long(self, length: int) -> bool:
        return self.config.recompute_at is not None and length > self.config.recompute_at

    def _admit(self, request: Request) -> bool:
        """Start a waiting request with a slot and the blocks of all its tokens, cached ones where there are any."""
        if not self._admitting:
            return False
        size, block_size = len(request.tokens), self.config.block_size
        shared, coming = self._prefix(request)
        if coming in self._filling:
            # Certain to end: the block is in a plan that will be committed. Those behind may go ahead meanwhile.
            self.counters.deferrals += 1
            return False
        fresh = -(-size // block_size) - len(shared)
        # Older requests keep room to grow by a block each, or they would soon throw this one out again.
        spare = sum(1 for other in self._running if other.arrival < request.arrival)
        if not self._make_room(request, shared, fresh + spare):
            self._admitting = False
            return False
        self.blocks.share(shared)
        request.blocks = (*shared, *self.blocks.allocate(fresh))
        request.request_slot = heapq.heappop(self._free_request_slots)
        request.planned = len(shared) * block_size
        request.registered = len(shared)
        if request.admissions == 0:
            request.cached_tokens = request.planned
        request.admissions += 1
        self.counters.prefix_hit_tokens += request.planned
        self._waiting.remove(request)
        insort(self._running, request, key=_by_arrival)
        return True

    def _prefix(self, request: Request) -> tuple[list[int], bytes | None]:
        """The cached blocks a waiting request can begin with, and the name of the next one it could share."""
        size, block_size = len(request.tokens), self.config.block_size
        request.use_rope(self._is_long(size))
        if not self.config.prefix_reuse:
            return [], None
        usable = (size - 1) // block_size  # the last token is computed in any case: its logits are wanted
        names = request.block_hashes(block_size, usable)[:usable]
        shared = self.blocks.match(names)
        return shared, names[len(shared)] if len(shared) < usable else None

    def _make_room(self, request: Request, shared: list[int], fresh: int) -> bool:
        """See that the blocks can be had, if need be from younger requests, the youngest first."""
        missing = self.blocks.shortage(shared, fresh)
        if missing <= 0:
            return True
        younger = [other for other in reversed(self._running) if other.arrival > request.arrival]
        if missing > sum(len(other.blocks) for other in younger):
            return False
        idle = [other for other in younger if other.outstanding == 0]
        if missing <= sum(len(other.blocks) for other in idle):
            for other in idle:
                self._vacate(other)
                self.counters.preemptions += 1
                self._admitting = False  # what is given up now is not taken back in the same step
                missing = self.blocks.shortage(shared, fresh)
                if missing <= 0:
                    return True
        # Plans in flight still use the blocks: leave out as many of the youngest as are needed, until they land.
        for other in younger:
            if missing > 0 and other.request_slot is not None:
                self._held.add(other)
                missing -= len(other.blocks)
        return False

    def _step(self, request: Request, budget: int, filling: list[bytes]) -> SequenceStep:
        """As many of the request's next tokens as the budget allows."""
        known, length, block_size = len(request.tokens), request.length, self.config.block_size
        start = request.planned
        end = min(length, start + budget)
        samples = end == length
        if end <= known:
            tokens = tuple(request.tokens[start:end])
            if self.config.prefix_reuse and end // block_size > start // block_size:
                full = end // block_size
                names = request.block_hashes(block_size, full)[start // block_size : full]
                filling.extend(names)
                self._filling.update(names)
        else:
            tokens = (FED,)  # a token is fed only after all before it are computed
            self.counters.fed_tokens += 1
        if not samples:
            self.counters.chunked_prefills += 1
        covering = -(-end // block_size)
        assert request.request_slot is not None
        params = request.params
        step = SequenceStep(
            request_id=request.id,
            request_slot=request.request_slot,
            start=start,
            tokens=tokens,
            blocks=request.blocks if covering == len(request.blocks) else request.blocks[:covering],
            samples=samples,
            output_len=len(request.output) + request.pending,
            long_rope=request.long_rope,
            params=params,
            history=(tuple(request.prompt), tuple(request.output)) if params.needs_history else None,
        )
        request.planned = end
        request.pending += samples
        request.outstanding += 1
        return step

    def _register(self, request: Request, computed: int) -> None:
        """Name the blocks that are now full of computed, known tokens."""
        if not self.config.prefix_reuse:
            return
        full = min(computed, len(request.tokens)) // self.config.block_size
        if full > request.registered:
            names = request.block_hashes(self.config.block_size, full)
            for index in range(request.registered, full):
                self.blocks.register(request.blocks[index], names[index])
            request.registered = full

    def _vacate(self, request: Request) -> None:
        """Back to the queue, at its place by arrival, to be computed anew; what the cache keeps of it is a gift."""
        self._running.remove(request)
        self._release(request)
        place = 0
        for other in self._waiting:
            if other.arrival > request.arrival:
                break
            place += 1
        self._waiting.insert(place, request)

    def _end(self, request: Request, reason: FinishReason) -> None:
        request.finish_reason = reason
        if request.request_slot is None:
            self._waiting.remove(request)
        else:
            self._running.remove(request)
        if request.outstanding == 0:
            self._retire(request)

    def _retire(self, request: Request) -> None:
        """Nothing in flight mentions it any more."""
        del self._requests[request.id]
        self._release(request)

    def _release(self, request: Request) -> None:
        if request.request_slot is not None:
            self.blocks.free(request.blocks)
            request.blocks = ()
            heapq.heappush(self._free_request_slots, request.request_slot)
            request.request_slot = None


def _by_arrival(request: Request) -> int:
    return request.arrival
