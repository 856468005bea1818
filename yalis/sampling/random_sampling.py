"""Random sampling: Gumbel-max over the tokens that top_k, top_p and min_p keep.

Shapes: S rows, W tokens in this rank's vocabulary shard, P ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from yalis.sampling.batch import Filter, RandomRows, select_rows
from yalis.sampling.filters import large_top_k_threshold, top_k_threshold, top_p_threshold
from yalis.sampling.noise import gumbel_from
from yalis.sampling.vocab_shards import VocabShards


class RandomSampling:
    """Samples the random rows of a step.

    A filter that keeps the best tokens of a row is a threshold, in `_threshold`. Any other filter masks the scores in
    `perturbed_scores`.
    """

    def __init__(self, logits: Tensor, random: RandomRows, shards: VocabShards) -> None:
        """`logits`: [R, W], of all rows of the step."""
        self._logits = select_rows(logits, random.rows).float()
        self._random, self._shards, self.rows = random, shards, random.rows

    def first_message(self) -> list[Tensor]:
        """Return what the ranks exchange first: the maximum of each row, and this shard's candidates for top_k."""
        message = [self._logits.amax(1, keepdim=True)]
        if (top_k := self._random.top_k) is not None:
            message.append(self._shards.local_top_k(select_rows(self._logits, top_k.rows), top_k.max_top_k))
        return message

    def perturbed_scores(self, token_hashes: Tensor, gathered: list[Tensor]) -> Tensor:
        """Return scores plus Gumbel noise [S, W], -inf where a filter drops the token. The row maximum is the sample.

        `token_hashes`: [W]. `gathered`: the first message of all ranks.
        """
        top, *candidates = gathered
        if self._shards.sharded:
            top = top.amax(1, keepdim=True)
        # Scores are relative to the maximum, so that no temperature overflows. The clamp avoids NaN in a row of -inf.
        top = top.clamp(min=torch.finfo(torch.float32).min)
        scores = (self._logits - top).div_(self._random.temperature)
        perturbed = gumbel_from(self._random.keys, token_hashes).add_(scores)
        threshold = self._threshold(scores, top, candidates)
        return perturbed if threshold is None else perturbed.masked_fill_(scores < threshold, float("-inf"))

    def _threshold(self, scores: Tensor, top: Tensor, candidates: list[Tensor]) -> Tensor | None:
        """Return the lowest score that each row keeps [S, 1], or None if no row has a filter."""
        random, lowest = self._random, self._random.log_min_p
        for each in (random.top_k, random.large_top_k, random.top_p):
            if each is None:
                continue
            threshold = self._filter_threshold(each, scores, top, candidates)
            if each.rows is not None:
                threshold = top.new_full(top.shape, float("-inf")).index_copy_(0, each.rows, threshold)
            lowest = threshold if lowest is None else torch.maximum(lowest, threshold)
        return lowest

    def _filter_threshold(self, each: Filter, scores: Tensor, top: Tensor, candidates: list[Tensor]) -> Tensor:
        if each is self._random.top_k:
            best = candidates[0].topk(each.max_top_k).values if self._shards.sharded else candidates[0]
            # The same arithmetic as for all scores, so the bits are the same too.
            best = (best - select_rows(top, each.rows)).div_(select_rows(self._random.temperature, each.rows))
            assert each.top_k is not None
            return top_k_threshold(best, each.top_k, each.top_p)
        scores = select_rows(scores, each.rows)
        if each.top_k is not None:
            return large_top_k_threshold(scores, each.top_k, each.top_p, each.max_top_k, self._shards)
        assert each.top_p is not None
        return top_p_threshold(scores, each.top_p, self._shards)
