"""The noise is a pure function of (seed, position, token id), uniform, and uncorrelated between neighbours."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from yalis.sampling.noise import derive_seed, gumbel, uniform

M32, M64 = (1 << 32) - 1, (1 << 64) - 1


def reference(seed: int, position: int, token: int) -> float:
    """The same function in plain Python integers."""

    def mix64(x: int) -> int:
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & M64
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & M64
        return x ^ (x >> 31)

    golden = 0x9E3779B97F4A7C15
    key = mix64(mix64((seed + golden) & M64) ^ ((position * golden) & M64))
    x = token & M32
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & M32
    x = ((x ^ (x >> 15)) * 0x846CA68B) & M32
    x ^= x >> 16
    bits = x ^ (key & M32)
    bits = ((bits ^ (bits >> 16)) * 0x7FEB352D + (key >> 32)) & M32
    bits = ((bits ^ (bits >> 15)) * 0x846CA68B) & M32
    signed = bits - (1 << 32) if bits >> 31 else bits
    return ((signed >> 9) + 2**22 + 0.5) * 2.0**-23


def rows(seeds: list[int], positions: list[int], tokens: torch.Tensor) -> torch.Tensor:
    return uniform(torch.tensor(seeds), torch.tensor(positions), tokens)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**63 - 1), st.integers(0, 2**20), st.integers(0, 2**20))
def test_torch_equals_the_python_reference(seed: int, position: int, token: int) -> None:
    tokens = torch.arange(token, token + 37)  # long enough for vector and scalar code
    expected = [reference(seed, position, t) for t in tokens.tolist()]
    assert rows([seed], [position], tokens)[0].tolist() == expected


def test_a_slice_of_the_vocabulary_gets_that_slice_of_the_noise() -> None:
    whole = rows([3, 4, 5], [10, 11, 12], torch.arange(1009))
    for low, high in ((0, 1), (1, 500), (499, 1009)):
        assert torch.equal(rows([3, 4, 5], [10, 11, 12], torch.arange(low, high)), whole[:, low:high])
    assert torch.equal(rows([4], [11], torch.arange(1009))[0], whole[1])


def test_gumbel_is_the_logarithm_of_the_uniform_and_finite() -> None:
    seed, position, tokens = torch.arange(50), torch.arange(50), torch.arange(20011)
    even = uniform(seed, position, tokens)
    noise = gumbel(seed, position, tokens)
    assert even.dtype == noise.dtype == torch.float32
    assert even.min() > 0
    assert even.max() < 1
    assert noise.isfinite().all()
    torch.testing.assert_close(noise.double(), -(-even.double().log()).log(), rtol=1e-4, atol=1e-5)
    assert noise.mean().item() == pytest.approx(0.57722, abs=0.01)
    assert noise.std().item() == pytest.approx(math.pi / math.sqrt(6), abs=0.01)


def is_uniform(counts: torch.Tensor) -> bool:
    """A chi-square test against equal counts, at five standard deviations."""
    expected = counts.sum().item() / counts.numel()
    chi2 = ((counts.double() - expected) ** 2 / expected).sum().item()
    free = counts.numel() - 1
    return abs(chi2 - free) < 5 * math.sqrt(2 * free)


COUNT = 1 << 16
AXES = {
    "tokens": lambda: rows([7], [9], torch.arange(COUNT)).flatten(),
    "seeds": lambda: rows(list(range(COUNT)), [9] * COUNT, torch.tensor([5])).flatten(),
    "positions": lambda: rows([7] * COUNT, list(range(COUNT)), torch.tensor([5])).flatten(),
    "large seeds": lambda: rows([s << 40 for s in range(COUNT)], [0] * COUNT, torch.tensor([5])).flatten(),
    "seed and position together": lambda: rows(list(range(COUNT)), list(range(COUNT)), torch.tensor([0])).flatten(),
}


@pytest.mark.parametrize("axis", AXES)
def test_uniform_along(axis: str) -> None:
    values = AXES[axis]()
    assert is_uniform(torch.bincount((values * 256).long(), minlength=256))
    assert is_uniform(torch.bincount((values * 2**20).long() % 256, minlength=256))  # finer bits too


@pytest.mark.parametrize("step", [1, 2, 16, 256])
@pytest.mark.parametrize("axis", AXES)
def test_neighbours_are_independent_along(axis: str, step: int) -> None:
    values = AXES[axis]()
    left, right = (values[:-step] * 16).long(), (values[step:] * 16).long()
    assert is_uniform(torch.bincount(left * 16 + right, minlength=256))


def test_rows_of_neighbouring_seeds_and_positions_do_not_correlate() -> None:
    tokens = torch.arange(4096)
    sets = [(s, p) for s in range(16) for p in range(16)]
    noise = rows([s for s, _ in sets], [p for _, p in sets], tokens)
    corr = torch.corrcoef(noise.double()) - torch.eye(len(sets))
    assert corr.abs().max().item() < 6 / math.sqrt(len(tokens))
    assert len({tuple(row[:4].tolist()) for row in noise}) == len(sets)


def test_derived_seeds_are_distinct_and_the_first_is_unchanged() -> None:
    assert derive_seed(123, 0) == 123
    seeds = [derive_seed(seed, i) for seed in (0, 1, 2, 2**63 - 1) for i in range(100)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)
