"""top_k and top_p filters, computed as the lowest score that a row keeps.

Scores are (logit - row maximum) / temperature, so the best token has score 0. All tokens tied at the threshold are
kept. Probability masses are summed as integers, which is exact: the threshold of a row does not depend on the batch or
on how the vocabulary is split.

Shapes: N rows, W tokens in this rank's vocabulary shard, K best scores of a row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from yalis.kernels import native
from yalis.sampling.vocab_shards import VocabShards

# exp(score) <= 1 in fixed point: 2^18 tokens of 2^40 each sum to at most 2^58, which fits int64.
FIXED_POINT_ONE = 2.0**40


def _mass(scores: Tensor) -> Tensor:
    """Return unnormalised probabilities in fixed point, int64."""
    return scores.exp().mul_(FIXED_POINT_ONE).to(torch.int64)


def top_k_threshold(best: Tensor, top_k: Tensor, top_p: Tensor | None) -> Tensor:
    """Return the lowest score [N, 1] among the `top_k` best and, of those, among the best `top_p` of their mass.

    `best`: the best scores of the whole vocabulary, descending [N, K]. `top_k`: int64 [N], 1 to K. `top_p`: float64
    [N], infinity where a row has none.
    """
    if top_p is None:
        return best.gather(1, top_k[:, None] - 1)
    in_top_k = torch.arange(best.shape[1], device=best.device) < top_k[:, None]
    mass = _mass(best) * in_top_k
    return _last_kept(best, _within_top_p(mass, mass.sum(1), top_p) & in_top_k)


def large_top_k_threshold(
    scores: Tensor, top_k: Tensor, top_p: Tensor | None, max_top_k: int, shards: VocabShards
) -> Tensor:
    """`top_k_threshold` of scores [N, W], for a top_k with too many candidates for the ranks to exchange."""
    if not shards.sharded:
        return top_k_threshold(scores.topk(max_top_k).values, top_k, top_p)
    lowest, above = shards.find_threshold(scores, None, lambda _: top_k[:, None])
    if top_p is None:
        return lowest
    mass = _mass(scores)
    mass_above = shards.all_reduce((mass * (scores > lowest)).sum(1, keepdim=True))
    # Of the tokens tied at the threshold, only as many count as complete top_k.
    total = mass_above + (top_k[:, None] - above) * _mass(lowest)
    by_top_p, _ = shards.find_threshold(scores, mass, lambda _: top_p[:, None] * total)
    return torch.where(top_p[:, None].isinf(), lowest, by_top_p)


def top_p_threshold(scores: Tensor, top_p: Tensor, shards: VocabShards) -> Tensor:
    """Return the lowest score of the smallest set of best tokens whose mass reaches `top_p`.

    [N, W], float64 [N] -> [N, 1]
    """
    if shards.sharded:
        return shards.find_threshold(scores, _mass(scores), lambda total: top_p[:, None] * total)[0]
    if scores.device.type == "cpu" and (library := native.load()) is not None:
        return _native_top_p_threshold(library, scores, top_p)
    best, total = scores.sort(descending=True).values, _mass(scores).sum(1)
    return _last_kept(best, _within_top_p(_mass(best), total, top_p))


def _native_top_p_threshold(library: native.Library, scores: Tensor, top_p: Tensor) -> Tensor:
    """The same by a radix search, 20 times faster than a sort."""
    scores = scores.contiguous()
    probabilities, threshold = scores.exp(), scores.new_empty(len(scores), 1)
    library.top_p_thresholds(
        threshold.data_ptr(), scores.data_ptr(), probabilities.data_ptr(), top_p.data_ptr(), *scores.shape,
        torch.get_num_threads(),
    )  # fmt: skip
    return threshold


def _within_top_p(mass: Tensor, total: Tensor, top_p: Tensor) -> Tensor:
    """Whether the better tokens of a row hold less than `top_p` of the mass: [N, K], [N], [N] -> bool [N, K]."""
    return mass.cumsum(1) - mass < (top_p * total)[:, None]


def _last_kept(best: Tensor, kept: Tensor) -> Tensor:
    """Return the lowest kept score of each row. The first is kept even in a row without mass."""
    return best.gather(1, kept.sum(1, keepdim=True).sub_(1).clamp_(min=0))
