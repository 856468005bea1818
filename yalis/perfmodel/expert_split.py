"""The modelled cost of a layer of experts: whole experts on each row of a grid, or a slice of every expert on each.

Slices give every rank the same work for any routing. Whole experts give a rank wider matrices and fewer pairs of a
token and an expert, whose rows of the hidden size are gathered and summed, but the rank with the most pairs holds up
the others. Costs are bytes: FLOPs are converted with the ratio of both that a device reaches. Routing is taken as
uniform.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

from yalis.moe import MoESpec


@dataclass(frozen=True)
class DeviceCosts:
    """What the cost of a product depends on."""

    flops_per_byte: float  # FLOPs that take as long as reading a byte
    tile: int  # a narrower slice of an expert takes as long as one of this width


GPU_COSTS = DeviceCosts(150, 64)
CPU_COSTS = DeviceCosts(15, 16)


def cost_per_token(
    moe: MoESpec, hidden: int, rows: int, whole: bool, itemsize: int, steps: tuple[int, ...], device: DeviceCosts
) -> float:
    """Return the bytes per token of a layer on its slowest rank, summed over steps of these numbers of tokens.

    `whole`: each of the rows has whole experts.
    """
    return sum(_step_cost(moe, hidden, rows, whole, itemsize, tokens, device) / tokens for tokens in steps)


def _step_cost(
    moe: MoESpec, hidden: int, rows: int, whole: bool, itemsize: int, tokens: int, device: DeviceCosts
) -> float:
    chosen = moe.top_k / moe.num_experts
    touched = 1 - (1 - chosen) ** tokens  # share of the experts that some token chose
    if whole:
        held = -(-moe.num_experts // rows)  # of the row with the most
        width = moe.width
        read = min(held, _largest(held * touched, held * touched * (1 - touched), rows))
        share = held / moe.num_experts
        pairs = min(tokens * moe.top_k, _largest(tokens * moe.top_k * share, _variance(moe, share, tokens), rows))
    else:
        width = -(-moe.width // rows)
        read, pairs = moe.num_experts * touched, tokens * moe.top_k
    computed = -(-width // device.tile) * device.tile
    matrices = read * 3 * hidden * width * itemsize
    flops = pairs * 6 * hidden * computed
    # A pair's input is gathered and read, its gate and up written and read, its product written and read, its output
    # written and summed.
    rows_moved = pairs * (4 * hidden + 6 * width) * itemsize
    return max(matrices, flops / device.flops_per_byte) + rows_moved


def _variance(moe: MoESpec, share: float, tokens: int) -> float:
    """Return the variance of the pairs of a row: each token draws distinct experts, of which `share` are the row's."""
    if moe.num_experts == 1:
        return 0.0
    drawn = (moe.num_experts - moe.top_k) / (moe.num_experts - 1)
    return tokens * moe.top_k * share * (1 - share) * drawn


def _largest(mean: float, variance: float, count: int) -> float:
    """Return the expected largest of `count` normal values (Blom's approximation)."""
    if count == 1:
        return mean
    return mean + math.sqrt(variance) * NormalDist().inv_cdf((count - 0.375) / (count + 0.25))
