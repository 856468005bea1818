"""Random sampling: Gumbel-max over the tokens that top_k, top_p and min_p keep.

Shapes: S rows, W tokens in this rank's vocabulary shard, P ranks.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from yalis.sampling.batch import Filter, RandomRows, select_rows
from yalis.sampling.filters import large_top_k_threshold, top_k_threshold, top_p_threshold
from yalis.sampling.noise import gumbel_from, gumbel_of_pairs
from yalis.sampling.vocab_shards import VocabShards, row_max

_FEW = 0.25  # of all tokens: gathering more of them takes longer than computing noise for all
_CACHED = 2**18  # elements of float32 that stay in the cache of a core


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

    def select(self, token_hashes: Tensor, gathered: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Return the highest score with noise of each row in this shard and its index: [S, 1], [S, 1]."""
        return row_max(self.perturbed_scores(token_hashes, gathered))

    def perturbed_scores(self, token_hashes: Tensor, gathered: list[Tensor]) -> Tensor:
        """Return scores plus Gumbel noise [S, W], -inf where a filter drops the token. The row maximum is the sample.

        `token_hashes`: [W]. `gathered`: the first message of all ranks.
        """
        top, *candidates = gathered
        top = self._global_top(top)
        scores = (self._logits - top).div_(self._random.temperature)
        threshold = self._threshold(scores, top, candidates)
        dropped = None if threshold is None else scores < threshold
        if scores.device.type == "cpu":
            return _perturb_on_cpu(scores, dropped, self._random.keys, token_hashes)
        perturbed = gumbel_from(self._random.keys, token_hashes).add_(scores)
        return perturbed if dropped is None else perturbed.masked_fill_(dropped, float("-inf"))

    def _global_top(self, top: Tensor) -> Tensor:
        """Return the maximum of each row [S, 1], to which scores are relative, so that no temperature overflows.

        The clamp avoids NaN in a row of -inf. `top`: the gathered maxima of all shards.
        """
        if self._shards.sharded:
            top = top.amax(1, keepdim=True)
        return top.clamp(min=torch.finfo(torch.float32).min)

    def _threshold(self, scores: Tensor | None, top: Tensor, candidates: list[Tensor]) -> Tensor | None:
        """Return the lowest score that each row keeps [S, 1], or None if no row has a filter.

        `scores`: [S, W]; None only in FusedShardSampling, which does not compute them all.
        """
        random, lowest = self._random, self._random.log_min_p
        for each in (random.top_k, random.large_top_k, random.top_p):
            if each is None:
                continue
            threshold = self._filter_threshold(each, scores, top, candidates)
            if each.rows is not None:
                threshold = top.new_full(top.shape, float("-inf")).index_copy_(0, each.rows, threshold)
            lowest = threshold if lowest is None else torch.maximum(lowest, threshold)
        return lowest

    def _filter_threshold(self, each: Filter, scores: Tensor | None, top: Tensor, candidates: list[Tensor]) -> Tensor:
        if each is self._random.top_k:
            best = candidates[0].topk(each.max_top_k).values if self._shards.sharded else candidates[0]
            # The same arithmetic as for all scores, so the bits are the same too.
            best = (best - select_rows(top, each.rows)).div_(select_rows(self._random.temperature, each.rows))
            assert each.top_k is not None
            return top_k_threshold(best, each.top_k, each.top_p)
        assert scores is not None
        scores = select_rows(scores, each.rows)
        if each.top_k is not None:
            return large_top_k_threshold(scores, each.top_k, each.top_p, each.max_top_k, self._shards)
        assert each.top_p is not None
        return top_p_threshold(scores, each.top_p, self._shards)


class FusedShardSampling(RandomSampling):
    """The same with the kernels of a GPU, which read the logits of a shard and write nothing of their size."""

    def __init__(self, logits: Tensor, random: RandomRows, shards: VocabShards) -> None:
        self._logits = select_rows(logits, random.rows)  # the kernels convert
        self._random, self._shards, self.rows = random, shards, random.rows

    def first_message(self) -> list[Tensor]:
        return [values.float() for values in super().first_message()]

    def select(self, token_hashes: Tensor, gathered: list[Tensor]) -> tuple[Tensor, Tensor]:
        from yalis.kernels import sampling

        top, *candidates = gathered
        top, random = self._global_top(top), self._random
        threshold = self._threshold(None, top, candidates)
        if threshold is None:
            threshold = torch.full_like(top, float("-inf"))
        first_token = self._shards.first_token
        return sampling.draw_shard(self._logits, top, random.temperature, threshold, random.keys, first_token)

    def _filter_threshold(self, each: Filter, scores: Tensor | None, top: Tensor, candidates: list[Tensor]) -> Tensor:
        from yalis.kernels import sampling

        random, top_p = self._random, each.top_p
        if each is random.top_k:
            return super()._filter_threshold(each, None, top, candidates)
        if each.top_k is not None:  # more than _MAX_CANDIDATES, which is rare
            scores = (self._logits.float() - top).div_(random.temperature)
            return super()._filter_threshold(each, scores, top, candidates)
        assert top_p is not None
        rows = torch.arange(len(top), device=top.device) if each.rows is None else each.rows
        return self._shards.search_threshold(
            lambda prefix, shift: sampling.score_histogram(self._logits, rows, top, random.temperature, prefix, shift),
            torch.zeros((len(rows), 1), dtype=torch.int64, device=top.device),
            lambda total: top_p[:, None] * total,
        )[0]


def _perturb_on_cpu(scores: Tensor, dropped: Tensor | None, keys: Tensor, token_hashes: Tensor) -> Tensor:
    """Add noise to scores [S, W] in place and set those of dropped tokens [S, W] to -inf.

    Noise takes longer than all filters, so it is computed only for the kept tokens if they are few, else for a few rows
    at a time, which stay in the cache.
    """
    vocab = scores.shape[1]
    if dropped is not None:
        kept = torch.from_numpy(np.flatnonzero(~dropped.numpy()))
        if len(kept) < _FEW * scores.numel():
            rows = kept // vocab
            noise = gumbel_of_pairs(keys[rows], token_hashes[kept - rows * vocab]).add_(scores.view(-1)[kept])
            scores.fill_(float("-inf")).view(-1).index_copy_(0, kept, noise)
            return scores
    at_once = max(1, _CACHED // vocab)
    for some_scores, some_keys in zip(scores.split(at_once), keys.split(at_once), strict=True):
        some_scores += gumbel_from(some_keys, token_hashes)
    return scores if dropped is None else scores.masked_fill_(dropped, float("-inf"))
