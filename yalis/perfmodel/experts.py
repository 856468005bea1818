"""How many experts of a layer a step reaches, and how unevenly whole experts load the ranks that share them.

Routing is uniform: each token chooses `top_k` different experts, every set of them equally likely, independently of the
other tokens. Routers of trained models prefer some experts. A step then reaches fewer, and ranks differ more.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache
from statistics import NormalDist

_GRID = 400  # points of a numeric integration


def shares_of(experts: int, ranks: int) -> tuple[int, ...]:
    """Return the whole experts of each rank, as parallel.plan.shard deals them: the first ranks have one more."""
    base, extra = divmod(experts, ranks)
    return tuple(base + (rank < extra) for rank in range(ranks))


def distinct_experts(experts: int, top_k: float, tokens: float) -> float:
    """Return the expected number of different experts that `tokens` tokens choose."""
    return experts * (1 - (1 - top_k / experts) ** tokens)


@lru_cache(maxsize=4096)
def largest_distinct(shares: tuple[int, ...], top_k: int, tokens: int) -> float:
    """Return the expected number of different experts that a step reaches on the rank where it reaches most.

    `shares`: the experts of each rank. Given their total, the reached experts are a random subset, so that their number
    on a rank has a hypergeometric distribution.
    """
    experts = sum(shares)
    reached = distinct_experts(experts, top_k, tokens)
    low, part = math.floor(reached), reached - math.floor(reached)
    least = _largest_of_subset(shares, low)
    return least if not part else least + part * (_largest_of_subset(shares, low + 1) - least)


@lru_cache(maxsize=4096)
def largest_load(shares: tuple[int, ...], top_k: int, tokens: int) -> float:
    """Return the expected number of (token, expert) pairs on the rank with most of them.

    The number on a rank is a sum over independent tokens, taken as normal.
    """
    experts = sum(shares)
    ranks: list[tuple[int, NormalDist | None, float]] = []
    for share, count in Counter(shares).items():
        mean = tokens * top_k * share / experts
        spread = math.sqrt(tokens * _hypergeometric_variance(experts, share, top_k))
        ranks.append((count, NormalDist(mean, spread) if spread else None, mean))
    if all(dist is None for _, dist, _ in ranks):
        return max(mean for _, _, mean in ranks)
    top = max(mean + 6 * (dist.stdev if dist else 0) for _, dist, mean in ranks)
    step = top / _GRID

    def below(x: float) -> float:
        return math.prod((dist.cdf(x) if dist else float(x >= mean)) ** count for count, dist, mean in ranks)

    largest = sum(1 - below((i + 0.5) * step) for i in range(_GRID)) * step
    largest = max(_with_fixed_sum(largest, shares, tokens * top_k), largest_distinct(shares, top_k, tokens))
    return min(largest, tokens * min(top_k, max(shares)))


def _largest_of_subset(shares: Sequence[int], chosen: int) -> float:
    """Return the expected maximum over the ranks of how many of `chosen` random experts a rank has."""
    experts = sum(shares)
    counts = Counter(shares)
    cumulative = {share: _hypergeometric_cdf(experts, share, chosen) for share in counts}

    def below(number: int) -> float:
        return math.prod(cumulative[share](number) ** count for share, count in counts.items())

    largest = sum(1 - below(number) for number in range(min(chosen, max(shares))))
    return min(_with_fixed_sum(largest, shares, chosen), chosen, max(shares))


def _with_fixed_sum(largest: float, shares: Sequence[int], total: float) -> float:
    """Correct the expected maximum of independent ranks: their numbers have a fixed sum, so they differ more."""
    ranks = len(shares)
    mean = total * max(shares) / sum(shares)
    return largest if ranks == 1 else mean + (largest - mean) * math.sqrt(ranks / (ranks - 1))


def _hypergeometric_cdf(population: int, marked: int, drawn: int) -> Callable[[int], float]:
    """Return the probability that at most so many of `drawn` elements are marked, as a function."""
    total = math.comb(population, drawn)
    sums = [0]
    for number in range(min(marked, drawn) + 1):
        sums.append(sums[-1] + math.comb(marked, number) * math.comb(population - marked, drawn - number))
    return lambda number: sums[min(number, len(sums) - 2) + 1] / total


def _hypergeometric_variance(population: int, marked: int, drawn: int) -> float:
    if population == 1:
        return 0.0
    share = marked / population
    return drawn * share * (1 - share) * (population - drawn) / (population - 1)
