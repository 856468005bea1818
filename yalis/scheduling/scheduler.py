"""Decides which tokens of which requests each step computes. Independent of device and model.

Continuous batching with chunked prefill, prefix caching, and preemption by recomputation. The policy is first come,
first served: a step is filled in order of arrival, and a request may preempt only requests that arrived after it, so
the oldest request always makes progress.
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
from yalis.scheduling.budget import StepBudget, micro_batch_budget
from yalis.scheduling.counters import SchedulerCounters
from yalis.scheduling.plan import LAST_SAMPLED, NO_TOKEN_ALLOWED, Emitted, SequenceStep, StepOutput, StepPlan
from yalis.scheduling.request import Request
from yalis.types import FinishReason

_LAST_SAMPLED = (LAST_SAMPLED,)


@dataclass(frozen=True)
class SchedulerConfig:
    max_num_seqs: int  # running requests
    max_batch_tokens: int  # token budget of a step
    max_model_len: int  # prompt and output tokens of a request
    block_size: int
    max_in_flight: int = 1  # plans issued and not yet committed
    feed_on_device: bool = False  # async scheduling: the next step reads a sampled token on the device, before the host
    recompute_at: int | None = None  # RopeSpec.switch_at: above this length the KV cache of a sequence is recomputed
    prefix_reuse: bool = True
    pipelined: bool = False  # divide the work evenly over max_in_flight micro-batches, to keep all stages busy

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_batch_tokens", "max_model_len", "block_size", "max_in_flight"):
            if getattr(self, name) < 1:
                raise YalisError(f"{name} is {getattr(self, name)}; give a whole number of at least 1")


@dataclass(frozen=True)
class _InFlight:
    """A plan that was issued and is not committed."""

    plan: StepPlan
    requests: list[Request]  # one per sequence of the plan
    hashes: list[bytes]  # of the blocks it fills


class Scheduler:
    """Turns requests into step plans. The caller alternates schedule() and commit(), with up to max_in_flight plans
    between the two."""

    def __init__(self, config: SchedulerConfig, num_blocks: int) -> None:
        capacity = num_blocks * config.block_size
        if config.max_model_len > capacity:
            raise YalisError(
                f"the KV cache is too small for one sequence: max_model_len is {config.max_model_len} and {num_blocks} "
                f"blocks of {config.block_size} hold {capacity} tokens; give max_model_len={capacity}, or more "
                "kv_memory"
            )
        self.config = config
        self.counters = SchedulerCounters()
        self.blocks = BlockAllocator(num_blocks, config.block_size, config.prefix_reuse)
        self._requests: dict[int, Request] = {}  # waiting, running, or in a plan in flight
        self._waiting: deque[Request] = deque()  # in order of arrival, as is _running
        self._running: list[Request] = []
        self._free_request_slots = list(range(config.max_num_seqs))  # a heap, so that low rows are used first
        self._in_flight: deque[_InFlight] = deque()
        self._hashes_in_flight: Counter[bytes] = Counter()  # of the blocks that plans in flight fill
        self._arrivals = 0
        self._can_admit = True  # within schedule(): whether waiting requests may still start
        #: within schedule(): left out of the plan, so that they can be preempted soon
        self._paused: set[Request] = set()

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def has_work(self) -> bool:
        """Whether there is a request to schedule or a plan to commit."""
        return bool(self._running or self._waiting or self._in_flight)

    def add(self, request: Request) -> None:
        """Append a request to the waiting queue."""
        if request.id in self._requests:
            raise ValueError(f"request {request.id} was already added")
        size = len(request.tokens)
        if size == 0:
            raise YalisError("the prompt is empty; give at least one token")
        if size + request.generates > self.config.max_model_len:
            raise YalisError(
                f"the prompt has {size} tokens and max_model_len, prompt and output, is {self.config.max_model_len}; "
                f"give a prompt of at most {self.config.max_model_len - 1} tokens, or a larger max_model_len"
            )
        request.max_len = min(size + request.params.max_tokens, self.config.max_model_len)
        if not request.generates:
            request.max_len = size + 1  # never reached: it ends once its prompt is computed
        request.arrival = self._arrivals
        self._arrivals += 1
        self._requests[request.id] = request
        self._waiting.append(request)

    def cancel(self, request_id: int) -> list[Emitted]:
        """End a request now and return its last event; empty if it had already ended. No commit mentions it again.

        Plans in flight may still compute for it. Its blocks and slot are freed when the last of them is committed.
        """
        return [Emitted(request_id, None, None, "cancelled")] if self.finish(request_id, "cancelled") else []

    def finish(self, request_id: int, reason: FinishReason = "stop") -> bool:
        """End a request for a reason that only the caller can see, such as a stop string; nothing more is emitted.

        Returns False if it had already ended.
        """
        request = self._requests.get(request_id)
        if request is None or request.finish_reason is not None:
            return False
        self._finish(request, reason)
        return True

    def schedule(self) -> StepPlan | None:
        """Return the next step, or None if nothing can be computed before the next commit() or add()."""
        if len(self._in_flight) >= self.config.max_in_flight:
            return None
        self._can_admit = True
        self._paused.clear()
        candidates = self._candidates()
        budget = self._budget(candidates)
        steps: list[SequenceStep] = []
        requests: list[Request] = []
        hashes: list[bytes] = []
        waits_for_host = not self.config.feed_on_device
        for request in candidates:
            if budget.tokens <= 0:
                break
            if budget.samples > 0 and (step := self._decode(request)) is not None:
                budget.consume(1, True)
                steps.append(step)
                requests.append(request)
                continue
            if waits_for_host and request.num_pending_tokens:
                continue  # its next token is not known yet
            if not budget.allows(self._remaining(request)):
                self._can_admit &= request.request_slot is not None  # later requests must not start before this one
            elif self._allocate(request):
                step = self._plan_tokens(request, budget.max_chunk, hashes)
                budget.consume(len(step.tokens), step.samples)
                steps.append(step)
                requests.append(request)
        if not steps:
            return None
        plan = StepPlan(self.counters.plans, tuple(steps))
        self.counters.plans += 1
        self._in_flight.append(_InFlight(plan, requests, hashes))
        return plan

    def commit(self, output: StepOutput) -> list[Emitted]:
        """Apply the output of the oldest plan in flight; returns the new tokens and the requests that ended."""
        if not self._in_flight or self._in_flight[0].plan.step_id != output.step_id:
            expected = self._in_flight[0].plan.step_id if self._in_flight else "none"
            raise ValueError(f"step {output.step_id} was committed out of order; expected: {expected}")
        done = self._in_flight.popleft()
        self._hashes_in_flight.subtract(done.hashes)
        for block_hash in done.hashes:
            if not self._hashes_in_flight[block_hash]:
                del self._hashes_in_flight[block_hash]
        emitted: list[Emitted] = []
        tokens, logprobs, block_size = output.tokens, output.logprobs, self.config.block_size
        # Blocks that a step cannot have filled are not looked at.
        full = block_size if self.config.prefix_reuse else self.config.max_model_len + block_size
        for step, request in zip(done.plan.sequences, done.requests, strict=True):
            request.num_plans_in_flight -= 1
            computed = step.start + len(step.tokens)
            if computed >= full + request.num_registered_blocks * block_size:
                self._register_blocks(request, computed)
            request.num_pending_tokens -= step.samples
            if request.finish_reason is not None:  # it ended while this plan was in flight
                self.counters.dropped_tokens += step.samples
                if request.num_plans_in_flight == 0:
                    self._remove(request)
                continue
            if step.scored:
                request.prompt_logprobs += output.prompt_logprobs[request.id]
            token = tokens[request.id] if step.samples else None
            if token is not None and token >= 0 and request.plain:
                reason = request.append(token)
                emitted.append(Emitted(request.id, token, logprobs.get(request.id) if logprobs else None, reason))
                if reason is not None:
                    self._finish(request, reason)
            elif token == NO_TOKEN_ALLOWED:
                emitted += self.cancel(request.id)
            elif token is not None:
                scored = request.take_prompt_logprobs() if request.params.prompt_logprobs is not None else None
                reason = request.append(token)
                emitted.append(Emitted(request.id, token, logprobs.get(request.id), reason, scored))
                if reason is not None:
                    self._finish(request, reason)
            elif not request.generates and computed == len(request.prompt):
                emitted.append(Emitted(request.id, None, None, "length", request.take_prompt_logprobs()))
                self._finish(request, "length")
        return emitted

    def check(self) -> None:
        """Raise if the bookkeeping of blocks, slots and queues is inconsistent. Cheap enough to run when idle."""
        self.blocks.check()
        if Counter(b for request in self._requests.values() for b in request.blocks) != self.blocks.references():
            raise RuntimeError("the blocks in use are not those that requests hold")
        slots = [request.request_slot for request in self._requests.values() if request.request_slot is not None]
        if sorted(slots + self._free_request_slots) != list(range(self.config.max_num_seqs)):
            raise RuntimeError("a request slot is used twice, or lost")
        for queue in (list(self._waiting), self._running):
            if queue != sorted(queue, key=_by_arrival):
                raise RuntimeError("a queue is not in order of arrival")
        leftover = self._hashes_in_flight or len(self._requests) != len(self._running) + len(self._waiting)
        if not self._in_flight and leftover:
            raise RuntimeError("the state of a finished plan or request was not removed")

    def _candidates(self) -> list[Request]:
        """Return the candidates for the next step, by arrival: running requests, and waiting ones for free slots."""
        candidates = list(self._running)
        if self._free_request_slots and self._waiting:
            candidates.extend(islice(self._waiting, len(self._free_request_slots)))
            candidates.sort(key=_by_arrival)
        return candidates

    def _budget(self, candidates: list[Request]) -> StepBudget:
        config = self.config
        if not config.pipelined:
            return StepBudget(config.max_batch_tokens, len(candidates))
        running = [request for request in self._running if not request.num_pending_tokens]
        ready = [len(request.tokens) - request.num_computed_tokens for request in running]
        ready += self._estimate_admissions(request for request in candidates if request.request_slot is None)
        in_flight = []
        for issued in self._in_flight:
            steps = zip(issued.plan.sequences, issued.requests, strict=True)
            alive = [step for step, request in steps if request.finish_reason is None]
            in_flight.append((sum([len(step.tokens) for step in alive]), sum([step.samples for step in alive])))
        return micro_batch_budget(config.max_in_flight, config.max_batch_tokens, ready, in_flight)

    def _estimate_admissions(self, waiting: Iterable[Request]) -> list[int]:
        """Return the tokens to compute of each waiting request that could start now, without starting any."""
        remaining: list[int] = []
        hashes, new_blocks = set(self._hashes_in_flight), len(self._running)
        for request in waiting:
            shared, next_hash = self._match_prefix(request)
            if next_hash is not None:
                if next_hash in hashes:  # it will wait for that block
                    continue
                hashes.add(next_hash)
            size = len(request.tokens)
            new_blocks += -(-size // self.config.block_size) - len(shared)
            if self.blocks.shortage(shared, new_blocks) > 0:
                break
            new_blocks += 1  # _admit() keeps one in reserve for each earlier request
            remaining.append(size - len(shared) * self.config.block_size)
        return remaining

    def _decode(self, request: Request) -> SequenceStep | None:
        """Plan the next token of a running request that needs nothing else, such as a block; None for any other.

        The same as _allocate() and _plan_tokens(), which plan every other step, in a third of the time: this is most of
        the scheduler's work.
        """
        config, pending = self.config, request.num_pending_tokens
        known, start, slot = len(request.tokens), request.num_computed_tokens, request.request_slot
        length = known + pending
        if (
            slot is None
            or length != start + 1
            or not request.plain
            or length >= request.max_len
            or length > len(request.blocks) * config.block_size
            or (pending > 0 and not config.feed_on_device)
            or (pending == 0 and config.prefix_reuse and length % config.block_size == 0)  # fills a block
            or (config.recompute_at is not None and length > config.recompute_at and not request.long_rope)
            or request in self._paused
        ):
            return None
        if pending:
            tokens = _LAST_SAMPLED
            self.counters.fed_tokens += 1
        else:
            tokens = (request.tokens[start],)
        request.num_computed_tokens = length
        request.num_pending_tokens = pending + 1
        request.num_plans_in_flight += 1
        return SequenceStep(
            request.id, slot, start, tokens, request.blocks, True, len(request.output) + pending, request.long_rope,
            request.params, None,
        )  # fmt: skip

    def _remaining(self, request: Request) -> int:
        """Return the tokens the request has yet to compute: all of them while it waits."""
        length = len(request.tokens) + request.num_pending_tokens
        return length if request.request_slot is None else length - request.num_computed_tokens

    def _allocate(self, request: Request) -> bool:
        """Admit a waiting request, or give a running one the block its next token needs.

        Returns False if it cannot be in this step.
        """
        if request.request_slot is None:
            return self._admit(request)
        length = len(request.tokens) + request.num_pending_tokens
        if length >= request.max_len or length == request.num_computed_tokens or request in self._paused:
            return False  # plans in flight sample its last token, or compute the rest of a prompt that is only scored
        if request.num_pending_tokens and request.needs_history:
            return False
        if not request.long_rope and self._uses_long_rope(length):
            if request.num_plans_in_flight:
                return False
            self._preempt(request)
            self.counters.rope_switches += 1
            return self._admit(request)
        if length > len(request.blocks) * self.config.block_size:
            if not self._ensure_free_blocks(request, [], 1):
                return False
            request.blocks += tuple(self.blocks.allocate(1))
        return True

    def _uses_long_rope(self, length: int) -> bool:
        return self.config.recompute_at is not None and length > self.config.recompute_at

    def _admit(self, request: Request) -> bool:
        """Start a waiting request: give it a slot and the blocks of all its tokens, cached ones where they exist."""
        if not self._can_admit:
            return False
        size, block_size = len(request.tokens), self.config.block_size
        shared, next_hash = self._match_prefix(request)
        if next_hash in self._hashes_in_flight:
            # A plan in flight fills this block, so the request waits to share it. Later requests may start meanwhile.
            self.counters.deferrals += 1
            return False
        new_blocks = -(-size // block_size) - len(shared)
        # Each earlier request keeps one block to grow. Without it, this request would soon be preempted again.
        reserve = sum(1 for other in self._running if other.arrival < request.arrival)
        if not self._ensure_free_blocks(request, shared, new_blocks + reserve):
            self._can_admit = False
            return False
        self.blocks.share(shared)
        request.blocks = (*shared, *self.blocks.allocate(new_blocks))
        request.request_slot = heapq.heappop(self._free_request_slots)
        request.num_computed_tokens = len(shared) * block_size
        request.num_registered_blocks = len(shared)
        if request.needs_prompt_logprobs:  # those of the tokens that are recomputed are computed again
            del request.prompt_logprobs[request.num_computed_tokens :]
        if request.num_admissions == 0:
            request.cached_tokens = request.num_computed_tokens
            self.counters.prompt_query_tokens += len(request.prompt) if self.config.prefix_reuse else 0
            self.counters.prompt_hit_tokens += request.num_computed_tokens
        request.num_admissions += 1
        self.counters.prefix_hit_tokens += request.num_computed_tokens
        self._waiting.remove(request)
        insort(self._running, request, key=_by_arrival)
        return True

    def _match_prefix(self, request: Request) -> tuple[list[int], bytes | None]:
        """Return the cached blocks a waiting request can start from, and the hash of the first one it lacks."""
        size, block_size = len(request.tokens), self.config.block_size
        request.use_rope(self._uses_long_rope(size))
        if not self.config.prefix_reuse:
            return [], None
        usable = size - 1  # the last token is always computed, for its logits
        if request.needs_prompt_logprobs:
            usable = min(usable, len(request.prompt_logprobs))  # and so are those whose logits are still needed
        usable //= block_size
        hashes = request.block_hashes(block_size, usable)[:usable]
        shared = self.blocks.match(hashes)
        return shared, hashes[len(shared)] if len(shared) < usable else None

    def _ensure_free_blocks(self, request: Request, shared: list[int], new_blocks: int) -> bool:
        """Preempt later requests, the latest first, until the blocks are available; False if that is impossible now."""
        missing = self.blocks.shortage(shared, new_blocks)
        if missing <= 0:
            return True
        later = [other for other in reversed(self._running) if other.arrival > request.arrival]
        if missing > sum(len(other.blocks) for other in later):
            return False
        idle = [other for other in later if other.num_plans_in_flight == 0]
        if missing <= sum(len(other.blocks) for other in idle):
            for other in idle:
                self._preempt(other)
                self.counters.preemptions += 1
                self._can_admit = False  # or the preempted request would start again in this step
                missing = self.blocks.shortage(shared, new_blocks)
                if missing <= 0:
                    return True
        # Plans in flight still use the blocks. Pause the latest requests until those plans are committed.
        for other in later:
            if missing > 0 and other.request_slot is not None:
                self._paused.add(other)
                missing -= len(other.blocks)
        return False

    def _plan_tokens(self, request: Request, max_chunk: int, hashes: list[bytes]) -> SequenceStep:
        """Plan the request's next tokens, up to max_chunk; adds the hashes of the blocks they fill to `hashes`."""
        known, block_size = len(request.tokens), self.config.block_size
        length, start = known + request.num_pending_tokens, request.num_computed_tokens
        end = min(length, start + max_chunk)
        samples = end == length and request.generates
        if end <= known:
            tokens = tuple(request.tokens[start:end])
            if self.config.prefix_reuse and end // block_size > start // block_size:
                full = end // block_size
                filled = request.block_hashes(block_size, full)[start // block_size : full]
                hashes.extend(filled)
                self._hashes_in_flight.update(filled)
        else:
            tokens = _LAST_SAMPLED  # the only one left: all tokens before it are computed
            self.counters.fed_tokens += 1
        if end < length:
            self.counters.chunked_prefills += 1
        num_blocks, blocks, params = -(-end // block_size), request.blocks, request.params
        assert request.request_slot is not None
        step = SequenceStep(
            request.id,
            request.request_slot,
            start,
            tokens,
            blocks if num_blocks == len(blocks) else blocks[:num_blocks],
            samples,
            len(request.output) + request.num_pending_tokens,
            request.long_rope,
            params,
            (tuple(request.prompt), tuple(request.output)) if request.needs_history else None,
            request.tokens_to_score(start, end) if params.prompt_logprobs is not None else (),
        )
        request.num_computed_tokens = end
        request.num_pending_tokens += samples
        request.num_plans_in_flight += 1
        return step

    def _register_blocks(self, request: Request, computed: int) -> None:
        """Add the blocks that are now full of computed tokens to the prefix cache."""
        full = min(computed, len(request.tokens)) // self.config.block_size
        if full > request.num_registered_blocks:
            hashes = request.block_hashes(self.config.block_size, full)
            for index in range(request.num_registered_blocks, full):
                self.blocks.register(request.blocks[index], hashes[index])
            request.num_registered_blocks = full

    def _preempt(self, request: Request) -> None:
        """Free a running request's blocks and move it back to the waiting queue, in order of arrival.

        It is recomputed later, apart from the blocks that are still in the prefix cache.
        """
        self._running.remove(request)
        self._free(request)
        position = 0
        for other in self._waiting:
            if other.arrival > request.arrival:
                break
            position += 1
        self._waiting.insert(position, request)

    def _finish(self, request: Request, reason: FinishReason) -> None:
        request.finish_reason = reason
        if request.request_slot is None:
            self._waiting.remove(request)
        else:
            self._running.remove(request)
        if request.num_plans_in_flight == 0:
            self._remove(request)

    def _remove(self, request: Request) -> None:
        """Delete a finished request that no plan in flight contains."""
        del self._requests[request.id]
        self._free(request)

    def _free(self, request: Request) -> None:
        if request.request_slot is not None:
            self.blocks.free(request.blocks)
            request.blocks = ()
            heapq.heappush(self._free_request_slots, request.request_slot)
            request.request_slot = None


def _by_arrival(request: Request) -> int:
    return request.arrival
