"""Which tokens a row may draw, as the lowest score it keeps.

Scores are (logit - row maximum) / temperature, so the best token's is 0. A threshold keeps every token tied at the
boundary, whatever their order. Probability masses are summed as integers, which is exact: a row's threshold is the same
in any batch.

Shapes: N rows, V vocabulary, K ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor

# exp(score) <= 1 in units of 2^-40: 2^18 tokens add up to 2^58 at most, inside int64.
_UNITS = 2.0**40
# How many of a row's best tokens are ranked before falling back to a sort, where looking is free (on a CPU).
_PROBE = 1024


def top_k_threshold(scores: Tensor, top_k: Tensor, top_p: Tensor | None, reach: int) -> Tensor:
    """The lowest score within the `top_k` best and, of those, within the best `top_p` of their mass.

    scores [N, V], top_k int64 [N] from 1 to `reach`, top_p float64 [N] (infinite keeps all) -> [N, 1]
    """
    ranked = scores.topk(reach).values
    if top_p is None:
        return ranked.gather(1, top_k[:, None] - 1)
    inside = torch.arange(reach, device=scores.device) < top_k[:, None]
    mass = _mass(ranked) * inside
    return _cut(ranked, _before(mass, mass.sum(1), top_p) & inside)


def top_p_threshold(scores: Tensor, top_p: Tensor) -> Tensor:
    """The lowest score of the fewest best tokens whose mass reaches `top_p`: [N, V], float64 [N] -> [N, 1]."""
    vocab = scores.shape[1]
    total = _mass(scores).sum(1)
    if scores.device.type == "cpu" and vocab > 4 * _PROBE:  # partial ranking is several times cheaper than a sort
        ranked = scores.topk(_PROBE).values
        mass = _mass(ranked)
        if bool((mass.sum(1) >= top_p * total).all()):
            return _cut(ranked, _before(mass, total, top_p))
    ranked = scores.sort(descending=True).values
    return _cut(ranked, _before(_mass(ranked), total, top_p))


def _mass(scores: Tensor) -> Tensor:
    return scores.exp().mul_(_UNITS).to(torch.int64)


def _before(mass: Tensor, total: Tensor, top_p: Tensor) -> Tensor:
    """Whether the tokens ranked before a token hold less than `top_p` of the mass: [N, K], [N], [N] -> bool [N, K]."""
    return mass.cumsum(1) - mass < (top_p * total)[:, None]


def _cut(ranked: Tensor, kept: Tensor) -> Tensor:
    """The score at the last kept rank; the first is always kept."""
    return ranked.gather(1, kept.sum(1, keepdim=True) - 1)
