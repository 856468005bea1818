"""Expected numbers of experts under uniform routing, against draws."""

from __future__ import annotations

import random

import pytest

from yalis.parallel.plan import shard
from yalis.perfmodel.experts import distinct_experts, largest_distinct, largest_load, shares_of


def draw(shares: tuple[int, ...], top_k: int, tokens: int, trials: int = 400) -> tuple[float, float, float]:
    """Return the means of: different experts, the most on a rank, and the most (token, expert) pairs on a rank."""
    rng = random.Random(1)
    owner = [rank for rank, share in enumerate(shares) for _ in range(share)]
    sums = [0, 0, 0]
    for _ in range(trials):
        pairs = [expert for _ in range(tokens) for expert in rng.sample(range(len(owner)), top_k)]
        reached, loads = [0] * len(shares), [0] * len(shares)
        for expert in set(pairs):
            reached[owner[expert]] += 1
        for expert in pairs:
            loads[owner[expert]] += 1
        sums = [total + one for total, one in zip(sums, (sum(reached), max(reached), max(loads)), strict=True)]
    return sums[0] / trials, sums[1] / trials, sums[2] / trials


@pytest.mark.parametrize(
    ("experts", "ranks", "top_k"), [(128, 2, 8), (128, 8, 8), (128, 64, 8), (10, 4, 2), (60, 7, 4)]
)
@pytest.mark.parametrize("tokens", [1, 4, 16])
def test_expected_numbers_are_those_of_draws(experts: int, ranks: int, top_k: int, tokens: int) -> None:
    shares = shares_of(experts, ranks)
    assert shares == tuple(len(shard(experts, ranks, rank)) for rank in range(ranks))
    reached, most, load = draw(shares, top_k, tokens)
    assert distinct_experts(experts, top_k, tokens) == pytest.approx(reached, rel=0.02)
    assert largest_distinct(shares, top_k, tokens) == pytest.approx(most, rel=0.06)
    # The normal distribution is too low where a rank has few pairs; there reading takes longer than computing.
    assert largest_load(shares, top_k, tokens) == pytest.approx(load, rel=0.06 if load > 6 else 0.25)


def test_limits() -> None:
    assert largest_distinct((128,), 8, 16) == pytest.approx(distinct_experts(128, 8, 16))  # one rank has them all
    assert largest_load((128,), 8, 16) == 128
    assert largest_distinct((2, 2, 2), 6, 1) == 2  # every token chooses all experts
    assert largest_load((2, 2, 2), 6, 5) == 10
    assert largest_distinct((1,) * 8, 2, 1000) == pytest.approx(1)
    assert largest_load((16,) * 8, 8, 100_000) == pytest.approx(100_000, rel=0.01)  # many tokens are even
