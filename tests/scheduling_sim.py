"""A simulated runner and KV cache that share no code with the scheduler.

Every cell of the simulated cache holds what was last written to it: a hash of all tokens up to that position, and the
RoPE factors used. A sequence must read its own prefix. This detects wrong sharing, overwritten shared blocks, and stale
or freed ones. The sampled token is a function of the token prefix and the seed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from yalis.scheduling.plan import LAST_SAMPLED, Emitted, StepOutput, StepPlan
from yalis.scheduling.request import Request
from yalis.scheduling.scheduler import Scheduler, SchedulerConfig
from yalis.types import SamplingParams, TokenLogprobs

EOS = 0
VOCAB = 6
MASK = (1 << 64) - 1


def mix(state: int, token: int) -> int:
    state = ((state ^ (token + 0x9E3779B97F4A7C15)) * 0xBF58476D1CE4E5B9) & MASK
    return state ^ (state >> 31)


def hash_prefixes(tokens: Sequence[int]) -> list[int]:
    """Return the hash of every prefix."""
    states, state = [], 1
    for token in tokens:
        state = mix(state, token)
        states.append(state)
    return states


def sample(state: int, seed: int | None) -> int:
    return (mix(state, 1000 + (seed or 0)) >> 17) % VOCAB


def score(prompt: Sequence[int], position: int) -> TokenLogprobs:
    """Return the log-probability of a prompt token, a function of the tokens before it."""
    return TokenLogprobs(prompt[position], -float(hash_prefixes(prompt[:position])[-1] % 1000))


def alone(prompt: Sequence[int], params: SamplingParams, max_model_len: int) -> tuple[list[int], str]:
    """Return the output and finish reason of a request that runs alone, computed without the scheduler."""
    tokens, state = list(prompt), hash_prefixes(prompt)[-1]
    output: list[int] = []
    if params.max_tokens == 0:
        return output, "length"
    while True:
        token = sample(state, params.seed)
        state = mix(state, token)
        tokens.append(token)
        output.append(token)
        stops = token in params.stop_token_ids or (token == EOS and not params.ignore_eos)
        if stops and len(output) >= params.min_tokens:
            return output, "stop"
        if len(output) == params.max_tokens or len(tokens) == max_model_len:
            return output, "length"


class Sim:
    """Drives a scheduler, and checks each of its plans on the simulated cache."""

    def __init__(self, config: SchedulerConfig, num_blocks: int) -> None:
        self.config = config
        self.scheduler = Scheduler(config, num_blocks)
        self.cells: dict[tuple[int, int], tuple[int, bool]] = {}
        self.last_sampled: dict[int, int] = {}  # by request slot, as on the device
        self.truth: dict[int, list[int]] = {}  # prompt and every sampled token, including dropped ones
        self.requests: dict[int, Request] = {}
        self.emitted: dict[int, list[Emitted]] = {}
        self.launched: deque[tuple[StepPlan, StepOutput]] = deque()
        self.plans: list[StepPlan] = []
        self.ended_by_caller: set[int] = set()  # cancelled or finished
        self.steps_as_oldest: dict[int, int] = {}

    def add(self, prompt: Sequence[int], **params: object) -> Request:
        request = Request(len(self.requests), prompt, SamplingParams(**params), frozenset({EOS}))  # type: ignore[arg-type]
        self.scheduler.add(request)
        self.requests[request.id] = request
        self.truth[request.id] = list(prompt)
        self.emitted[request.id] = []
        return request

    def cancel(self, request_id: int) -> None:
        for last in self.scheduler.cancel(request_id):
            self.ended_by_caller.add(request_id)
            self.record(last)

    def finish(self, request_id: int) -> None:
        if self.scheduler.finish(request_id, "stop"):
            self.ended_by_caller.add(request_id)

    def launch(self) -> StepPlan | None:
        oldest = next((r for r in self.requests.values() if r.finish_reason is None), None)
        ran = oldest is not None and oldest.request_slot is not None
        switches = self.scheduler.counters.rope_switches
        plan = self.scheduler.schedule()
        if oldest is not None and ran and oldest.request_slot is None:
            assert self.scheduler.counters.rope_switches > switches, "the oldest was preempted"
        if plan is not None:
            self.plans.append(plan)
            self.launched.append((plan, self.run(plan)))
            assert len(self.launched) <= self.config.max_in_flight
        elif not self.launched:
            assert not self.scheduler.has_work, "work is left, nothing is in flight, and nothing is scheduled"
        return plan

    def commit(self) -> list[Emitted]:
        _, output = self.launched.popleft()
        oldest = next((r.id for r in self.requests.values() if r.finish_reason is None), None)
        if oldest is not None:
            self.steps_as_oldest[oldest] = self.steps_as_oldest.get(oldest, 0) + 1
        emitted = self.scheduler.commit(output)
        for item in emitted:
            self.record(item)
        return emitted

    def record(self, item: Emitted) -> None:
        past = self.emitted[item.request_id]
        assert not past or past[-1].finish_reason is None, "emitted after the end of the request"
        past.append(item)

    def step(self) -> bool:
        """Launch all possible steps, then commit one; returns False if there was nothing to do."""
        while self.launch() is not None:
            pass
        if self.launched:
            self.commit()
            return True
        return False

    def drain(self, limit: int = 100_000) -> None:
        for _ in range(limit):
            self.scheduler.check()
            if not self.step():
                break
        assert not self.scheduler.has_work, "livelock"
        self.check_end()

    def run(self, plan: StepPlan) -> StepOutput:
        config, size = self.config, self.config.block_size
        assert plan.step_id == len(self.plans) - 1
        assert plan.sequences
        assert plan.num_tokens <= config.max_batch_tokens
        assert len(plan.sequences) <= config.max_num_seqs
        assert len({s.request_slot for s in plan.sequences}) == len(plan.sequences)
        ids = [s.request_id for s in plan.sequences]
        assert ids == sorted(set(ids)), "not in order of arrival"
        in_flight = [s for other, _ in self.launched for s in other.sequences]
        states: dict[int, list[int]] = {}
        for step in plan.sequences:
            request, truth = self.requests[step.request_id], self.truth[step.request_id]
            end = step.start + step.num_tokens
            assert request.finish_reason is None, "an ended request was scheduled"
            assert 0 <= step.request_slot < config.max_num_seqs
            assert not any(
                s.request_slot == step.request_slot and s.request_id != step.request_id for s in in_flight
            ), "request slot is still in use"
            tokens = tuple(
                self.last_sampled[step.request_slot] if token == LAST_SAMPLED else token for token in step.tokens
            )
            assert tokens == tuple(truth[step.start : end]), "tokens differ from the sequence"
            assert step.num_tokens >= 1
            assert end <= len(truth)
            generates = request.params.max_tokens > 0
            assert step.samples == (end == len(truth) and generates)
            assert step.scored in ((), tuple(request.prompt[step.start + 1 : end + 1]))
            assert not step.scored or request.params.prompt_logprobs is not None
            assert step.output_len == len(truth) - len(request.prompt)
            assert step.output_len + generates <= request.params.max_tokens
            assert len(truth) + generates <= config.max_model_len
            assert len(step.blocks) == -(-end // size)
            assert step.long_rope == (config.recompute_at is not None and len(truth) > config.recompute_at)
            token_pending = any(s.request_id == step.request_id and s.samples for s in in_flight)
            assert not (token_pending and (request.params.needs_history or not config.feed_on_device))
            if request.params.needs_history:
                assert step.history == (tuple(request.prompt), tuple(truth[len(request.prompt) :]))
            else:
                assert step.history is None
            states[step.request_id] = hash_prefixes(truth[:end])
            self.read(step.request_id, step.blocks, states[step.request_id][: step.start], step.long_rope)
        written: set[tuple[int, int]] = set()
        for step in plan.sequences:
            for position in range(step.start, step.start + step.num_tokens):
                cell = (step.blocks[position // size], position % size)
                assert cell not in written, "two sequences write one cell"
                written.add(cell)
                self.cells[cell] = (states[step.request_id][position], step.long_rope)
        tokens_out: dict[int, int] = {}
        for step in plan.sequences:
            self.read(step.request_id, step.blocks, states[step.request_id], step.long_rope)
            if step.samples:
                token = sample(states[step.request_id][-1], step.params.seed)
                self.last_sampled[step.request_slot] = tokens_out[step.request_id] = token
                self.truth[step.request_id].append(token)
        scored = {
            step.request_id: [
                score(self.requests[step.request_id].prompt, position)
                for position in range(step.start + 1, step.start + 1 + len(step.scored))
            ]
            for step in plan.sequences
            if step.scored
        }
        return StepOutput(plan.step_id, tokens_out, {}, scored)

    def read(self, request_id: int, blocks: Sequence[int], states: list[int], long_rope: bool) -> None:
        size = self.config.block_size
        for position, state in enumerate(states):
            found = self.cells.get((blocks[position // size], position % size))
            assert found == (state, long_rope), f"request {request_id} reads {found} at {position}"

    def check_end(self) -> None:
        """Check that all requests ended with the tokens they get alone, and that all blocks are free."""
        self.scheduler.check()
        assert self.scheduler.blocks.in_use == 0
        for request in self.requests.values():
            output, reason = alone(request.prompt, request.params, self.config.max_model_len)
            emitted = self.emitted[request.id]
            tokens = [item.token for item in emitted if item.token is not None]
            assert request.output == tokens
            assert request.finish_reason is not None
            if request.id in self.ended_by_caller:
                assert tokens == output[: len(tokens)]
            else:
                assert tokens == output
                assert request.finish_reason == emitted[-1].finish_reason == reason
            if emitted and emitted[0].finish_reason != "cancelled" and request.params.prompt_logprobs is not None:
                scores = [score(request.prompt, position) for position in range(1, len(request.prompt))]
                assert emitted[0].prompt_logprobs == (None, *scores)
            assert all(item.prompt_logprobs is None for item in emitted[1:])
            # First come, first served: while a request is the oldest, each of its steps follows within a few commits,
            # even if it is recomputed (past recompute_at) or waits for the blocks of plans in flight.
            length = len(request.prompt) + len(tokens)
            lag = 2 * self.config.max_in_flight + 1
            assert self.steps_as_oldest.get(request.id, 0) <= 2 * (length + 1) * lag
