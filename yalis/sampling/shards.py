"""What the ranks that each hold a share of the vocabulary find together: no message grows with the vocabulary.

Shares are contiguous and in order of rank, so the first rank among equals has the lowest token ids. A rank that holds
the whole vocabulary sends nothing.

Shapes: N rows, W this rank's share of the vocabulary, P ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from yalis.comm.base import Communicator

_BINS = 256  # of a histogram: four rounds of 8 bits find one of the 2^31 magnitudes of a score


class Shards:
    """One rank's share, and the group that it forms the vocabulary with."""

    def __init__(self, part: range, vocab_size: int, everyone: Communicator) -> None:
        self.part, self._everyone = part, everyone
        self.several = everyone.size > 1
        self._vocab_size = vocab_size
        self._longest = -(-vocab_size // everyone.size)

    def gather(self, *parts: Tensor) -> list[Tensor]:
        """Every rank's columns side by side, of all parts in one message: each [N, w] -> [N, P * w].

        float64 carries float32 values and token ids exactly.
        """
        if not self.several or not parts:
            return list(parts)
        mine = torch.cat([part.double().flatten() for part in parts])
        found = self._everyone.all_gather(mine, 0).view(self._everyone.size, -1)
        columns = found.split([part.numel() for part in parts], 1)
        return [
            column.reshape(-1, *part.shape).transpose(0, 1).flatten(1).to(part.dtype)
            for column, part in zip(columns, parts, strict=True)
        ]

    def sum(self, x: Tensor) -> Tensor:
        return self._everyone.all_reduce(x)

    def offer(self, logits: Tensor, count: int) -> Tensor:
        """This rank's candidates for the `count` best logits: [N, W] -> [N, count or less]."""
        best = logits.topk(min(count, logits.shape[1])).values
        return _widen(best, min(count, self._longest), -math.inf)

    def offer_tokens(self, logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """`offer` with the token ids, the lowest among equals."""
        width = min(count, self._longest)
        values, places = _best_few(logits, min(count, logits.shape[1]))
        # What fills up a shorter share comes after every token.
        return _widen(values, width, -math.inf), _widen(places + self.part.start, width, self._vocab_size)

    def merge(self, values: Tensor, ids: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """The `count` best of the tokens that everyone offered, the lowest id first among equals."""
        ids, order = ids.sort(dim=1)
        values, order = values.gather(1, order).sort(dim=1, descending=True, stable=True)
        count = min(count, self._vocab_size)
        return values[:, :count], ids.gather(1, order[:, :count])

    def agree(
        self, values: Tensor, places: Tensor, *more: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None, list[Tensor]]:
        """The best of what each rank found in its share, the first among equals, and NaN before any number.

        values and places in the share [N, 1] -> the best value, its token id, the rank that found it (None: this one),
        and everyone's `more`
        """
        if not self.several:
            return values, places, None, list(more)
        values, tokens, *more_found = self.gather(values, places + self.part.start, *more)
        winner = values.argmax(1, keepdim=True)
        return values.gather(1, winner), tokens.gather(1, winner), winner, more_found

    def search(self, scores: Tensor, weights: Tensor | None, goal: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """The highest score s at which the weight of all scores >= s reaches the goal, and the weight of those above s.

        Four messages of 256 integers a row; integer sums do not depend on how the vocabulary is split.
        scores float32 [N, W] <= 0, weights int64 [N, W] (None counts tokens), goal(total [N, 1]) -> [N, 1]
        """
        # Of scores that are never positive, a higher one has a smaller magnitude: its bits without the sign.
        keys = scores.view(torch.int32) & 0x7FFFFFFF
        found = torch.zeros((len(keys), 1), dtype=torch.int64, device=keys.device)
        above = torch.zeros_like(found)
        wanted = None
        for shift in (24, 16, 8, 0):
            bins = keys >> shift
            here = (bins >> 8) == found
            weight = here.to(torch.int64) if weights is None else weights * here
            histogram = above.new_zeros(len(keys), _BINS).scatter_add_(1, (bins & 0xFF).to(torch.int64), weight)
            self._everyone.all_reduce(histogram)
            if wanted is None:
                wanted = goal(histogram.sum(1, keepdim=True))
            reached = above + histogram.cumsum(1)
            # A row of NaN may reach nothing.
            chosen = (reached < wanted).sum(1, keepdim=True).clamp_(max=_BINS - 1)
            above = reached.gather(1, chosen) - histogram.gather(1, chosen)
            found = found * _BINS + chosen
        return -found.to(torch.int32).view(torch.float32), above


def best(scores: Tensor) -> tuple[Tensor, Tensor]:
    """The highest score of each row and its place, the first among equals: [N, W] -> [N, 1], [N, 1]."""
    if scores.device.type != "cpu":
        places = scores.argmax(1, keepdim=True)
    else:  # numpy's argmax uses vector instructions and torch's does not: 6 times faster on a CPU
        places = torch.from_numpy(scores.float().numpy().argmax(1, keepdims=True))
    return scores.gather(1, places), places


def _best_few(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` highest of each row, at the lowest places among equals, in any order: values and places."""
    if logits.device.type == "cpu":  # looking whether equals were left out is cheaper than a unique order
        values, places = logits.topk(count)
        if np.count_nonzero(logits.numpy() >= values[:, -1:].numpy()) == values.numel():
            return values, places
    # Sign and magnitude become an order of integers; below it the place, so that no two are equal.
    bits = (logits + 0.0).view(torch.int32)  # of -0 and 0 makes equals
    bits ^= (bits >> 31).bitwise_and_(0x7FFFFFFF)
    order = bits.to(torch.int64).mul_(1 << 32).sub_(torch.arange(logits.shape[1], device=logits.device))
    places = order.topk(count).indices
    return logits.gather(1, places), places


def _widen(x: Tensor, width: int, value: float) -> Tensor:
    """A share may be shorter than the longest; messages are equally long."""
    return x if x.shape[1] == width else torch.nn.functional.pad(x, (0, width - x.shape[1]), value=value)
