"""The modelled cost of a layer of experts: whole experts on each row of a grid, or a slice of every expert on each.

Slices give every rank the same work for any routing. Whole experts give a rank wider matrices and fewer pairs of a
token and an expert, whose rows of the hidden size are gathered and summed, but the rank with the most pairs holds up
the others. Costs are bytes: FLOPs are converted with the ratio of both that a device reaches. Routing is taken as
uniform.
"""

from __future__ import annotations

from dataclasses import dataclass

from yalis.moe import MoESpec
from yalis.perfmodel.experts import distinct_experts, largest_distinct, largest_load, shares_of


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
    if whole:
        shares = shares_of(moe.num_experts, rows)
        width = moe.width
        read, pairs = largest_distinct(shares, moe.top_k, tokens), largest_load(shares, moe.top_k, tokens)
    else:
        width = -(-moe.width // rows)
        read, pairs = distinct_experts(moe.num_experts, moe.top_k, tokens), tokens * moe.top_k
    computed = -(-width // device.tile) * device.tile
    matrices = read * 3 * hidden * width * itemsize
    flops = pairs * 6 * hidden * computed
    # A pair's input is gathered and read, its gate and up written and read, its product written and read, its output
    # written and summed.
    rows_moved = pairs * (4 * hidden + 6 * width) * itemsize
    return max(matrices, flops / device.flops_per_byte) + rows_moved
