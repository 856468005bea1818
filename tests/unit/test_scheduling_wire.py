"""Plans, outputs and tokens are encoded without loss, and the size of a decode step does not grow with the sequence."""

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
from yalis.scheduling.plan import LAST_SAMPLED, Emitted, SequenceStep, StepOutput, StepPlan
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
from yalis.types import OutputTag, SamplingParams, StructuredOutputs, TokenLogprobs


def transmit(value: Any) -> Any:
    """Return the value as the receiver gets it."""
    return json.loads(json.dumps(value))


class Wired(Sim):
    """A simulation that encodes and decodes every plan before it is run."""

    def __init__(self, config: SchedulerConfig, num_blocks: int) -> None:
        super().__init__(config, num_blocks)
        self.encoder, self.decoder = PlanEncoder(), PlanDecoder()
        self.slot_users: dict[int, set[int]] = {}  # request slot -> ids of the requests that had it

    def run(self, plan: StepPlan) -> StepOutput:
        received = self.decoder.decode(transmit(self.encoder.encode(plan)))
        assert received == plan
        for step in plan.sequences:
            self.slot_users.setdefault(step.request_slot, set()).add(step.request_id)
        output = super().run(received)
        assert decode_output(transmit(encode_output(output))) == output
        return output


@settings(max_examples=100, deadline=None)
@given(st.one_of(setups(), pipelines()), ACTIONS)
def test_plans_round_trip(setup: tuple[SchedulerConfig, int], actions: list[tuple[str, int]]) -> None:
    sim = Wired(*setup)
    for action, seed in actions:
        act(sim, action, seed)
    sim.drain()


@pytest.mark.parametrize(("in_flight", "fed", "pipelined"), [(1, False, False), (2, True, False), (3, False, True)])
def test_plans_round_trip_under_heavy_load(in_flight: int, fed: bool, pipelined: bool) -> None:
    """Few slots and blocks: slots are reused, requests preempted, prompts chunked, RoPE factors switched."""
    totals: Counter[str] = Counter()
    for seed in range(4):
        rng = random.Random(seed)
        sim = Wired(
            SchedulerConfig(
                max_num_seqs=3, max_batch_tokens=7, max_model_len=30, block_size=2, max_in_flight=in_flight,
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
        assert min(map(len, sim.slot_users.values())) > 1
    expected = ["preemptions", "rope_switches", "chunked_prefills", "prefix_hit_tokens", "histories"]
    assert all(totals[name] for name in expected), totals


def test_the_size_of_a_decode_step_is_independent_of_the_sequence_length() -> None:
    """Also with penalties, which need the whole history: only the new tokens are sent."""
    max_size = {}
    for length in (10, 10_000):
        params = [SamplingParams(seed=5), SamplingParams(seed=5, presence_penalty=0.5)]
        encoder, decoder = PlanEncoder(), PlanDecoder()
        prompt = tuple(range(1000, 1000 + length))
        sizes = []
        for step in range(40):
            plan = StepPlan(step, tuple(_step(slot, one, prompt, step) for slot, one in enumerate(params)))
            line = json.dumps(encoder.encode(plan))
            assert decoder.decode(json.loads(line)) == plan
            sizes.append(len(line))
        assert sizes[0] > length  # contains the prompt, once
        max_size[length] = max(sizes[1:])
    assert max_size[10_000] < max_size[10] + 20  # a few digits more
    assert max_size[10_000] < 150


def test_a_decode_step_is_a_slot_or_a_slot_with_its_token_and_new_blocks() -> None:
    params = SamplingParams(seed=5)
    encoder, decoder = PlanEncoder(), PlanDecoder()
    sent = [_step(3, params, tuple(range(14)), step) for step in range(5)]
    # as on a GPU, where the sampled token stays on the device
    sent[2] = sent[2]._replace(tokens=(LAST_SAMPLED,), blocks=sent[1].blocks)
    encoded = [transmit(encoder.encode(StepPlan(step, (one,)))) for step, one in enumerate(sent)]
    received = [decoder.decode(value).sequences[0] for value in encoded]
    assert received == sent
    assert received[0].blocks is received[1].blocks is received[2].blocks  # the packer recognizes them by identity
    assert [steps[0] for _, steps in encoded[1:]] == [[3, 30_000, []], 3, [3, 30_002, [1001]], [3, 30_003, []]]


def _step(slot: int, params: SamplingParams, prompt: tuple[int, ...], step: int) -> SequenceStep:
    """Return the prefill (step 0) or a decode step of a sequence with blocks of 16 tokens."""
    output = tuple(range(30_000, 30_000 + step))
    tokens = (*prompt, *output)
    start = len(tokens) - 1 if step else 0
    blocks = tuple(range(1000, 1000 + -(-len(tokens) // 16)))
    history = (prompt, output) if params.needs_history else None
    return SequenceStep(7 + slot, slot, start, tokens[start:], blocks, True, step, False, params, history)


# Exactness of numbers


floats = st.one_of(
    st.floats(max_value=0.0, allow_nan=False),
    st.sampled_from([-math.inf, -0.0, -1e-45, -math.pi]),
)
logprobs = st.builds(
    TokenLogprobs, st.integers(0, 2**31), floats, st.dictionaries(st.integers(0, 2**31), floats, max_size=5)
)


@given(st.integers(0, 2**40), st.dictionaries(st.integers(0, 2**40), st.tuples(st.integers(-1, 2**31), logprobs)))
def test_outputs_round_trip_exactly(step_id: int, sampled: dict[int, tuple[int, TokenLogprobs]]) -> None:
    output = StepOutput(
        step_id,
        {id: token for id, (token, _) in sampled.items()},
        {id: x for id, (_, x) in sampled.items()},
        {id: [x, x] for id, (_, x) in sampled.items()},
    )
    received = decode_output(transmit(encode_output(output)))
    assert received == output
    # repr also distinguishes -0.0 from 0.0, and the order of dictionaries.
    assert repr(received) == repr(output)


@given(
    st.builds(
        Emitted,
        st.integers(0, 2**40),
        st.none() | st.integers(0, 2**31),
        st.none() | logprobs,
        st.sampled_from([None, "stop", "length", "cancelled"]),
        st.none() | st.tuples(st.none(), logprobs),
    )
)
def test_emitted_tokens_round_trip_exactly(item: Emitted) -> None:
    received = decode_emitted(transmit(encode_emitted(item)))
    assert received == item
    assert repr(received) == repr(item)


def test_all_sampling_parameters_round_trip() -> None:
    params = SamplingParams(
        max_tokens=7, min_tokens=2, temperature=0.1 + 0.2, top_k=3, top_p=1 / 3, min_p=1e-300, repetition_penalty=1.1,
        presence_penalty=-0.7, frequency_penalty=0.3, stop=("\n\u2028", '"é😀'), stop_token_ids=(3, 5), ignore_eos=True,
        seed=2**63 - 1, n=3, logprobs=0, logit_bias={3: 0.1 + 0.2}, prompt_logprobs=0,
        keep_special_tokens=("[TOOL_CALLS]",),
    )  # fmt: skip
    structured = [
        StructuredOutputs(json={"const": "é"}),
        StructuredOutputs(json_object=True),
        StructuredOutputs(regex="a|b"),
        StructuredOutputs(choice=("x", "y")),
        StructuredOutputs(grammar="start: /a/"),
        StructuredOutputs(tags=(OutputTag("<a>", {"type": "null"}, "</a>"), OutputTag("b", True)), separator="\n"),
    ]
    plain = asdict(SamplingParams())
    # ignore_eos excludes structured_outputs
    unset = [name for name, value in asdict(params).items() if value == plain[name] and name != "structured_outputs"]
    assert not unset, f"give {unset} another value than the default above"
    for sent in (params, *(SamplingParams(structured_outputs=one) for one in structured)):
        received = decode_params(transmit(encode_params(sent)))
        assert received == sent
        assert hash(received) == hash(sent)
    assert decode_params(transmit(encode_params(SamplingParams()))) == SamplingParams()
