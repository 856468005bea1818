"""The scheduler's input and output: it issues a StepPlan, receives a StepOutput, and returns Emitted tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from yalis.types import FinishReason, SamplingParams, TokenLogprobs

#: In SequenceStep.tokens: the request's last sampled token, whose id is only on the device so far.
LAST_SAMPLED = -1
#: In StepOutput.tokens: no token can continue this answer, because a limit of its grammar was exceeded.
NO_TOKEN_ALLOWED = -2


class SequenceStep(NamedTuple):
    """One request's tokens in a step, in prefill and decode alike: compute `tokens`, from position `start` on.

    A step creates one for each sequence, and a tuple is created several times faster than a frozen dataclass.
    """

    request_id: int
    request_slot: int  # index below max_num_seqs, unique among running requests: a row of per-request device buffers
    start: int
    tokens: tuple[int, ...]  # token ids, or LAST_SAMPLED
    blocks: tuple[int, ...]  # block table: KV blocks of positions 0 .. start + count - 1
    samples: bool  # whether a token is sampled from the last position's logits
    output_len: int  # tokens this request has sampled before this step
    long_rope: bool  # whether the sequence is longer than RopeSpec.switch_at
    params: SamplingParams
    history: tuple[tuple[int, ...], tuple[int, ...]] | None  # (prompt, output) ids; None unless params.needs_history
    #: prompt tokens to return log-probabilities of: the i-th is the one after the i-th token of this step
    scored: tuple[int, ...] = ()

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True)
class StepPlan:
    """The batch of one forward step. Step ids count from 0; plans run and are committed in that order."""

    step_id: int
    sequences: tuple[SequenceStep, ...]

    @property
    def num_tokens(self) -> int:
        return sum(step.num_tokens for step in self.sequences)


@dataclass(frozen=True)
class StepOutput:
    """The tokens a step sampled, or NO_TOKEN_ALLOWED, by request id: one for each sequence with `samples` set.

    `prompt_logprobs` has an entry for each token of `SequenceStep.scored`, in the same order.
    """

    step_id: int
    tokens: Mapping[int, int]
    logprobs: Mapping[int, TokenLogprobs] = field(default_factory=dict)
    prompt_logprobs: Mapping[int, Sequence[TokenLogprobs]] = field(default_factory=dict)


class Emitted(NamedTuple):
    """A new output token of a request, or its end. A request that is cancelled, that cannot continue or that generates
    nothing ends without one.

    `prompt_logprobs`, of all prompt tokens, come with the first token, or with the end if there is none.
    """

    request_id: int
    token: int | None
    logprobs: TokenLogprobs | None
    finish_reason: FinishReason | None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
