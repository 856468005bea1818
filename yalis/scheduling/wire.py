"""Plans, outputs and tokens as JSON values, for ranks that do not plan themselves.

Both ends remember, by slot, what the last step of a sequence said, so a decode step costs a few numbers however long
the sequence is.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from yalis.scheduling.plan import Emitted, SequenceStep, StepOutput, StepPlan
from yalis.types import SamplingParams, TokenLogprobs

History = tuple[tuple[int, ...], tuple[int, ...]]


@dataclass
class _Known:
    """What the other end knows of the sequence in a slot."""

    request_id: int
    params: SamplingParams
    blocks: tuple[int, ...] = ()
    history: History | None = None


class PlanEncoder:
    """Every plan goes through one encoder and, at the other end, through one decoder, in order."""

    def __init__(self) -> None:
        self._known: dict[int, _Known] = {}

    def encode(self, plan: StepPlan) -> Any:
        return [plan.step_id, [self._encode(step) for step in plan.sequences]]

    def _encode(self, step: SequenceStep) -> Any:
        known = self._known.get(step.request_slot)
        params = history = None
        if known is None or known.request_id != step.request_id:
            known = self._known[step.request_slot] = _Known(step.request_id, step.params)
            params = encode_params(step.params)
        kept = len(known.blocks) if step.blocks[: len(known.blocks)] == known.blocks else 0
        if step.history is not None:
            prompt, output = step.history
            history = [prompt, output] if known.history is None else [output[len(known.history[1]) :]]
        fresh = step.blocks[kept:]
        known.blocks, known.history = step.blocks, step.history
        return [
            step.request_id, step.request_slot, step.start, step.tokens, kept, fresh, int(step.samples),
            step.output_len, int(step.long_rope), params, history,
        ]  # fmt: skip


class PlanDecoder:
    def __init__(self) -> None:
        self._known: dict[int, _Known] = {}

    def decode(self, value: Any) -> StepPlan:
        number, steps = value
        return StepPlan(number, tuple(self._decode(*step) for step in steps))

    def _decode(
        self, request_id: int, request_slot: int, start: int, tokens: list[int], kept: int, fresh: list[int],
        samples: int, output_len: int, long_rope: int, params: Any, history: Any,
    ) -> SequenceStep:  # fmt: skip
        if params is not None:
            self._known[request_slot] = _Known(request_id, decode_params(params))
        known = self._known[request_slot]
        if fresh or kept < len(known.blocks):  # else the same object says that nothing changed
            known.blocks = (*known.blocks[:kept], *fresh)
        if history is None:
            known.history = None
        elif len(history) == 2:
            known.history = (tuple(history[0]), tuple(history[1]))
        elif known.history is not None:
            known.history = (known.history[0], (*known.history[1], *history[0]))
        return SequenceStep(
            request_id, request_slot, start, tuple(tokens), known.blocks, bool(samples), output_len, bool(long_rope),
            known.params, known.history,
        )  # fmt: skip


def encode_params(params: SamplingParams) -> Any:
    return dataclasses.asdict(params)


def decode_params(value: dict[str, Any]) -> SamplingParams:
    fields: dict[str, Any] = {name: tuple(x) if isinstance(x, list) else x for name, x in value.items()}
    return SamplingParams(**fields)


def encode_output(output: StepOutput) -> Any:
    logprobs = [[id, *_encode_logprobs(found)] for id, found in output.logprobs.items()]
    return [output.step_id, list(output.tokens.items()), logprobs]


def decode_output(value: Any) -> StepOutput:
    number, tokens, logprobs = value
    return StepOutput(number, dict(tokens), {id: _decode_logprobs(*x) for id, *x in logprobs})


def encode_emitted(item: Emitted) -> Any:
    logprobs = None if item.logprobs is None else _encode_logprobs(item.logprobs)
    return [item.request_id, item.token, logprobs, item.finish_reason]


def decode_emitted(value: Any) -> Emitted:
    request_id, token, logprobs, reason = value
    return Emitted(request_id, token, None if logprobs is None else _decode_logprobs(*logprobs), reason)


def _encode_logprobs(found: TokenLogprobs) -> list[Any]:
    return [found.token_id, found.logprob, list(found.top.items())]


def _decode_logprobs(token_id: int, logprob: float, top: list[list[Any]]) -> TokenLogprobs:
    return TokenLogprobs(token_id, logprob, dict(top))
