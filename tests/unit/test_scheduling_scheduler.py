"""The scheduler on small examples: batching, chunked prefill, prefix caching, preemption, pipelining."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.scheduling_sim import EOS, Sim, alone
from yalis.errors import YalisError
from yalis.scheduling.budget import MIN_MICRO_BATCH_TOKENS
from yalis.scheduling.plan import LAST_SAMPLED, Emitted, SequenceStep, StepOutput, StepPlan
from yalis.scheduling.request import Request
from yalis.scheduling.scheduler import Scheduler, SchedulerConfig
from yalis.types import SamplingParams, TokenLogprobs


def config(**changes: object) -> SchedulerConfig:
    values = {"max_num_seqs": 4, "max_batch_tokens": 64, "max_model_len": 64, "block_size": 4, **changes}
    return SchedulerConfig(**values)  # type: ignore[arg-type]


def counts(plan: StepPlan | None) -> dict[int, int]:
    assert plan is not None
    return {step.request_id: step.num_tokens for step in plan.sequences}


def find_step(plan: StepPlan | None, request: Request) -> SequenceStep:
    assert plan is not None
    return next(step for step in plan.sequences if step.request_id == request.id)


def commit(scheduler: Scheduler, plan: StepPlan | None, **tokens: int) -> list[Emitted]:
    """Commit a plan with the tokens given by request (r0=..., r1=...); 9 for the others."""
    assert plan is not None
    sampled = {s.request_id: tokens.get(f"r{s.request_id}", 9) for s in plan.sequences if s.samples}
    return scheduler.commit(StepOutput(plan.step_id, sampled))


def request(id: int, size: int = 5, prompt: list[int] | None = None, **params: object) -> Request:
    prompt = [100 * (id + 1) + i for i in range(size)] if prompt is None else prompt
    return Request(id, prompt, SamplingParams(**params), frozenset({EOS}))  # type: ignore[arg-type]


def scheduler_with(*requests: Request, num_blocks: int = 64, **changes: object) -> Scheduler:
    scheduler = Scheduler(config(**changes), num_blocks)
    for item in requests:
        scheduler.add(item)
    return scheduler


# Batching


def test_running_requests_go_first_and_new_ones_join() -> None:
    sim = Sim(config(), 64)
    first = sim.add([1, 2, 3], max_tokens=8, ignore_eos=True)
    assert counts(sim.launch()) == {0: 3}
    second = sim.add([4, 5], max_tokens=8, ignore_eos=True)
    sim.commit()
    assert counts(sim.launch()) == {0: 1, 1: 2}
    assert (first.request_slot, second.request_slot) == (0, 1)
    assert (sim.scheduler.num_running, sim.scheduler.num_waiting) == (2, 0)
    sim.drain()


def test_prompts_beyond_the_token_budget_are_chunked() -> None:
    scheduler = scheduler_with(request(0, 10), request(1, 3), max_batch_tokens=4)
    sizes, samples = [], []
    for _ in range(4):
        plan = scheduler.schedule()
        sizes.append(counts(plan))
        samples.append([step.samples for step in plan.sequences])  # type: ignore[union-attr]
        commit(scheduler, plan)
    assert sizes == [{0: 4}, {0: 4}, {0: 2, 1: 2}, {0: 1, 1: 1}]
    assert samples == [[False], [False], [True, False], [True, True]]
    assert scheduler.counters.chunked_prefills == 3


def test_a_plan_has_only_the_blocks_of_its_tokens() -> None:
    scheduler = scheduler_with(request(0, 10), max_batch_tokens=4)
    assert [len(step.blocks) for step in scheduler.schedule().sequences] == [1]  # type: ignore[union-attr]
    assert scheduler.blocks.in_use == 3


def test_running_requests_are_limited_by_slots_which_are_reused() -> None:
    sim = Sim(config(max_num_seqs=2), 64)
    for index in range(5):
        sim.add([index + 1], max_tokens=2, ignore_eos=True)
    assert counts(sim.launch()) == {0: 1, 1: 1}
    sim.commit()
    sim.launch()
    sim.commit()
    plan = sim.launch()
    assert counts(plan) == {2: 1, 3: 1}
    assert {step.request_slot for step in plan.sequences} == {0, 1}  # type: ignore[union-attr]
    sim.drain()


# Finishing


@pytest.mark.parametrize(
    ("params", "expected", "reason"),
    [
        ({"max_tokens": 8}, [7, 8, EOS], "stop"),
        ({"max_tokens": 8, "stop_token_ids": (8,)}, [7, 8], "stop"),
        ({"max_tokens": 2}, [7, 8], "length"),
        ({"max_tokens": 3}, [7, 8, EOS], "stop"),
        ({"max_tokens": 8, "ignore_eos": True}, [7, 8, EOS, 6, 5], "length"),  # max_model_len
        ({"max_tokens": 8, "min_tokens": 4}, [7, 8, EOS, 6, 5], "length"),
        ({"max_tokens": 8, "min_tokens": 3}, [7, 8, EOS], "stop"),
    ],
)
@pytest.mark.parametrize(("in_flight", "fed"), [(1, False), (2, True), (4, True)])
def test_finish_reasons(params: dict, expected: list[int], reason: str, in_flight: int, fed: bool) -> None:
    item = request(0, 3, **params)
    scheduler = scheduler_with(item, max_model_len=8, max_in_flight=in_flight, feed_on_device=fed)
    stream = iter([7, 8, EOS, 6, 5, 4, 3, 2, 1])
    plans: list[StepPlan] = []
    emitted: list[Emitted] = []
    sampled = 0
    while scheduler.has_work:
        while (plan := scheduler.schedule()) is not None:
            plans.append(plan)
        plan = plans.pop(0)
        sampled += 1
        emitted += scheduler.commit(StepOutput(plan.step_id, {0: next(stream)}))
    assert [one.token for one in emitted] == expected == item.output
    assert [one.finish_reason for one in emitted] == [None] * (len(expected) - 1) + [reason]
    assert item.finish_reason == reason
    assert sampled <= min(item.params.max_tokens, 5)  # never planned past what could be emitted
    assert scheduler.counters.dropped_tokens == sampled - len(expected)
    scheduler.check()
    assert scheduler.blocks.in_use == 0


def test_logprobs_are_emitted_with_their_token() -> None:
    scheduler = scheduler_with(request(0))
    plan = scheduler.schedule()
    logprobs = TokenLogprobs(3, -0.5)
    [emitted] = scheduler.commit(StepOutput(plan.step_id, {0: 3}, {0: logprobs}))  # type: ignore[union-attr]
    assert emitted == Emitted(0, 3, logprobs, None)


# Plans in flight


def test_with_one_plan_in_flight_schedule_and_commit_alternate() -> None:
    scheduler = scheduler_with(request(0))
    plan = scheduler.schedule()
    assert scheduler.schedule() is None
    commit(scheduler, plan)
    assert counts(scheduler.schedule()) == {0: 1}


def test_a_sampled_token_is_read_on_the_device() -> None:
    scheduler = scheduler_with(request(0, 5), max_in_flight=3, feed_on_device=True)
    first, second, third = (scheduler.schedule() for _ in range(3))
    assert [s.tokens for p in (second, third) for s in p.sequences] == [(LAST_SAMPLED,), (LAST_SAMPLED,)]  # type: ignore[union-attr]
    assert [s.start for p in (first, second, third) for s in p.sequences] == [0, 5, 6]  # type: ignore[union-attr]
    assert [s.output_len for p in (first, second, third) for s in p.sequences] == [0, 1, 2]  # type: ignore[union-attr]
    assert scheduler.schedule() is None
    assert [emitted.token for emitted in commit(scheduler, first, r0=11)] == [11]
    commit(scheduler, second, r0=12)
    commit(scheduler, third, r0=13)
    [step] = scheduler.schedule().sequences  # type: ignore[union-attr]
    assert step.tokens == (13,)  # committed, so the host has the token id
    assert scheduler.counters.fed_tokens == 2


def test_requests_with_penalties_wait_for_the_commit() -> None:
    item = request(0, 5, presence_penalty=0.5)
    scheduler = scheduler_with(item, request(1, 5), max_in_flight=2, feed_on_device=True)
    first = scheduler.schedule()
    second = scheduler.schedule()
    assert counts(first) == {0: 5, 1: 5}
    assert counts(second) == {1: 1}
    commit(scheduler, first, r0=7)
    step = find_step(scheduler.schedule(), item)
    assert step.tokens == (7,)
    assert step.history == (tuple(item.prompt), (7,))


def test_without_feed_on_device_the_next_plan_has_other_requests() -> None:
    scheduler = scheduler_with(request(0, 4), request(1, 4), max_batch_tokens=4, max_in_flight=3)
    first, second = scheduler.schedule(), scheduler.schedule()
    assert counts(first) == {0: 4}
    assert counts(second) == {1: 4}
    assert scheduler.schedule() is None  # both wait for their sampled token
    commit(scheduler, first)
    assert counts(scheduler.schedule()) == {0: 1}


def test_chunks_of_a_prompt_are_scheduled_without_a_commit_between() -> None:
    scheduler = scheduler_with(request(0, 10), max_batch_tokens=4, max_in_flight=3)
    assert [counts(scheduler.schedule()) for _ in range(3)] == [{0: 4}, {0: 4}, {0: 2}]


def test_blocks_and_slot_are_freed_when_the_last_plan_is_committed() -> None:
    item = request(0, 5)
    scheduler = scheduler_with(item, max_num_seqs=1, max_in_flight=2, feed_on_device=True)
    first, second = scheduler.schedule(), scheduler.schedule()
    scheduler.add(request(1, 5))
    [emitted] = commit(scheduler, first, r0=EOS)
    assert emitted.finish_reason == "stop"
    assert item.request_slot == 0
    assert scheduler.blocks.in_use == 2
    assert scheduler.schedule() is None  # the only slot is still in use
    assert commit(scheduler, second, r0=55) == []
    assert scheduler.counters.dropped_tokens == 1
    assert scheduler.blocks.in_use == 0
    assert counts(scheduler.schedule()) == {1: 5}


def test_commits_out_of_order_are_rejected() -> None:
    scheduler = scheduler_with(request(0), max_in_flight=2, feed_on_device=True)
    scheduler.schedule()
    scheduler.schedule()
    with pytest.raises(ValueError, match="expected: 0"):
        scheduler.commit(StepOutput(1, {0: 1}))


# Pipeline parallelism: a micro-batch for every stage


class Pipeline(Sim):
    """A simulation with as many steps in flight as there are stages."""

    def __init__(self, stages: int, num_blocks: int = 512, **changes: object) -> None:
        values = {"max_num_seqs": 64, "max_batch_tokens": 512, "max_model_len": 1024, **changes}
        super().__init__(config(max_in_flight=stages, pipelined=True, **values), num_blocks)

    def fill(self) -> list[dict[int, int]]:
        """Launch all steps that can be launched now; returns their token counts."""
        plans = []
        while (plan := self.launch()) is not None:
            plans.append(counts(plan))
        return plans

    def round(self) -> list[dict[int, int]]:
        """Commit every step in flight, and launch all possible steps after each commit."""
        plans = []
        for _ in range(len(self.launched)):
            self.commit()
            plans += self.fill()
        return plans

    def add_decoding(self, count: int, length: int = 1) -> None:
        """Add sequences and run them until all prompts are computed and nothing is in flight."""
        for index in range(count):
            self.add([1 + index % 5, 1 + index // 5 % 5] + [1] * (length - 1), max_tokens=200, ignore_eos=True)
        while any(not r.output for r in self.requests.values()):
            self.step()
        while self.launched:
            self.commit()


@pytest.mark.parametrize(
    ("sequences", "stages", "expected"),
    [(8, 4, [2, 2, 2, 2]), (9, 4, [3, 2, 2, 2]), (10, 4, [3, 3, 2, 2]), (3, 4, [1, 1, 1]), (5, 2, [3, 2]), (7, 1, [7])],
)
def test_sequences_are_divided_evenly_over_micro_batches(sequences: int, stages: int, expected: list[int]) -> None:
    sim = Pipeline(stages)
    sim.add_decoding(sequences)
    assert [len(plan) for plan in sim.fill()] == expected
    for _ in range(3):
        assert sorted(map(len, sim.round()), reverse=True) == expected


@pytest.mark.parametrize("left", [range(6), [0, 3, 4, 5, 9, 14], range(1, 16, 3), [0, 15]])
def test_unequal_micro_batches_become_equal(left: Sequence[int]) -> None:
    """Whichever requests end, the remaining ones are divided evenly again within two rounds."""
    sim = Pipeline(4)
    sim.add_decoding(16)
    assert [len(plan) for plan in sim.fill()] == [4, 4, 4, 4]
    for request in list(sim.requests.values()):
        if request.id not in left:
            sim.cancel(request.id)
    sim.round()
    sim.round()
    for _ in range(3):
        sizes = sorted(map(len, sim.round()), reverse=True)
        assert sizes == [size for size in (-(-(len(left) - index) // 4) for index in range(4)) if size]


def test_new_requests_join_the_smallest_micro_batches() -> None:
    sim = Pipeline(4)
    sim.add_decoding(5)
    assert [len(plan) for plan in sim.fill()] == [2, 1, 1, 1]
    for index in range(3):
        sim.add([5, index + 1], max_tokens=50, ignore_eos=True)
    sim.round()
    assert [len(plan) for plan in sim.round()] == [2, 2, 2, 2]


@pytest.mark.parametrize(
    ("length", "chunks"),
    [
        (1000, [250, 250, 250, 250]),
        (257, [65, 65, 65, 62]),
        (200, [67, 67, 66]),
        (2 * MIN_MICRO_BATCH_TOKENS, [MIN_MICRO_BATCH_TOKENS] * 2),
        (2 * MIN_MICRO_BATCH_TOKENS - 1, [2 * MIN_MICRO_BATCH_TOKENS - 1]),
        (5, [5]),
    ],
)
def test_a_long_prompt_is_chunked_so_that_stages_overlap(length: int, chunks: list[int]) -> None:
    sim = Pipeline(4)
    sim.add([1] * length, max_tokens=2, ignore_eos=True)
    assert sim.fill() == [{0: size} for size in chunks]
    sim.drain()


@pytest.mark.parametrize("length", [1, 20, 63, 100, 400])
def test_prompts_of_equal_length_get_a_micro_batch_each(length: int) -> None:
    sim = Pipeline(4)
    for index in range(4):
        sim.add([index + 1] * length, max_tokens=3, ignore_eos=True)
    assert sim.fill() == [{index: length} for index in range(4)]
    sim.drain()


def test_a_long_prompt_is_divided_over_decoding_micro_batches() -> None:
    sim = Pipeline(4)
    sim.add_decoding(8)
    prompt = sim.add([5] * 1000, max_tokens=9, ignore_eos=True)
    plans = sim.fill()
    assert [len(plan) for plan in plans] == [4, 3, 3, 2]
    assert all(sum(plan.values()) == 252 for plan in plans)
    sim.round()
    assert len(prompt.output) == 1
    # A short prompt joins one micro-batch without being chunked.
    short = sim.add([4] * 20, max_tokens=9, ignore_eos=True)
    plans = sim.round()
    assert [plan[short.id] for plan in plans if short.id in plan] == [20]


def test_requests_that_cannot_start_do_not_enlarge_micro_batches() -> None:
    """16 requests wait for blocks; the 4 running ones still get a micro-batch each."""
    sim = Pipeline(4, num_blocks=48, max_model_len=96)
    for index in range(20):
        sim.add([1 + index % 5, 1 + index // 5, *[2] * 42], max_tokens=40, ignore_eos=True)
    sim.fill()
    while not all(sim.requests[index].output for index in range(3)):
        sim.step()
    assert sim.scheduler.num_waiting > 10
    sim.fill()
    running = sim.scheduler.num_running
    for _ in range(3):
        assert [len(plan) for plan in sim.round()] == [1] * running
    sim.drain()


def test_samples_of_one_prompt_do_not_enlarge_micro_batches() -> None:
    sim = Pipeline(4)
    for seed in range(8):
        sim.add([1, 2, 3, 4] * 100, max_tokens=4, seed=seed, ignore_eos=True)
    assert sim.fill() == [{0: 100}] * 4
    sim.drain()


def test_requests_with_a_cached_prefix_start_although_few_blocks_are_free() -> None:
    """The blocks suffice for one prompt without sharing, and for many that share its prefix."""
    sim = Pipeline(2, num_blocks=40, max_model_len=160)
    shared = [1, 2, 3, 4] * 25
    for index in range(8):
        sim.add([*shared, index % 5 + 1, index + 1], max_tokens=3, ignore_eos=True)
    max_running = 0
    while sim.step():
        max_running = max(max_running, sim.scheduler.num_running)
    assert max_running >= 6
    sim.check_end()


# Cancelling


def test_cancel_while_waiting_running_and_in_flight() -> None:
    scheduler = scheduler_with(request(0), request(1), request(2), max_num_seqs=2)
    assert scheduler.cancel(2) == [Emitted(2, None, None, "cancelled")]
    assert scheduler.num_waiting == 2
    plan = scheduler.schedule()
    assert scheduler.cancel(0) == [Emitted(0, None, None, "cancelled")]  # in flight
    assert scheduler.cancel(0) == []
    scheduler.check()
    assert [emitted.request_id for emitted in commit(scheduler, plan)] == [1]
    scheduler.check()
    assert scheduler.cancel(1) == [Emitted(1, None, None, "cancelled")]  # running, nothing in flight
    assert scheduler.cancel(77) == []
    assert not scheduler.has_work
    assert scheduler.blocks.in_use == 0


def test_finish_for_a_stop_string() -> None:
    item = request(0)
    scheduler = scheduler_with(item, max_in_flight=2, feed_on_device=True)
    first, second = scheduler.schedule(), scheduler.schedule()
    assert len(commit(scheduler, first)) == 1
    assert scheduler.finish(0, "stop")
    assert not scheduler.finish(0, "stop")
    assert item.finish_reason == "stop"
    assert scheduler.has_work  # a plan is still to be committed
    assert commit(scheduler, second) == []
    assert not scheduler.has_work
    scheduler.check()


# Prefix caching


def test_a_cached_prompt_is_not_recomputed() -> None:
    sim = Sim(config(), 64)
    prompt = list(range(1, 13))
    first = sim.add(prompt, max_tokens=6, ignore_eos=True)
    sim.drain()
    second = sim.add([*prompt, 3, 3], max_tokens=2)
    third = sim.add(prompt, max_tokens=2)
    # The longer prompt reuses all three full blocks. The same prompt recomputes its last block, for the logits.
    assert counts(sim.launch()) == {1: 2, 2: 4}
    assert (first.cached_tokens, second.cached_tokens, third.cached_tokens) == (0, 12, 8)
    assert sim.scheduler.counters.prefix_hit_tokens == 20
    sim.drain()


def test_the_next_turn_of_a_chat_reuses_prompt_and_output() -> None:
    sim = Sim(config(), 64)
    first = sim.add([1, 2, 3], max_tokens=10, ignore_eos=True)
    sim.drain()
    second = sim.add([*first.prompt, *first.output, 4], max_tokens=1)
    sim.drain()
    assert second.cached_tokens == 12  # of 3 + 10 tokens; the last one was never computed


def test_samples_of_one_prompt_compute_it_once() -> None:
    sim = Sim(config(max_batch_tokens=8, max_in_flight=2), 64)
    prompt = list(range(1, 18))
    for seed in range(3):
        sim.add(prompt, max_tokens=3, seed=seed, ignore_eos=True)
    plans = [sim.launch(), sim.launch()]
    assert [counts(plan) for plan in plans] == [{0: 8}, {0: 8}]
    sim.drain()
    assert sim.scheduler.counters.deferrals > 0
    # The prompt once, its last token for the other two, and two more decode steps for each of the three.
    assert sum(plan.num_tokens for plan in sim.plans) == 17 + 2 * 1 + 3 * 2
    assert [r.cached_tokens for r in sim.requests.values()] == [0, 16, 16]


def test_later_requests_start_before_a_deferred_one() -> None:
    scheduler = scheduler_with(request(0, 9), request(1, 9, prompt=[*range(100, 109)]), request(2, 9))
    assert counts(scheduler.schedule()) == {0: 9, 2: 9}


def test_a_deferred_request_starts_when_the_other_is_cancelled() -> None:
    scheduler = scheduler_with(request(0, 9), request(1, 9, prompt=[*range(100, 109)]))
    plan = scheduler.schedule()
    scheduler.cancel(0)
    commit(scheduler, plan)
    assert counts(scheduler.schedule()) == {1: 1}  # the cancelled request's blocks are in the prefix cache


def test_prefix_caching_can_be_disabled() -> None:
    sim = Sim(config(prefix_reuse=False), 64)
    for _ in range(2):
        sim.add(list(range(1, 13)), max_tokens=2)
        sim.drain()
    sim.add(list(range(1, 13)), max_tokens=2)
    sim.add(list(range(1, 13)), max_tokens=2)
    assert counts(sim.launch()) == {2: 12, 3: 12}
    sim.drain()
    assert sim.scheduler.counters.prefix_hit_tokens == 0


# Preemption


@pytest.mark.parametrize("reuse", [False, True])
@pytest.mark.parametrize(("in_flight", "fed"), [(1, False), (2, True), (4, True), (3, False)])
def test_without_free_blocks_the_latest_request_is_preempted(reuse: bool, in_flight: int, fed: bool) -> None:
    settings = config(max_model_len=24, prefix_reuse=reuse, max_in_flight=in_flight, feed_on_device=fed)
    sim = Sim(settings, 8)
    for index in range(3):
        sim.add([index + 1] * 4, max_tokens=20, ignore_eos=True)
    order: list[int] = []
    while sim.step():
        order += [r.id for r in sim.requests.values() if r.finish_reason and r.id not in order]
    sim.check_end()
    assert sim.scheduler.counters.preemptions > 0
    assert order == [0, 1, 2]
    assert sim.requests[0].num_admissions == 1  # the oldest is never preempted
    assert sim.requests[2].num_admissions > 1


def test_the_oldest_makes_progress_although_the_other_is_always_in_flight() -> None:
    """The later request has a prompt chunk in every plan. It is paused until it can be preempted."""
    sim = Sim(config(max_model_len=40, max_batch_tokens=3, max_in_flight=2, feed_on_device=True), 10)
    sim.add([1] * 3, max_tokens=12, ignore_eos=True)
    sim.launch()
    sim.add([2] * 30, max_tokens=2, ignore_eos=True)
    gap, worst = 0, 0
    while sim.requests[0].finish_reason is None:
        plan = sim.launch()
        if plan is None:
            sim.commit()
        elif sim.requests[0].num_tokens < 15:
            gap = 0 if 0 in counts(plan) else gap + 1
            worst = max(worst, gap)
    assert worst <= 1
    assert sim.scheduler.counters.preemptions == 1
    sim.drain()


def test_a_preempted_request_is_queued_in_order_of_arrival() -> None:
    sim = Sim(config(max_model_len=16, prefix_reuse=False), 4)
    sim.add([1] * 4, max_tokens=12, ignore_eos=True)
    sim.add([2] * 6, max_tokens=8, ignore_eos=True)
    sim.add([3] * 4, max_tokens=8, ignore_eos=True)
    while sim.scheduler.counters.preemptions == 0:
        sim.step()
    assert [r.id for r in sim.scheduler._waiting] == [1, 2]
    sim.drain()
    output, _ = alone([2] * 6, sim.requests[1].params, 16)
    assert sim.requests[1].output == output


def test_admission_reserves_blocks_for_earlier_requests() -> None:
    sim = Sim(config(max_model_len=16), 4)
    sim.add([1] * 4, max_tokens=6, ignore_eos=True)
    sim.add([2] * 12, max_tokens=2, ignore_eos=True)
    sim.drain()
    assert sim.scheduler.counters.preemptions == 0


def test_a_small_request_does_not_start_before_a_large_one_that_waits_for_blocks() -> None:
    sim = Sim(config(max_model_len=16), 4)
    sim.add([1] * 8, max_tokens=4, ignore_eos=True)
    big = sim.add([2] * 12, max_tokens=2, ignore_eos=True)
    small = sim.add([3], max_tokens=2, ignore_eos=True)
    assert counts(sim.launch()) == {0: 8}
    while not big.num_admissions:
        assert not small.num_admissions
        sim.commit()
        sim.launch()
    sim.drain()


# RoPE factors that switch at a length


def test_a_long_prompt_uses_long_factors_in_every_chunk() -> None:
    scheduler = scheduler_with(request(0, 10), request(1, 4), recompute_at=8, max_batch_tokens=7)
    first = scheduler.schedule()
    commit(scheduler, first)
    second = scheduler.schedule()
    assert [s.long_rope for plan in (first, second) for s in plan.sequences] == [True, True, False]  # type: ignore[union-attr]


@pytest.mark.parametrize(("in_flight", "fed"), [(1, False), (3, True)])
def test_crossing_the_switch_length_recomputes_once(in_flight: int, fed: bool) -> None:
    sim = Sim(config(recompute_at=8, max_in_flight=in_flight, feed_on_device=fed), 64)
    item = sim.add([1] * 6, max_tokens=6, ignore_eos=True)
    sim.drain()
    steps = [step for plan in sim.plans for step in plan.sequences]
    assert [(s.start, s.num_tokens, s.long_rope) for s in steps] == [
        (0, 6, False), (6, 1, False), (7, 1, False), (0, 9, True), (9, 1, True), (10, 1, True)]  # fmt: skip
    assert sim.scheduler.counters.rope_switches == 1
    assert sim.scheduler.counters.preemptions == 0
    # Blocks cached with one set of factors are not reused with the other.
    again = sim.add([*item.prompt, *item.output], max_tokens=1)
    short = sim.add([1] * 6, max_tokens=1)
    sim.drain()
    assert again.cached_tokens == 8
    assert short.cached_tokens == 4


# Errors


def test_requests_that_can_never_run_are_rejected() -> None:
    scheduler = scheduler_with(max_model_len=8)
    with pytest.raises(YalisError, match="has 8 tokens and max_model_len, prompt and output, is 8"):
        scheduler.add(request(0, 8))
    with pytest.raises(YalisError, match="empty"):
        scheduler.add(request(0, prompt=[]))
    scheduler.add(request(0, 7))
    with pytest.raises(ValueError, match="already"):
        scheduler.add(request(0, 3))
    assert counts(scheduler.schedule()) == {0: 7}


def test_a_cache_too_small_for_one_sequence_is_rejected() -> None:
    with pytest.raises(YalisError, match="max_model_len is 64 and 15 blocks of 4 hold 60 tokens"):
        Scheduler(config(), 15)
    with pytest.raises(YalisError, match="max_num_seqs is 0"):
        config(max_num_seqs=0)


def test_schedule_without_requests() -> None:
    scheduler = scheduler_with()
    assert not scheduler.has_work
    assert scheduler.schedule() is None
    scheduler.check()
