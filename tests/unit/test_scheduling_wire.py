"""Plans, outputs and tokens come out of the wire as they went in, and a decode step costs the same at any length."""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from dataclasses import asdict
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.scheduling_sim import Sim
from tests.unit.test_scheduling_random import ACTIONS, act, pipelines, setups
from yalis.scheduling.plan import Emitted, SequenceStep, StepOutput, StepPlan
from yalis.scheduling.scheduler import SchedulerConfig
from yalis.scheduling.wire import (
    PlanDecoder,
    PlanEncoder,
    decode_emitted,
    decode_output,
    decode_params,
    encode_emitted,
    encode_output,
    encode_params,
)
from yalis.types import SamplingParams, TokenLogprobs


def sent(value: Any) -> Any:
    """As it arrives at the other end."""
    return json.loads(json.dumps(value))


class Wired(Sim):
    """Every plan goes over the wire before it is run."""

    def __init__(self, config: SchedulerConfig, num_blocks: int) -> None:
        super().__init__(config, num_blocks)
        self.encoder, self.decoder = PlanEncoder(), PlanDecoder()
        self.owners: dict[int, set[int]] = {}  # slot -> requests that held it

    def run(self, plan: StepPlan) -> StepOutput:
        arrived = self.decoder.decode(sent(self.encoder.encode(plan)))
        assert arrived == plan
        for step in plan.sequences:
            self.owners.setdefault(step.request_slot, set()).add(step.request_id)
        output = super().run(arrived)
        assert decode_output(sent(encode_output(output))) == output
        return output


@settings(max_examples=100, deadline=None)
@given(st.one_of(setups(), pipelines()), ACTIONS)
def test_every_plan_arrives(setup: tuple[SchedulerConfig, int], actions: list[tuple[str, int]]) -> None:
    sim = Wired(*setup)
    for kind, number in actions:
        act(sim, kind, number)
    sim.drain()


@pytest.mark.parametrize(("outstanding", "fed", "pipelined"), [(1, False, False), (2, True, False), (3, False, True)])
def test_heavy_traffic_arrives(outstanding: int, fed: bool, pipelined: bool) -> None:
    """Few slots and few blocks: slots change hands, blocks are taken away, prompts come in parts, factors switch."""
    totals: Counter[str] = Counter()
    for seed in range(4):
        rng = random.Random(seed)
        sim = Wired(
            SchedulerConfig(
                max_num_seqs=3, max_batch_tokens=7, max_model_len=30, block_size=2, max_in_flight=outstanding,
                feed_on_device=fed, recompute_at=12, pipelined=pipelined,
            ),
            16,
        )  # fmt: skip
        while len(sim.requests) < 50:
            if rng.random() < 0.05:
                act(sim, "cancel", rng.randrange(2**30))
            act(sim, rng.choice(["add", "add", "launch", "launch", "commit", "commit"]), rng.randrange(2**30))
        sim.drain()
        totals.update(asdict(sim.scheduler.counters))
        totals["histories"] += sum(step.history is not None for plan in sim.plans for step in plan.sequences)
        assert min(map(len, sim.owners.values())) > 1
    expected = ["preemptions", "rope_switches", "chunked_prefills", "prefix_hit_tokens", "histories"]
    assert all(totals[name] for name in expected), totals


def test_a_decode_step_costs_the_same_however_long_the_sequence_is() -> None:
    """Also one whose penalties look at all of it: only what is new is sent."""
    most = {}
    for length in (10, 10_000):
        params = [SamplingParams(seed=5), SamplingParams(seed=5, presence_penalty=0.5)]
        encoder, decoder = PlanEncoder(), PlanDecoder()
        prompt = tuple(range(1000, 1000 + length))
        sizes = []
        for step in range(40):
            plan = StepPlan(step, tuple(_step(slot, chosen, prompt, step) for slot, chosen in enumerate(params)))
            line = json.dumps(encoder.encode(plan))
            assert decoder.decode(json.loads(line)) == plan
            sizes.append(len(line))
        assert sizes[0] > length  # the prompt itself, once
        most[length] = max(sizes[1:])
    assert most[10_000] < most[10] + 20  # a few digits more
    assert most[10_000] < 150


def _step(slot: int, params: SamplingParams, prompt: tuple[int, ...], step: int) -> SequenceStep:
    """The prompt, or the step-th token behind it, of a sequence whose blocks of 16 are numbered as they come."""
    output = tuple(range(30_000, 30_000 + step))
    tokens = (*prompt, *output)
    start = len(tokens) - 1 if step else 0
    blocks = tuple(range(1000, 1000 + -(-len(tokens) // 16)))
    history = (prompt, output) if params.needs_history else None
    return SequenceStep(7 + slot, slot, start, tokens[start:], blocks, True, step, False, params, history)


# Numbers


floats = st.one_of(
    st.floats(max_value=0.0, allow_nan=False),
    st.sampled_from([-math.inf, -0.0, -1e-45, -math.pi]),
)
logprobs = st.builds(
    TokenLogprobs, st.integers(0, 2**31), floats, st.dictionaries(st.integers(0, 2**31), floats, max_size=5)
)


@given(st.integers(0, 2**40), st.dictionaries(st.integers(0, 2**40), st.tuples(st.integers(-1, 2**31), logprobs)))
def test_outputs_arrive_to_the_last_bit(number: int, found: dict[int, tuple[int, TokenLogprobs]]) -> None:
    output = StepOutput(
        number, {id: token for id, (token, _) in found.items()}, {id: x for id, (_, x) in found.items()}
    )
    arrived = decode_output(sent(encode_output(output)))
    assert arrived == output
    # Equal numbers may differ in sign, and equal dictionaries in order.
    assert repr(arrived) == repr(output)


@given(
    st.builds(
        Emitted,
        st.integers(0, 2**40),
        st.none() | st.integers(0, 2**31),
        st.none() | logprobs,
        st.sampled_from([None, "stop", "length", "cancelled"]),
    )
)
def test_emitted_tokens_arrive_to_the_last_bit(item: Emitted) -> None:
    arrived = decode_emitted(sent(encode_emitted(item)))
    assert arrived == item
    assert repr(arrived) == repr(item)


def test_every_field_of_the_sampling_parameters_arrives() -> None:
    params = SamplingParams(
        max_tokens=7, min_tokens=2, temperature=0.1 + 0.2, top_k=3, top_p=1 / 3, min_p=1e-300, repetition_penalty=1.1,
        presence_penalty=-0.7, frequency_penalty=0.3, stop=("\n\u2028", '"é😀'), stop_token_ids=(3, 5), ignore_eos=True,
        seed=2**63 - 1, n=3, logprobs=0,
    )  # fmt: skip
    plain = asdict(SamplingParams())
    assert all(value != plain[name] for name, value in asdict(params).items())
    assert decode_params(sent(encode_params(params))) == params
    assert decode_params(sent(encode_params(SamplingParams()))) == SamplingParams()
