"""Reductions over a vocabulary that is split over ranks. No message grows with the vocabulary size.

Shards are contiguous and in order of rank, so among equal values the first rank has the lowest token id. With a single
rank nothing is sent.

Shapes: N rows, W tokens in this rank's vocabulary shard, P ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from yalis.comm.base import Communicator

_BINS = 256  # of a histogram: four rounds of 8 bits determine the 31 bits of a score's magnitude


class VocabShards:
    """One rank's vocabulary shard, and the group of ranks that hold the others."""

    def __init__(self, vocab_shard: range, vocab_size: int, group: Communicator) -> None:
        self._shard, self._group = vocab_shard, group
        self.sharded = group.size > 1
        self._vocab_size = vocab_size
        self._max_shard = -(-vocab_size // group.size)

    def gather(self, *tensors: Tensor) -> list[Tensor]:
        """All-gather the columns of all tensors in one message: each [N, w] -> [N, P * w].

        The message is float64, which represents float32 values and token ids exactly.
        """
        if not self.sharded or not tensors:
            return list(tensors)
        message = torch.cat([tensor.double().flatten() for tensor in tensors])
        gathered = self._group.all_gather(message, 0).view(self._group.size, -1)
        columns = gathered.split([tensor.numel() for tensor in tensors], 1)
        return [
            column.reshape(-1, *tensor.shape).transpose(0, 1).flatten(1).to(tensor.dtype)
            for column, tensor in zip(columns, tensors, strict=True)
        ]

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum x over the ranks, in place; integers and floats. Call it only if `sharded`."""
        return self._group.all_reduce(x)

    def local_top_k(self, logits: Tensor, k: int) -> Tensor:
        """Return this shard's k best logits, padded to the same width on every rank: [N, W] -> [N, k or less]."""
        best = logits.topk(min(k, logits.shape[1])).values
        return _pad(best, min(k, self._max_shard), -math.inf)

    def local_top_k_tokens(self, logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """`local_top_k` with token ids; among equal logits the lowest ids are taken."""
        width = min(k, self._max_shard)
        values, indices = _top_k_lowest_ids(logits, min(k, logits.shape[1]))
        # Padding gets an id above every token's, so it sorts last.
        return _pad(values, width, -math.inf), _pad(indices + self._shard.start, width, self._vocab_size)

    def merge_top_k(self, values: Tensor, ids: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Return the k best of all ranks' gathered candidates; among equal values the lowest id comes first."""
        ids, order = ids.sort(dim=1)
        values, order = values.gather(1, order).sort(dim=1, descending=True, stable=True)
        k = min(k, self._vocab_size)
        return values[:, :k], ids.gather(1, order[:, :k])

    def select_best(
        self, values: Tensor, indices: Tensor, *extra: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None, list[Tensor]]:
        """Return the best of all shards' best tokens: the first among equals, and NaN before any number.

        `values` and `indices` in the shard: [N, 1] each. Returns the best value, its token id, the rank that has it
        (None: this one), and the gathered `extra` tensors, which travel in the same message.
        """
        if not self.sharded:
            return values, indices, None, list(extra)
        values, tokens, *gathered = self.gather(values, indices + self._shard.start, *extra)
        winner = values.argmax(1, keepdim=True)
        return values.gather(1, winner), tokens.gather(1, winner), winner, gathered

    @property
    def first_token(self) -> int:
        """The first token id of this shard."""
        return self._shard.start

    def find_threshold(
        self, scores: Tensor, weights: Tensor | None, goal: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Return the highest score s at which the weight of all scores >= s reaches the goal, and the weight above s.

        `scores`: any float32 [N, W] <= 0. `weights`: int64 [N, W]; None counts tokens. See search_threshold().
        """
        # No score is positive, so a higher score has a smaller magnitude: its bits without the sign.
        keys = scores.view(torch.int32) & 0x7FFFFFFF

        def histogram(prefix: Tensor, shift: int) -> Tensor:
            bins = keys >> shift
            matches = (bins >> 8) == prefix
            weight = matches.to(torch.int64) if weights is None else weights * matches
            counts = torch.zeros((len(keys), _BINS), dtype=torch.int64, device=keys.device)
            return counts.scatter_add_(1, (bins & 0xFF).to(torch.int64), weight)

        return self.search_threshold(
            histogram, torch.zeros((len(keys), 1), dtype=torch.int64, device=keys.device), goal
        )

    def search_threshold(
        self, histogram: Callable[[Tensor, int], Tensor], zeros: Tensor, goal: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Return the highest score s at which the weight of all scores >= s reaches the goal, and the weight above s.

        A radix search by four all-reduces of 256 integers per row, exact however the vocabulary is split. Call it only
        if `sharded`. `histogram`: (bits of a score's magnitude determined so far, int64 [N, 1]; shift) to the weight of
        this shard's scores that have them, by the next 8 bits, int64 [N, 256]. `zeros`: int64 [N, 1]. `goal`: total
        weight [N, 1] -> [N, 1].
        """
        prefix, above, target = zeros, zeros, None
        for shift in (24, 16, 8, 0):
            counts = histogram(prefix, shift)
            self._group.all_reduce(counts)
            if target is None:
                target = goal(counts.sum(1, keepdim=True))
            reached = above + counts.cumsum(1)
            # In a row of NaN no bin may reach the target.
            bin_index = (reached < target).sum(1, keepdim=True).clamp_(max=_BINS - 1)
            above = reached.gather(1, bin_index) - counts.gather(1, bin_index)
            prefix = prefix * _BINS + bin_index
        return -prefix.to(torch.int32).view(torch.float32), above


def row_max(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Return the maximum of each row and its index, the first among equals: [N, W] -> [N, 1], [N, 1]."""
    if scores.device.type != "cpu":
        indices = scores.argmax(1, keepdim=True)
    else:  # numpy's argmax is vectorised and torch's is not: 6 times faster on a CPU
        indices = torch.from_numpy(scores.float().numpy().argmax(1, keepdims=True))
    return scores.gather(1, indices), indices


def _top_k_lowest_ids(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the values and indices of the k highest of each row, unordered; of equal values the lowest indices."""
    if logits.device.type == "cpu":  # checking that no equal value was left out is cheaper than a unique order
        values, indices = logits.topk(k)
        if np.count_nonzero(logits.numpy() >= values[:, -1:].numpy()) == values.numel():
            return values, indices
    # A unique integer key: the order of the float value in the high bits, the negated index in the low bits.
    bits = (logits + 0.0).view(torch.int32)  # adding 0 turns -0 into 0
    bits ^= (bits >> 31).bitwise_and_(0x7FFFFFFF)
    keys = bits.to(torch.int64).mul_(1 << 32).sub_(torch.arange(logits.shape[1], device=logits.device))
    indices = keys.topk(k).indices
    return logits.gather(1, indices), indices


def _pad(x: Tensor, width: int, value: float) -> Tensor:
    """Pad to `width` columns: shards differ in size, and messages must not."""
    return x if x.shape[1] == width else torch.nn.functional.pad(x, (0, width - x.shape[1]), value=value)
