"""Random requests against the model of the KV cache in scheduling_sim: every request reads only its own prefix and gets
the same tokens as when it runs alone, no block is leaked, and no request starves."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import asdict, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.scheduling_sim import VOCAB, Sim
from yalis.scheduling import budget
from yalis.scheduling.scheduler import SchedulerConfig

SHARED = [3, 1, 4, 1, 5, 2, 2, 3, 5, 3, 1, 4, 4, 2, 1, 5, 1, 1, 2, 3]


@st.composite
def setups(draw: st.DrawFn) -> tuple[SchedulerConfig, int]:
    block_size = draw(st.sampled_from([1, 2, 4]))
    num_blocks = draw(st.integers(2, 14))
    config = SchedulerConfig(
        max_num_seqs=draw(st.integers(1, 5)),
        max_batch_tokens=draw(st.integers(1, 20)),
        max_model_len=draw(st.integers(2, num_blocks * block_size)),
        block_size=block_size,
        max_in_flight=draw(st.integers(1, 4)),
        feed_on_device=draw(st.booleans()),
        recompute_at=draw(st.one_of(st.none(), st.integers(1, 24))),
        prefix_reuse=draw(st.booleans()),
    )
    return config, num_blocks


@st.composite
def pipelines(draw: st.DrawFn) -> tuple[SchedulerConfig, int]:
    """As setups, with a micro-batch for each pipeline stage and without feed_on_device."""
    config, num_blocks = draw(setups())
    return replace(config, pipelined=True, feed_on_device=False, max_in_flight=draw(st.integers(2, 4))), num_blocks


#: (action, seed for choosing the request, prompt or length).
ACTIONS = st.lists(
    st.tuples(st.sampled_from(["add", "add", "launch", "launch", "launch", "commit", "commit", "cancel", "finish"]),
              st.integers(0, 2**30)),
    min_size=15,
    max_size=80,
)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(st.one_of(setups(), pipelines()), ACTIONS)
def test_plain_decoding_is_planned_as_any_other_step(
    setup: tuple[SchedulerConfig, int], actions: list[tuple[str, int]]
) -> None:
    """Scheduler._decode is only faster: without it, the plans are the same."""
    fast, slow = Sim(*setup), Sim(*setup)
    slow.scheduler._decode = lambda request: None  # type: ignore[method-assign]
    for sim in (fast, slow):
        for action in actions:
            act(sim, *action)
        sim.drain()
    assert fast.plans == slow.plans
    assert fast.emitted == slow.emitted
    assert asdict(fast.scheduler.counters) == asdict(slow.scheduler.counters)


def act(sim: Sim, action: str, seed: int) -> None:
    rng = random.Random(seed)
    if action == "add":
        size = rng.randint(1, max(1, (sim.config.max_model_len - 1) // rng.choice([1, 2, 4])))
        shared = rng.choice([0, len(SHARED) // 2, len(SHARED)])
        prompt = (SHARED[:shared] + [rng.randrange(VOCAB) for _ in range(size)])[:size]
        scored = rng.random() < 0.3
        only_scored = scored and rng.random() < 0.5
        sim.add(
            prompt,
            prompt_logprobs=0 if scored else None,
            max_tokens=0 if only_scored else rng.randint(1, 30),
            seed=rng.randint(0, 2),
            ignore_eos=rng.random() < 0.5,
            min_tokens=0 if only_scored else rng.choice([0, 0, 1]),
            stop_token_ids=(1,) if rng.random() < 0.1 else (),
            repetition_penalty=rng.choice([1.0, 1.0, 1.0, 1.5]),
        )
    elif action == "launch":
        sim.launch()
    elif action == "commit" and sim.launched:
        sim.commit()
    elif action == "cancel" and sim.requests:
        live = [r.id for r in sim.requests.values() if r.finish_reason is None]
        sim.cancel(rng.choice(live or list(sim.requests)))
    elif action == "finish" and sim.requests:
        sim.finish(rng.choice(list(sim.requests)))


@settings(max_examples=300, deadline=None)
@given(setups(), ACTIONS)
def test_random_actions(setup: tuple[SchedulerConfig, int], actions: list[tuple[str, int]]) -> None:
    run_actions(Sim(*setup), actions)


@settings(max_examples=300, deadline=None)
@given(pipelines(), ACTIONS, st.sampled_from([1, 3, 8, 64]))
def test_random_actions_in_a_pipeline(
    setup: tuple[SchedulerConfig, int], actions: list[tuple[str, int]], min_tokens: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(budget, "MIN_MICRO_BATCH_TOKENS", min_tokens)  # prompts are short here
        sim = Sim(*setup)
        run_actions(sim, actions)
    assert sim.scheduler.counters.fed_tokens == 0


def run_actions(sim: Sim, actions: list[tuple[str, int]]) -> None:
    for action, seed in actions:
        act(sim, action, seed)
        sim.scheduler.check()
    sim.drain()


def run_heavy_load(seed: int, max_in_flight: int, feed_on_device: bool, requests: int, pipelined: bool = False) -> Sim:
    """Run many requests in a small KV cache, arriving while others run, some cancelled."""
    rng = random.Random(seed)
    num_blocks, block_size = rng.randint(6, 16), rng.choice([2, 4])
    config = SchedulerConfig(
        max_num_seqs=rng.randint(2, 8),
        max_batch_tokens=rng.randint(4, 24),
        max_model_len=rng.randint(num_blocks * block_size // 2, num_blocks * block_size),
        block_size=block_size,
        max_in_flight=max_in_flight,
        feed_on_device=feed_on_device,
        recompute_at=[None, 8, 12][seed % 3],
        pipelined=pipelined,
    )
    sim = Sim(config, num_blocks)
    while len(sim.requests) < requests:
        for _ in range(rng.randint(0, 4)):
            act(sim, "add", rng.randrange(2**30))
        if rng.random() < 0.05:
            act(sim, "cancel", rng.randrange(2**30))
        for _ in range(rng.randint(0, 3)):
            sim.launch()
        while sim.launched and rng.random() < 0.6:
            sim.commit()
    sim.drain()
    return sim


@pytest.mark.parametrize("feed_on_device", [False, True])
@pytest.mark.parametrize("max_in_flight", [1, 2, 3, 4])
def test_heavy_load_reaches_every_code_path(max_in_flight: int, feed_on_device: bool) -> None:
    totals: Counter[str] = Counter()
    for seed in range(6):
        sim = run_heavy_load(seed * 8 + max_in_flight * 2 + feed_on_device, max_in_flight, feed_on_device, requests=60)
        totals.update(asdict(sim.scheduler.counters))
        totals.update(asdict(sim.scheduler.blocks.counters))
        totals["cancelled"] += sum(r.finish_reason == "cancelled" for r in sim.requests.values())
    expected = ["preemptions", "rope_switches", "prefix_hit_tokens", "chunked_prefills", "evictions", "cancelled"]
    if max_in_flight > 1 and feed_on_device:
        expected += ["fed_tokens", "dropped_tokens"]
    else:
        assert totals["fed_tokens"] == 0
    assert all(totals[name] > 0 for name in expected), totals


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_heavy_load_in_a_pipeline(stages: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "MIN_MICRO_BATCH_TOKENS", 3)
    totals: Counter[str] = Counter()
    for seed in range(6):
        sim = run_heavy_load(seed * 8 + stages, stages, False, requests=60, pipelined=True)
        totals.update(asdict(sim.scheduler.counters))
        totals["cancelled"] += sum(r.finish_reason == "cancelled" for r in sim.requests.values())
    expected = ["preemptions", "rope_switches", "prefix_hit_tokens", "chunked_prefills", "cancelled"]
    assert all(totals[name] > 0 for name in expected), totals


@pytest.mark.full
@pytest.mark.parametrize("seed", range(100, 400))
def test_heavy_load_many_seeds(seed: int) -> None:
    run_heavy_load(seed, 1 + seed % 4, bool(seed // 4 % 2), requests=100)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(400, 700))
def test_heavy_load_in_a_pipeline_many_seeds(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "MIN_MICRO_BATCH_TOKENS", [1, 3, 8, 64][seed % 4])
    run_heavy_load(seed, 2 + seed % 3, False, requests=100, pipelined=True)
