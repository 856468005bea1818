"""Times of the experts of a layer on a GPU, and what these times assume.

No kernel of a mixture of experts is in the efficiency tables yet: the parameters here are assumptions, with bounds that
the intervals of predictions contain. A layer routes its tokens (scores, choice of experts, grouping) and computes two
grouped products, which read the matrices of the experts that the step reaches.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from yalis.kernels.integer_math import cdiv
from yalis.perfmodel.experts import distinct_experts, largest_distinct, largest_load, shares_of
from yalis.perfmodel.floors import ModelDims
from yalis.planner.kernel_times import KernelTimes, join
from yalis.planner.quantity import Quantity

#: Rows of the smallest and largest tile of a grouped product.
_MIN_TILE, _MAX_TILE = 16, 128
#: A narrower slice of an expert computes as long as one of this width.
_MIN_WIDTH = 64


def _assumed(value: float, low: float, high: float, why: str) -> Quantity:
    return Quantity(value, "assumed", why, low, high)


Assumptions = Mapping[str, Quantity]

ASSUMPTIONS: Assumptions = {
    "experts_reached": _assumed(
        1.0, 0.6, 1.0, "different experts that a step reaches, relative to uniform routing; trained routers prefer some"
    ),
    "expert_imbalance": _assumed(
        1.0, 1.0, 1.5, "work of the rank with most of it, relative to uniform routing; with whole experts on ranks only"
    ),
    "expert_read_eff": _assumed(
        0.85, 0.6, 0.95, "share of the read rate of a grouped product; matmuls of 2 to 64 rows reach 0.91"
    ),
    "expert_matmul_eff": _assumed(
        0.7, 0.45, 0.95, "share of the matmul rate of a grouped product over whole tiles; dense matmuls reach 0.98"
    ),
    "expert_s": _assumed(3e-6, 2e-6, 8e-6, "fixed time of a grouped product; a matmul of 2 to 64 rows takes 1.7 us"),
    "route_s": _assumed(6e-6, 3e-6, 3e-5, "fixed time of routing in a layer: two to four small kernels of 1.5 us"),
}


@dataclass(frozen=True)
class ExpertLoad:
    """What a step asks of the experts of a rank in one layer, of the rank with most work."""

    pairs: float  # of a token and one of its experts
    reached: float  # different experts


def expert_load(dims: ModelDims, ranks: int, tokens: int, assumptions: Assumptions = ASSUMPTIONS) -> ExpertLoad:
    """Return the load under uniform routing, changed by the two assumptions about routing.

    If experts are sliced, all ranks have the same load. If each of `ranks` ranks has whole experts, it is the expected
    maximum over them in each layer: the others wait for that rank in the all-reduce.
    """
    relative = assumptions["experts_reached"].value
    if dims.experts == dims.routed_experts:
        reached = relative * distinct_experts(dims.experts, dims.top_k, tokens)
        return ExpertLoad(tokens * dims.top_k, max(reached, dims.top_k))
    shares = shares_of(dims.routed_experts, ranks)
    top_k = round(dims.top_k * dims.routed_experts / dims.experts)
    uneven = assumptions["expert_imbalance"].value
    pairs = min(uneven * largest_load(shares, top_k, tokens), tokens * min(top_k, max(shares)))
    reached = min(relative * uneven * largest_distinct(shares, top_k, tokens), max(shares))
    return ExpertLoad(pairs, max(reached, min(1.0, pairs)))


def grouped_product(
    kernels: KernelTimes, load: ExpertLoad, n: int, k: int, gated: bool, assumptions: Assumptions
) -> float:
    """x[pairs, k] with the matrix [n, k] of an expert each; n is the rows of gate and up together if gated.

    Each expert's rows fill tiles of a power of two rows. A tile that is half empty computes as long as a full one.
    """
    per_expert = load.pairs / load.reached
    tile = _MIN_TILE
    while tile < min(per_expert, _MAX_TILE):
        tile *= 2
    padded = load.reached * max(tile, per_expert + tile / 2)
    out = n // 2 if gated else n
    weights = load.reached * n * k
    bytes_moved = (weights / assumptions["expert_read_eff"].value + load.pairs * (k + out)) * kernels.itemsize
    columns, depth = (cdiv(size, _MIN_WIDTH) * _MIN_WIDTH for size in (n, k))
    compute = 2.0 * padded * columns * depth / (kernels.matmul * assumptions["expert_matmul_eff"].value)
    return assumptions["expert_s"].value + join(bytes_moved / kernels.read, compute)
