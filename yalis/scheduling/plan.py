"""What the scheduler says and hears: a StepPlan goes out, a StepOutput comes back, Emitted tokens result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from yalis.types import FinishReason, SamplingParams, TokenLogprobs


@dataclass(frozen=True)
class SequenceStep:
    """One request's part in a step: `count` tokens from position `start` on, whatever phase it is in."""

    request_id: int
    request_slot: int  # a small number this request alone holds while it runs: rows of per-sequence device buffers
    start: int
    tokens: tuple[int, ...]  # ids to compute; FED where the id is the one last sampled, known only on the device
    blocks: tuple[int, ...]  # KV blocks covering positions 0 .. start + count - 1
    samples: bool  # whether the last position's logits give a new token
    output_len: int  # tokens this request has sampled before this step
    long_rope: bool  # whether the sequence is past the length where a model's rotary factors switch
    params: SamplingParams
    history: tuple[tuple[int, ...], tuple[int, ...]] | None  # (prompt, output) ids, only where params.needs_history

    @property
    def count(self) -> int:
        return len(self.tokens)


#: Stands in SequenceStep.tokens for a token sampled by an earlier plan that is not committed yet.
FED = -1


@dataclass(frozen=True)
class StepPlan:
    """One forward step. Plans are numbered from 0 and run, and are committed, in that order."""

    number: int
    sequences: tuple[SequenceStep, ...]

    @property
    def num_tokens(self) -> int:
        return sum(step.count for step in self.sequences)


@dataclass(frozen=True)
class StepOutput:
    """What a step sampled, by request id: one token for each sequence whose `samples` was set."""

    number: int
    tokens: Mapping[int, int]
    logprobs: Mapping[int, TokenLogprobs] = field(default_factory=dict)


@dataclass(frozen=True)
class Emitted:
    """One token that is now sure, or the end of a request (a cancelled one ends without a token)."""

    request_id: int
    token: int | None
    logprobs: TokenLogprobs | None
    finish_reason: FinishReason | None
