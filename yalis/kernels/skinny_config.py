"""Launch configurations of skinny GEMMs (kernels/skinny.py): tuned ones, defaults, and candidates for a search."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import product
from typing import NamedTuple

from torch import Tensor

from yalis.kernels.gpu_limits import GpuLimits
from yalis.kernels.integer_math import cdiv, next_power_of_2

MAX_ROWS = 64  # largest M loaded by address
TMA_ROWS = 128  # the M loaded by TMA; for a smaller M, tiles that extend past the last row of x load slowly


class GemmConfig(NamedTuple):
    """Launch configuration of a skinny GEMM."""

    n_per_program: int  # outputs of a program; BLOCK_N is the next power of two. A power of two for M of 1 and 128
    block_k: int
    num_warps: int
    num_stages: int = 1  # of software pipelining; M > 1 only
    split_k: int = 1  # M > 1 only


class GemmShape(NamedTuple):
    """Problem size that a configuration is chosen by."""

    m: int  # 1, or padded to 16, 32, 64 or 128
    n: int  # outputs; if gated, half of the rows of the weights
    k: int
    itemsize: int
    gated: bool = False

    @classmethod
    def of(cls, x: Tensor, weight: Tensor, gated: bool = False) -> GemmShape:
        m = 1 if x.shape[0] == 1 else max(16, next_power_of_2(x.shape[0]))
        n = weight.shape[0] // 2 if gated else weight.shape[0]
        return cls(m, n, weight.shape[1], x.itemsize, gated)


#: Configurations for Llama-3.1-8B in bfloat16, found by search on an H200 in whole decode steps or chains of layers.
#: benchmarks/tune_kernels.py searches single GEMMs.
TUNED: dict[GemmShape, GemmConfig] = {
    GemmShape(1, 6144, 4096, 2): GemmConfig(4, 2048, 8),
    GemmShape(1, 4096, 4096, 2): GemmConfig(1, 2048, 4),
    GemmShape(1, 14336, 4096, 2, True): GemmConfig(1, 2048, 8),
    GemmShape(1, 4096, 14336, 2): GemmConfig(4, 1024, 4),
    GemmShape(1, 128256, 4096, 2): GemmConfig(1, 2048, 4),
    GemmShape(16, 6144, 4096, 2): GemmConfig(48, 256, 4, 4, 1),
    GemmShape(16, 4096, 4096, 2): GemmConfig(64, 256, 4, 3, 2),
    GemmShape(16, 14336, 4096, 2, True): GemmConfig(112, 128, 4, 3, 1),
    GemmShape(16, 4096, 14336, 2): GemmConfig(64, 256, 4, 3, 2),
    GemmShape(16, 128256, 4096, 2): GemmConfig(128, 128, 4, 3, 1),
    GemmShape(32, 6144, 4096, 2): GemmConfig(48, 128, 4, 5, 1),
    GemmShape(32, 4096, 4096, 2): GemmConfig(64, 256, 4, 3, 2),
    GemmShape(32, 14336, 4096, 2, True): GemmConfig(56, 128, 4, 5, 1),
    GemmShape(32, 4096, 14336, 2): GemmConfig(64, 128, 4, 5, 2),
    GemmShape(32, 128256, 4096, 2): GemmConfig(64, 128, 4, 3, 1),
    GemmShape(64, 6144, 4096, 2): GemmConfig(64, 128, 4, 5, 1),
    GemmShape(64, 4096, 4096, 2): GemmConfig(64, 128, 4, 5, 2),
    GemmShape(64, 14336, 4096, 2, True): GemmConfig(128, 64, 8, 4, 1),
    GemmShape(64, 4096, 14336, 2): GemmConfig(64, 128, 4, 5, 2),
    GemmShape(64, 128256, 4096, 2): GemmConfig(128, 64, 8, 4, 1),
    GemmShape(128, 6144, 4096, 2): GemmConfig(64, 128, 4, 4),
    GemmShape(128, 4096, 4096, 2): GemmConfig(64, 64, 4, 8, 2),
    GemmShape(128, 14336, 4096, 2, True): GemmConfig(64, 64, 4, 3),
    GemmShape(128, 4096, 14336, 2): GemmConfig(64, 128, 4, 4, 2),
    GemmShape(128, 128256, 4096, 2): GemmConfig(128, 64, 4, 3),
}


@cache
def choose_config(shape: GemmShape, limits: GpuLimits) -> GemmConfig:
    """Return the tuned configuration if there is one and it fits the GPU, else a default one that fits."""
    tuned = TUNED.get(shape)
    if tuned is None or not fits(shape, tuned, limits):
        return _default_config(shape, limits)
    block_n = next_power_of_2(tuned.n_per_program)
    if tuned.n_per_program == block_n:
        return tuned
    # The search balanced N over the SMs of its GPU; balance it over those of this one.
    return tuned._replace(n_per_program=balanced_n(shape.n, block_n, tuned.split_k, limits))


def shared_bytes(shape: GemmShape, config: GemmConfig) -> int:
    """Return an upper bound on the bytes of shared memory of the pipelined loads; 0 for M = 1, which uses none."""
    if shape.m == 1:
        return 0
    weight_rows = next_power_of_2(config.n_per_program) * (2 if shape.gated else 1)
    return config.num_stages * config.block_k * (weight_rows + shape.m) * shape.itemsize


def fits(shape: GemmShape, config: GemmConfig, limits: GpuLimits) -> bool:
    return shared_bytes(shape, config) <= limits.max_shared_memory


def _default_config(shape: GemmShape, limits: GpuLimits) -> GemmConfig:
    """Return a configuration close to those that won for Llama-3.1-8B on an H200."""
    vector = 16 // shape.itemsize  # elements that a thread loads at once
    if shape.m == 1:
        block_k = max(64, min(256 * vector, next_power_of_2(shape.k)))
        while shape.k % block_k and block_k > 64 * vector:
            block_k //= 2
        return GemmConfig(max(1, 64 * vector // block_k), block_k, max(1, block_k // (32 * vector)))
    if shape.itemsize == 4:  # exact float32 products do not use the tensor cores
        block_n, block_k, num_stages = 32, 64, 2
    else:
        block_n, block_k = 64, 64 if shape.gated and shape.m > 32 else 128
        num_stages = 5 if shape.m <= MAX_ROWS else 4
    tiles = cdiv(shape.n, block_n)
    # Up to one program per SM, with at least four BLOCK_K steps in each split.
    split_k = max(1, min(limits.num_sms // tiles, cdiv(shape.k, block_k) // 4, 8))
    n_per_program = block_n
    if shape.itemsize == 2 and shape.m <= MAX_ROWS:
        balanced = balanced_n(shape.n, block_n, split_k, limits)
        # With M up to 16 a larger BLOCK_K pays off. Without it, narrow tiles lost more than balanced SMs gained.
        wide_k = GemmConfig(balanced, 256, 4, 4, split_k)
        if shape.m > 16 or (shape.gated and 4 * balanced >= 3 * block_n):
            n_per_program = balanced
        elif not shape.gated and shape.k >= 1024 * split_k and fits(shape, wide_k, limits):
            return wide_k
    config = GemmConfig(n_per_program, block_k, 4, num_stages, split_k)
    while not fits(shape, config, limits) and config.num_stages > 2:
        config = config._replace(num_stages=config.num_stages - 1)
    return config


def balanced_n(n: int, block_n: int, split_k: int, limits: GpuLimits) -> int:
    """Return the outputs per program that spread `n` evenly over the SMs, in as many waves as full tiles need.

    More than half of block_n, or block_n itself. A multiple of 8, because every value compiles another kernel.
    """
    waves = cdiv(cdiv(n, block_n) * split_k, limits.num_sms)
    balanced = 8 * cdiv(n, 8 * (waves * limits.num_sms // split_k))
    return balanced if block_n // 2 < balanced < block_n else block_n


def candidates(shape: GemmShape, limits: GpuLimits) -> Iterator[GemmConfig]:
    """Yield the configurations that a search tries."""
    vector = 16 // shape.itemsize
    if shape.m == 1:
        for block_n, num_warps, loads in product((1, 2, 4), (2, 4, 8, 16), (1, 2)):
            block_k = 32 * vector * num_warps * loads  # `loads` 16-byte loads per thread from each row
            if shape.k % block_k == 0 and block_n * loads <= 4:
                yield GemmConfig(block_n, block_k, num_warps)
        return
    use_tma = shape.m > MAX_ROWS  # which loads whole tiles
    stages = (3, 4, 8) if use_tma else (3, 4, 5)
    max_bytes = min(210_000, limits.max_shared_memory - 2048)  # the compiler adds some
    for block_n, block_k, num_stages, split_k in product((16, 32, 64, 128), (64, 128, 256), stages, (1, 2, 4, 8)):
        for n_per_program in {block_n} if use_tma else {block_n, balanced_n(shape.n, block_n, split_k, limits)}:
            programs = cdiv(shape.n, n_per_program) * split_k
            if programs < 90 or (split_k > 1 and programs > 1200):
                continue
            for num_warps in {16: (2,), 128: (4, 8)}.get(block_n, (4,)):
                config = GemmConfig(n_per_program, block_k, num_warps, num_stages, split_k)
                if 24_000 <= shared_bytes(shape, config) <= max_bytes:
                    yield config
