"""The rows of a step that are drawn: Gumbel-max over the tokens that the filters keep.

Shapes: S rows, W this rank's share of the vocabulary, P ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from yalis.sampling.batch import Draw, Filter, pick
from yalis.sampling.filters import counted_threshold, ranked_threshold, top_p_threshold
from yalis.sampling.noise import gumbel_from
from yalis.sampling.shards import Shards


class Drawing:
    def __init__(self, logits: Tensor, draw: Draw, shards: Shards) -> None:
        """logits [R, W], of all rows of the step."""
        self._logits = pick(logits, draw.rows).float()
        self._draw, self._shards, self.rows = draw, shards, draw.rows

    def offers(self) -> list[Tensor]:
        """What the ranks have to tell each other first: each row's maximum, and the candidates for a top_k."""
        offers = [self._logits.amax(1, keepdim=True)]
        if self._draw.ranked is not None:
            offers.append(self._shards.offer(pick(self._logits, self._draw.ranked.rows), self._draw.ranked.reach))
        return offers

    def noisy(self, words: Tensor, answers: list[Tensor]) -> Tensor:
        """Scores whose best is the draw, -inf where a filter drops a token: words [W], everyone's offers -> [S, W]."""
        top, *candidates = answers
        if self._shards.several:
            top = top.amax(1, keepdim=True)
        # From the best token down, so that no temperature overflows; a row without any finite logit stays free of NaN.
        top = top.clamp(min=torch.finfo(torch.float32).min)
        scores = (self._logits - top).div_(self._draw.temperature)
        noisy = gumbel_from(self._draw.keys, words).add_(scores)
        lowest = self._lowest(scores, top, candidates)
        return noisy if lowest is None else noisy.masked_fill_(scores < lowest, float("-inf"))

    def _lowest(self, scores: Tensor, top: Tensor, candidates: list[Tensor]) -> Tensor | None:
        """The lowest score each row may draw, None where all are free: [S, 1]."""
        draw, lowest = self._draw, self._draw.log_min_p
        for each in (draw.ranked, draw.counted, draw.nucleus):
            if each is None:
                continue
            threshold = self._threshold(each, scores, top, candidates)
            if each.rows is not None:
                threshold = top.new_full(top.shape, float("-inf")).index_copy_(0, each.rows, threshold)
            lowest = threshold if lowest is None else torch.maximum(lowest, threshold)
        return lowest

    def _threshold(self, each: Filter, scores: Tensor, top: Tensor, candidates: list[Tensor]) -> Tensor:
        if each is self._draw.ranked:
            ranked = candidates[0].topk(each.reach).values if self._shards.several else candidates[0]
            # Scores order as logits do, and the best of them have the same bits as among all.
            ranked = (ranked - pick(top, each.rows)).div_(pick(self._draw.temperature, each.rows))
            assert each.top_k is not None
            return ranked_threshold(ranked, each.top_k, each.top_p)
        scores = pick(scores, each.rows)
        if each.top_k is not None:
            return counted_threshold(scores, each.top_k, each.top_p, each.reach, self._shards)
        assert each.top_p is not None
        return top_p_threshold(scores, each.top_p, self._shards)
