"""Every field of SamplingParams is honoured when steps are replayed: by the recorded step itself or by the sampler."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton is first imported

import pytest
import torch

from tests.tiny_chat import save_tiny_chat
from tests.unit.test_engine_executor import open_llm
from yalis import LLM, SamplingParams, StructuredOutputs
from yalis.types import RECORDED_PICK_RULES, RequestOutput, TokenLogprobs

NAMES = [field.name for field in fields(SamplingParams)]
MAX_TOKENS = 8
STOP, EOS = 2, 5  # the greedy output tokens that the cases stop at, and that end every answer without ignore_eos
BIAS = {7: 100.0}
WORDS = StructuredOutputs(regex="([a-z]{2,3} )+")
DRAW = {"temperature": 0.9, "seed": 3}

#: For each field: parameters that use it, and whether recorded steps pick (at least some of) the tokens themselves.
#: STOP stands for the id of that greedy token, or for its text.
CASES: dict[str, list[tuple[dict[str, Any], bool]]] = {
    "max_tokens": [({"max_tokens": 2}, True)],
    "min_tokens": [
        ({"min_tokens": MAX_TOKENS, "stop_token_ids": STOP}, False),
        ({"min_tokens": MAX_TOKENS - 3, "stop_token_ids": STOP}, True),  # the last three tokens
    ],
    "temperature": [(DRAW, True), ({**DRAW, "n": 3}, True), ({**DRAW, "logprobs": 1}, False)],
    "top_k": [({"top_k": 2}, True), ({"top_k": 9, **DRAW}, True)],
    "top_p": [({"top_p": 0.5}, True), ({"top_p": 0.5, **DRAW}, True), ({"top_p": 0.7, "top_k": 9, **DRAW}, True)],
    "min_p": [({"min_p": 0.5}, True), ({"min_p": 0.01, **DRAW}, True)],
    "repetition_penalty": [({"repetition_penalty": 1.5}, False)],
    "presence_penalty": [({"presence_penalty": 1.5}, False)],
    "frequency_penalty": [({"frequency_penalty": 1.5}, False)],
    "logit_bias": [({"logit_bias": BIAS}, False), ({"logit_bias": BIAS, **DRAW}, False)],
    "structured_outputs": [
        ({"structured_outputs": WORDS}, False),
        ({"structured_outputs": WORDS, "min_tokens": 4, "repetition_penalty": 1.3, "logit_bias": {66: -3.0}}, False),
        ({"structured_outputs": WORDS, "top_k": 9, "logprobs": 1, "n": 2, **DRAW}, False),
    ],
    "stop": [({"stop": STOP}, True)],
    "stop_token_ids": [({"stop_token_ids": STOP}, True)],
    "keep_special_tokens": [({"keep_special_tokens": ("<end>",)}, True)],
    "ignore_eos": [({"ignore_eos": True}, True)],
    "seed": [({"seed": 7}, True), ({"seed": 7, "temperature": 0.9}, True)],
    "n": [({"n": 2}, True)],
    "prompt_logprobs": [({"prompt_logprobs": 2}, True)],
    "logprobs": [({"logprobs": 2}, False), ({"logprobs": 0}, False)],
}


@dataclass(frozen=True)
class Engines:
    replaying: LLM
    eager: LLM
    prompt: list[int]
    greedy: list[int]  # the greedy output, without an end

    def make_params(self, given: dict[str, Any]) -> SamplingParams:
        values = {"max_tokens": MAX_TOKENS, **given}
        if "stop_token_ids" in given:
            values["stop_token_ids"] = [self.greedy[STOP]]
        if "stop" in given:
            assert self.eager.tokenizer is not None
            values["stop"] = [self.eager.tokenizer.decode([self.greedy[STOP]])]
        return SamplingParams(**values)


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    """An engine that replays its steps and one that runs eagerly, with an EOS token that the model generates."""
    path = save_tiny_chat(tmp_path_factory.mktemp("chat"))
    with (
        pytest.MonkeyPatch.context() as patches,
        open_llm(path, patches) as replaying,
        LLM(str(path), device="cpu", attention="sdpa", eager=True) as eager,
    ):
        endless = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True)
        for first in range(200):
            prompt = [first, 5, 9]
            greedy = eager.generate(prompt, endless)[0].token_ids
            if len(set(greedy)) == len(greedy) and greedy[STOP] < 94:  # the text of this one is an ASCII letter
                break
        else:
            pytest.fail("no prompt has a greedy output without repetitions")
        for llm in (replaying, eager):
            engine: Any = llm._engine
            engine.eos = engine.runner.eos = frozenset([greedy[EOS]])
        yield Engines(replaying, eager, prompt, greedy)


def test_every_field_has_a_rule_and_a_case() -> None:
    advice = (
        "Decide whether the CUDA graphs that sample honour {}: add a rule to RECORDED_PICK_RULES in yalis/types.py "
        "(`_always` if kernels/sampling.py has a column for it or the host applies it, else `_only_at(default)`) and a "
        "case to CASES in this file."
    )
    for known in (RECORDED_PICK_RULES, CASES):
        missing = [name for name in NAMES if name not in known]
        assert not missing, advice.format(", ".join(missing))
        assert set(known) == set(NAMES), "remove the entries of fields that no longer exist"


@pytest.mark.parametrize("name", NAMES)
def test_defaults_are_picked_by_recorded_steps(name: str) -> None:
    assert RECORDED_PICK_RULES[name](getattr(SamplingParams(), name)) == 0


@pytest.mark.parametrize("name", NAMES)
def test_replayed_steps_honour_the_field(engines: Engines, name: str) -> None:
    engine: Any = engines.replaying._engine
    runner = engine.runner
    for given, picked in CASES[name]:
        params = engines.make_params(given)
        assert getattr(params, name) != getattr(SamplingParams(), name), "the case does not use the field"
        replays, picks = runner.executor.replays, runner.recorded_picks
        with torch.inference_mode():
            (found,) = engines.replaying.generate(engines.prompt, params)
        (expected,) = engines.eager.generate(engines.prompt, params)
        assert_same(found, expected)
        assert runner.executor.replays > replays
        assert (runner.recorded_picks > picks) == picked, given


def test_the_cases_reach_what_they_test(engines: Engines) -> None:
    """The answers stop where the cases expect it, and banned tokens and sampling change them."""

    def run(**given: Any) -> list[int]:
        return engines.eager.generate(engines.prompt, engines.make_params(given))[0].token_ids

    greedy = engines.greedy
    assert run() == greedy[: EOS + 1]
    assert run(ignore_eos=True) == greedy
    assert run(stop=STOP) == run(stop_token_ids=STOP) == greedy[: STOP + 1]
    assert len(run(min_tokens=MAX_TOKENS, stop_token_ids=STOP)) == MAX_TOKENS
    assert run(**DRAW) != greedy[: EOS + 1]
    assert run(logit_bias=BIAS) == [7] * MAX_TOKENS
    tokenizer = engines.eager.tokenizer
    assert tokenizer is not None
    assert re.fullmatch("([a-z]{2,3} )*[a-z]{0,3}", tokenizer.decode(run(structured_outputs=WORDS)))


def assert_same(found: RequestOutput, expected: RequestOutput) -> None:
    assert_same_logprobs(found.prompt_logprobs, expected.prompt_logprobs)
    for one, other in zip(found.completions, expected.completions, strict=True):
        assert one.token_ids == other.token_ids
        assert (one.text, one.finish_reason) == (other.text, other.finish_reason)
        assert_same_logprobs(one.logprobs, other.logprobs)


def assert_same_logprobs(
    found: Sequence[TokenLogprobs | None] | None, expected: Sequence[TokenLogprobs | None] | None
) -> None:
    assert (found is None) == (expected is None)
    for ours, theirs in zip(found or [], expected or [], strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None and theirs is not None:
            assert ours.token_id == theirs.token_id
            assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)
            assert ours.top == pytest.approx(theirs.top, abs=1e-4)
