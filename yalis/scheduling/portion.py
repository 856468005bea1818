"""How much of the work one step takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

#: Tokens of a pipeline's step below which cutting a prompt further costs more than it keeps stages busy.
SMALLEST_PORTION = 64


@dataclass
class Portion:
    """What a step has room for while it is filled."""

    tokens: int
    seats: int  # sequences that get a new token; a part of a prompt that does not reach its end needs none
    smallest: int = 0  # tokens up to which a prompt is not cut

    @property
    def full(self) -> bool:
        return self.tokens <= 0

    @property
    def room(self) -> int:
        """Tokens that one sequence may take."""
        return max(self.tokens, self.smallest)

    def admits(self, left: int) -> bool:
        """Whether a sequence with `left` tokens to compute may move: reaching its end takes a free seat."""
        return left > self.room or self.seats > 0

    def take(self, count: int, samples: bool) -> None:
        self.tokens -= count
        self.smallest -= count
        self.seats -= samples


def even_portion(parts: int, most: int, ready: Sequence[int], flying: Sequence[tuple[int, int]]) -> Portion:
    """One of `parts` like steps of at most `most` tokens, which are on their way through a pipeline at a time.

    `ready`: the tokens left to each sequence that can move. `flying`: the tokens, and the sequences that get a new one,
    of every step on its way. Steps that became unlike, as sequences came and went, are alike again after a round.
    """
    sequences = len(ready) + sum(seated for _, seated in flying)
    tokens = sum(ready) + sum(count for count, _ in flying)
    seats, larger = divmod(sequences, parts)
    if sum(seated > seats for _, seated in flying) < larger:
        seats += 1
    worthwhile = max(1, min(parts, max(sequences, tokens // SMALLEST_PORTION)))
    share = max(1, min(-(-tokens // worthwhile), most))
    return Portion(share, max(1, seats), min(SMALLEST_PORTION, most))
