"""Which tokens a row may draw, as the lowest score it keeps.

Scores are (logit - row maximum) / temperature, so the best token's is 0. A threshold keeps every token tied at the
boundary, whatever their order. Probability masses are summed as integers, which is exact: a row's threshold is the same
in any batch and under any split of the vocabulary.

Shapes: N rows, W this rank's share of the vocabulary, K ranks (places in a ranking).
"""

from __future__ import annotations

import torch
from torch import Tensor

from yalis.sampling.shards import Shards

# exp(score) <= 1 in units of 2^-40: 2^18 tokens add up to 2^58 at most, inside int64.
UNITS = 2.0**40
# How many of a row's best tokens are ranked before falling back to a sort, where looking is free (on a CPU).
_PROBE = 1024


def _mass(scores: Tensor) -> Tensor:
    return scores.exp().mul_(UNITS).to(torch.int64)


def ranked_threshold(ranked: Tensor, top_k: Tensor, top_p: Tensor | None) -> Tensor:
    """The lowest score within the `top_k` best and, of those, within the best `top_p` of their mass.

    ranked: the best scores of the vocabulary in falling order [N, K], top_k int64 [N] from 1 to K, top_p float64 [N]
    (infinite keeps all) -> [N, 1]
    """
    if top_p is None:
        return ranked.gather(1, top_k[:, None] - 1)
    inside = torch.arange(ranked.shape[1], device=ranked.device) < top_k[:, None]
    mass = _mass(ranked) * inside
    return _cut(ranked, _before(mass, mass.sum(1), top_p) & inside)


def counted_threshold(scores: Tensor, top_k: Tensor, top_p: Tensor | None, reach: int, shards: Shards) -> Tensor:
    """`ranked_threshold` of [N, W] scores, for a top_k (`reach` at most) that would be too many candidates to send."""
    if not shards.several:
        return ranked_threshold(scores.topk(reach).values, top_k, top_p)
    lowest, above = shards.search(scores, None, lambda _: top_k[:, None])
    if top_p is None:
        return lowest
    mass = _mass(scores)
    better = shards.sum((mass * (scores > lowest)).sum(1, keepdim=True))
    # Of the tokens tied at the boundary, as many count as make up top_k.
    total = better + (top_k[:, None] - above) * _mass(lowest)
    cut, _ = shards.search(scores, mass, lambda _: top_p[:, None] * total)
    return torch.where(top_p[:, None].isinf(), lowest, cut)


def top_p_threshold(scores: Tensor, top_p: Tensor, shards: Shards) -> Tensor:
    """The lowest score of the fewest best tokens whose mass reaches `top_p`: [N, W], float64 [N] -> [N, 1]."""
    if shards.several:
        return shards.search(scores, _mass(scores), lambda total: top_p[:, None] * total)[0]
    vocab = scores.shape[1]
    total = _mass(scores).sum(1)
    if scores.device.type == "cpu" and vocab > 4 * _PROBE:  # partial ranking is several times cheaper than a sort
        ranked = scores.topk(_PROBE).values
        mass = _mass(ranked)
        if bool((mass.sum(1) >= top_p * total).all()):
            return _cut(ranked, _before(mass, total, top_p))
    ranked = scores.sort(descending=True).values
    return _cut(ranked, _before(_mass(ranked), total, top_p))


def _before(mass: Tensor, total: Tensor, top_p: Tensor) -> Tensor:
    """Whether the tokens ranked before a token hold less than `top_p` of the mass: [N, K], [N], [N] -> bool [N, K]."""
    return mass.cumsum(1) - mass < (top_p * total)[:, None]


def _cut(ranked: Tensor, kept: Tensor) -> Tensor:
    """The score at the last kept rank; the first is kept even in a row without any mass."""
    return ranked.gather(1, kept.sum(1, keepdim=True).sub_(1).clamp_(min=0))
