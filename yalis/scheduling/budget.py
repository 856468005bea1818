"""The token budget of a step, and how pipeline parallelism divides the work into micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

#: A prompt is not split into smaller micro-batches than this: the overhead would exceed the gain from busier stages.
MIN_MICRO_BATCH_TOKENS = 64


@dataclass
class StepBudget:
    """The tokens and samples that can still be added to a step."""

    tokens: int
    samples: int  # sequences that may sample a token; a prompt chunk that ends before its prompt does needs none
    min_step_tokens: int = 0  # the step may exceed `tokens` up to this many, so that prompt chunks are not tiny

    @property
    def exhausted(self) -> bool:
        return self.tokens <= 0

    @property
    def max_chunk(self) -> int:
        """The most tokens that the next sequence can have in this step."""
        return max(self.tokens, self.min_step_tokens)

    def allows(self, remaining: int) -> bool:
        """Return whether a sequence with `remaining` uncomputed tokens can be added.

        If all of them fit, it samples a token, so a sample must be left. A chunk needs none.
        """
        return self.samples > 0 or remaining > self.max_chunk

    def consume(self, tokens: int, samples: bool) -> None:
        self.tokens -= tokens
        self.min_step_tokens -= tokens
        self.samples -= samples


def micro_batch_budget(
    micro_batches: int, max_tokens: int, ready: Sequence[int], in_flight: Sequence[tuple[int, int]]
) -> StepBudget:
    """Return the budget of the next of `micro_batches` equal steps that go through a pipeline at the same time.

    `ready`: the remaining tokens of each sequence that can run. `in_flight`: (tokens, sequences that sample) of every
    step in flight. When requests start and finish, steps become unequal; they are equal again one round later.
    """
    sequences = len(ready) + sum(sampling for _, sampling in in_flight)
    tokens = sum(ready) + sum(count for count, _ in in_flight)
    samples, remainder = divmod(sequences, micro_batches)
    if sum(sampling > samples for _, sampling in in_flight) < remainder:
        samples += 1
    worthwhile = max(1, min(micro_batches, max(sequences, tokens // MIN_MICRO_BATCH_TOKENS)))
    budget = max(1, min(-(-tokens // worthwhile), max_tokens))
    return StepBudget(budget, max(1, samples), min(MIN_MICRO_BATCH_TOKENS, max_tokens))
