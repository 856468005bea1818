"""Encodes plans, outputs and emitted tokens as JSON values, to send them between ranks.

Encoder and decoder both keep the state of the sequence in each request slot and exchange only what changed. A decode
step is a few numbers, however long the sequence is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from yalis.scheduling.plan import Emitted, SequenceStep, StepOutput, StepPlan
from yalis.types import SamplingParams, TokenLogprobs

History = tuple[tuple[int, ...], tuple[int, ...]]


@dataclass
class _SequenceState:
    """The last transmitted state of the sequence in a request slot."""

    request_id: int
    params: SamplingParams
    blocks: tuple[int, ...] = ()
    history: History | None = None


class PlanEncoder:
    """Encodes the plans of one replica. Every decoder (one on each other rank) must receive all of them, in order."""

    def __init__(self) -> None:
        self._states: dict[int, _SequenceState] = {}

    def encode(self, plan: StepPlan) -> Any:
        return [plan.step_id, [self._encode(step) for step in plan.sequences]]

    def _encode(self, step: SequenceStep) -> Any:
        state = self._states.get(step.request_slot)
        params = history = None
        if state is None or state.request_id != step.request_id:
            state = self._states[step.request_slot] = _SequenceState(step.request_id, step.params)
            params = encode_params(step.params)
        unchanged = len(state.blocks) if step.blocks[: len(state.blocks)] == state.blocks else 0
        if step.history is not None:
            prompt, output = step.history
            history = [prompt, output] if state.history is None else [output[len(state.history[1]) :]]
        new_blocks = step.blocks[unchanged:]
        state.blocks, state.history = step.blocks, step.history
        return [
            step.request_id, step.request_slot, step.start, step.tokens, unchanged, new_blocks, int(step.samples),
            step.output_len, int(step.long_rope), params, history, *([step.scored] if step.scored else ()),
        ]  # fmt: skip


class PlanDecoder:
    def __init__(self) -> None:
        self._states: dict[int, _SequenceState] = {}

    def decode(self, value: Any) -> StepPlan:
        step_id, steps = value
        return StepPlan(step_id, tuple(self._decode(*step) for step in steps))

    def _decode(
        self, request_id: int, request_slot: int, start: int, tokens: list[int], unchanged: int, new_blocks: list[int],
        samples: int, output_len: int, long_rope: int, params: Any, history: Any, scored: Sequence[int] = (),
    ) -> SequenceStep:  # fmt: skip
        if params is not None:
            self._states[request_slot] = _SequenceState(request_id, decode_params(params))
        state = self._states[request_slot]
        # Otherwise keep the same tuple: Packer detects by identity that it is unchanged.
        if new_blocks or unchanged < len(state.blocks):
            state.blocks = (*state.blocks[:unchanged], *new_blocks)
        if history is None:
            state.history = None
        elif len(history) == 2:
            state.history = (tuple(history[0]), tuple(history[1]))
        elif state.history is not None:
            state.history = (state.history[0], (*state.history[1], *history[0]))
        return SequenceStep(
            request_id, request_slot, start, tuple(tokens), state.blocks, bool(samples), output_len, bool(long_rope),
            state.params, state.history, tuple(scored),
        )  # fmt: skip


def encode_params(params: SamplingParams) -> Any:
    return dataclasses.asdict(params)


def decode_params(value: dict[str, Any]) -> SamplingParams:
    fields: dict[str, Any] = {name: tuple(x) if isinstance(x, list) else x for name, x in value.items()}
    return SamplingParams(**fields)


def encode_output(output: StepOutput) -> Any:
    logprobs = [[id, *_encode_logprobs(one)] for id, one in output.logprobs.items()]
    scored = [[id, [_encode_logprobs(one) for one in tokens]] for id, tokens in output.prompt_logprobs.items()]
    return [output.step_id, list(output.tokens.items()), logprobs, scored]


def decode_output(value: Any) -> StepOutput:
    step_id, tokens, logprobs, scored = value
    return StepOutput(
        step_id,
        dict(tokens),
        {id: _decode_logprobs(*x) for id, *x in logprobs},
        {id: [_decode_logprobs(*x) for x in tokens] for id, tokens in scored},
    )


def encode_emitted(item: Emitted) -> Any:
    scored = None if item.prompt_logprobs is None else [_encode_optional(one) for one in item.prompt_logprobs]
    return [item.request_id, item.token, _encode_optional(item.logprobs), item.finish_reason, scored]


def decode_emitted(value: Any) -> Emitted:
    request_id, token, logprobs, reason, scored = value
    return Emitted(
        request_id,
        token,
        _decode_optional(logprobs),
        reason,
        None if scored is None else tuple(map(_decode_optional, scored)),
    )


def _encode_optional(logprobs: TokenLogprobs | None) -> list[Any] | None:
    return None if logprobs is None else _encode_logprobs(logprobs)


def _decode_optional(value: list[Any] | None) -> TokenLogprobs | None:
    return None if value is None else _decode_logprobs(*value)


def _encode_logprobs(logprobs: TokenLogprobs) -> list[Any]:
    return [logprobs.token_id, logprobs.logprob, list(logprobs.top.items())]


def _decode_logprobs(token_id: int, logprob: float, top: list[list[Any]]) -> TokenLogprobs:
    return TokenLogprobs(token_id, logprob, dict(top))
