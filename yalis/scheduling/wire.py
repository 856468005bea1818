"""Encodes plans, outputs and emitted tokens as JSON values, to send them between ranks.

Encoder and decoder both keep the last step of the sequence in each request slot and exchange only what changed. A
decode step is one to three numbers, however long the sequence is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from yalis.scheduling.plan import LAST_SAMPLED, Emitted, SequenceStep, StepOutput, StepPlan
from yalis.types import SamplingParams, TokenLogprobs

History = tuple[tuple[int, ...], tuple[int, ...]]


class PlanEncoder:
    """Encodes the plans of one replica. Every decoder (one on each other rank) must receive all of them, in order.

    A sequence that decodes its next token is [request slot, token, new blocks], or its request slot alone if the token
    is on the device and the blocks are those of its last step. Any other is a list of all its fields.
    """

    def __init__(self) -> None:
        self._last: dict[int, SequenceStep] = {}  # by request slot

    def encode(self, plan: StepPlan) -> Any:
        return [plan.step_id, [self._encode(step) for step in plan.sequences]]

    def _encode(self, step: SequenceStep) -> Any:
        slot, blocks = step.request_slot, step.blocks
        last = self._last.get(slot)
        self._last[slot] = step
        if last is None or last.request_id != step.request_id:
            last = None
            unchanged = 0
        elif blocks is last.blocks:
            unchanged = len(blocks)
        else:
            unchanged = len(last.blocks) if blocks[: len(last.blocks)] == last.blocks else 0
        if (
            last is not None
            and len(step.tokens) == 1
            and step.start == last.start + len(last.tokens)
            and step.samples
            and step.output_len == last.output_len + last.samples
            and step.long_rope == last.long_rope
            and step.history is None
            and not step.scored
            and unchanged == len(last.blocks)
        ):
            token = step.tokens[0]
            return slot if token == LAST_SAMPLED and blocks is last.blocks else [slot, token, blocks[unchanged:]]
        params = history = None
        if last is None:
            params = encode_params(step.params)
        if step.history is not None:
            prompt, output = step.history
            known = last.history if last is not None else None
            history = [prompt, output] if known is None else [output[len(known[1]) :]]
        return [
            step.request_id, slot, step.start, step.tokens, unchanged, blocks[unchanged:], int(step.samples),
            step.output_len, int(step.long_rope), params, history, *([step.scored] if step.scored else ()),
        ]  # fmt: skip


class PlanDecoder:
    def __init__(self) -> None:
        self._last: dict[int, SequenceStep] = {}  # by request slot

    def decode(self, value: Any) -> StepPlan:
        step_id, steps = value
        return StepPlan(step_id, tuple(map(self._decode, steps)))

    def _decode(self, value: Any) -> SequenceStep:
        if isinstance(value, int):
            step = self._decode_next(value, LAST_SAMPLED, ())
        elif len(value) == 3:
            step = self._decode_next(*value)
        else:
            step = self._decode_fields(*value)
        self._last[step.request_slot] = step
        return step

    def _decode_next(self, request_slot: int, token: int, new_blocks: Sequence[int]) -> SequenceStep:
        last = self._last[request_slot]
        # Without new blocks keep the same tuple: Packer detects by identity that it is unchanged.
        blocks = (*last.blocks, *new_blocks) if new_blocks else last.blocks
        return SequenceStep(
            last.request_id, request_slot, last.start + len(last.tokens), (token,), blocks, True,
            last.output_len + last.samples, last.long_rope, last.params, None,
        )  # fmt: skip

    def _decode_fields(
        self, request_id: int, request_slot: int, start: int, tokens: list[int], unchanged: int, new_blocks: list[int],
        samples: int, output_len: int, long_rope: int, params: Any, history: Any, scored: Sequence[int] = (),
    ) -> SequenceStep:  # fmt: skip
        last = self._last[request_slot] if params is None else None
        blocks = last.blocks if last is not None else ()
        if new_blocks or unchanged < len(blocks):
            blocks = (*blocks[:unchanged], *new_blocks)
        known: History | None = None
        if history is not None and len(history) == 2:
            known = (tuple(history[0]), tuple(history[1]))
        elif history is not None and last is not None and last.history is not None:
            known = (last.history[0], (*last.history[1], *history[0]))
        return SequenceStep(
            request_id, request_slot, start, tuple(tokens), blocks, bool(samples), output_len, bool(long_rope),
            decode_params(params) if last is None else last.params, known, tuple(scored),
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
