"""Launches of the products of kernels/experts.py, chosen by a model of the GPU for any shape, and those of a search.

Names as there: P pairs · E experts · N outputs and K inputs of a matrix.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import product
from typing import NamedTuple

from yalis.kernels.gpu_limits import GpuLimits
from yalis.kernels.integer_math import cdiv, next_power_of_2

MAX_BLOCK_ROWS = 128  # from about this size on a GPU computes longer than it reads
_SERVED_ROWS = 32  # blocks up to this size are bound by reading the weights
_PROGRAMS_PER_SM = 4  # enough loads in flight, and a short last wave


class ExpertShape(NamedTuple):
    """Problem size that a launch is chosen by."""

    pairs: int
    experts: int
    outputs: int  # if gated, half of the rows of a matrix
    inputs: int
    itemsize: int
    gated: bool = False


class GemvLaunch(NamedTuple):
    """Launch of the product of one row with each of its experts."""

    block_n: int
    block_k: int
    num_warps: int


class GemmLaunch(NamedTuple):
    """Launch of the grouped product. The rows of a block follow from the shape (block_rows)."""

    block_n: int  # outputs of a program; if gated, it reads as many rows of gate as of up
    block_k: int
    num_warps: int
    num_stages: int
    group: int = 1  # blocks that share the weights loaded into L2


def uses_gemv(pairs: int, experts: int) -> bool:
    """Return whether each pair is multiplied alone: at most one pair in 16 repeats an expert, if routed evenly."""
    return pairs < 4 or 8 * pairs <= experts


def block_rows(pairs: int, experts: int) -> int:
    """Return the rows of a block: a power of two of at least 16 that holds most experts' pairs, if routed evenly."""
    return max(16, min(MAX_BLOCK_ROWS, next_power_of_2(cdiv(3 * pairs, 2 * experts))))


def count_blocks(pairs: int, experts: int, block_m: int) -> int:
    """Return the blocks that hold any routing, including the group of pairs that are left out."""
    return min(pairs, experts + 1) + pairs // block_m


def choose_gemv(shape: ExpertShape) -> GemvLaunch:
    """Return a launch like the default of kernels/skinny_config.py: 16-byte loads, four in flight for each thread."""
    vector = 16 // shape.itemsize
    block_k = max(64, min(256 * vector, next_power_of_2(shape.inputs)))
    while shape.inputs % block_k and block_k > 64 * vector:
        block_k //= 2
    return GemvLaunch(max(1, 64 * vector // block_k), block_k, max(1, block_k // (32 * vector)))


@cache
def choose_gemm(shape: ExpertShape, limits: GpuLimits) -> GemmLaunch:
    """Return a launch that fills the GPU and fits its shared memory: wide tiles where products are bound by compute."""
    block_m = block_rows(shape.pairs, shape.experts)
    if shape.itemsize == 4:  # exact float32 products do not use the tensor cores
        return _fit(shape, GemmLaunch(32, 32, 4, 2, 8 if block_m > _SERVED_ROWS else 1), limits.max_shared_memory)
    if block_m > _SERVED_ROWS:
        wide = GemmLaunch(128, 64, 8 if block_m == MAX_BLOCK_ROWS else 4, 3, 8)
        return _fit(shape, wide, limits.max_shared_memory)
    used = min(shape.pairs, shape.experts) * 2 // 3 + 1  # experts of an even routing, about
    block_n = 64  # what the tensor cores of a Hopper GPU multiply at once
    while block_n > 16 and used * cdiv(shape.outputs, block_n) < _PROGRAMS_PER_SM * limits.num_sms:
        block_n //= 2
    narrow = GemmLaunch(block_n, 128, 4, 4)
    return _fit(shape, narrow, limits.max_shared_memory // 2)  # two programs on an SM hide each other's start and end


def shared_bytes(shape: ExpertShape, launch: GemmLaunch) -> int:
    """Return the bytes of shared memory of the pipelined loads."""
    rows = launch.block_n * (2 if shape.gated else 1) + block_rows(shape.pairs, shape.experts)
    return launch.num_stages * launch.block_k * rows * shape.itemsize


def _fit(shape: ExpertShape, launch: GemmLaunch, limit: int) -> GemmLaunch:
    """Reduce stages, then inputs and outputs of a step, until the loads fit."""
    while shared_bytes(shape, launch) > limit:
        if launch.num_stages > 2:
            launch = launch._replace(num_stages=launch.num_stages - 1)
        elif launch.block_k > 32:
            launch = launch._replace(block_k=launch.block_k // 2)
        elif launch.block_n > 16:
            launch = launch._replace(block_n=launch.block_n // 2)
        else:
            break
    return launch


def candidates(shape: ExpertShape, limits: GpuLimits) -> Iterator[GemmLaunch]:
    """Yield the launches that a search tries."""
    wide = block_rows(shape.pairs, shape.experts) > _SERVED_ROWS
    outputs = (64, 128) if wide else (16, 32, 64, 128)
    groups = (4, 8) if wide else (1,)
    for block_n, block_k, warps, stages, group in product(outputs, (64, 128, 256), (4, 8), (2, 3, 4, 5), groups):
        launch = GemmLaunch(block_n, block_k, warps, stages, group)
        if shared_bytes(shape, launch) <= limits.max_shared_memory - 2048 and (warps == 4 or block_n >= 64):
            yield launch
