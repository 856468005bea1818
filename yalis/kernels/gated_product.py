"""The gate and up GEMM of an MLP fused with the gate, for many rows. kernels/reference.py has a plain version.

A program accumulates a tile of gate and the same tile of up, and applies the gate to the accumulators. The output of
the two GEMMs, the largest tensor of a prefill, is never written. The kernel is persistent: one program for each SM
loops over tiles and loads the next tile while it stores the previous one. Tiles are loaded and stored with TMA
descriptors. Accumulators are float32, and are rounded where separate operations round.

Names: R rows of x · N outputs · K inputs · BM, BN, BK rows, outputs and inputs of a tile.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
# (kernel arguments are Triton descriptors and scalars, which have no Python types)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from yalis.kernels.fused import gate
from yalis.kernels.gpu_limits import GpuLimits, gpu_limits
from yalis.kernels.integer_math import cdiv
from yalis.kernels.tma import make_descriptor, tma_compatible

_BM, _BN, _BK, _STAGES, _WARPS = 128, 128, 64, 3, 8  # found by search on an H200 for the matrix of Llama-3.1-8B
_SHARED = 181 << 10  # bytes of shared memory that these use
_GROUP = 8  # row tiles that share the weights loaded into L2


@triton.jit(do_not_specialize=["R"])
def _gated_product(
    y_tiles, x_tiles, w_tiles, bias_ptr, R, N, K, PROGRAMS: tl.constexpr, GROUP: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, ACTIVATION: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = y_tiles.dtype
    row_tiles = tl.cdiv(R, BM)
    col_tiles = tl.cdiv(N, BN)
    for tile in tl.range(tl.program_id(0), row_tiles * col_tiles, PROGRAMS, flatten=True):
        # Concurrent programs cover GROUP row tiles and about as many column tiles, whose inputs fit in L2.
        first = tile // (GROUP * col_tiles) * GROUP
        rows = tl.minimum(row_tiles - first, GROUP)
        m = (first + tile % (GROUP * col_tiles) % rows) * BM
        n = tile % (GROUP * col_tiles) // rows * BN
        acc = tl.zeros([BM, 2 * BN], tl.float32)
        for k in range(0, K, BK):
            x = x_tiles.load([m, k])
            w = w_tiles.load([0, n, k]).reshape(2 * BN, BK)
            acc = tl.dot(x, tl.trans(w), acc, input_precision="ieee")
        g, up = acc.reshape(BM, 2, BN).permute(0, 2, 1).split()
        if BIAS:
            c = n + tl.arange(0, BN)
            g += tl.load(bias_ptr + c, mask=c < N, other=0.0).to(tl.float32)[None, :]
            up += tl.load(bias_ptr + N + c, mask=c < N, other=0.0).to(tl.float32)[None, :]
        out = gate(g.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32), ACTIVATION, dtype)
        y_tiles.store([m, n], out.to(dtype))


def supports(x: Tensor, weight: Tensor) -> bool:
    """Whether the kernel supports these dtypes, strides and sizes on this GPU."""
    if x.dtype == torch.float32 or weight.dtype != x.dtype:
        return False
    limits = gpu_limits(x.device)
    aligned = weight.shape[0] // 2 * x.itemsize % 16 == 0  # rows of the output, which TMA stores
    return aligned and limits.has_tma and limits.max_shared_memory >= _SHARED and tma_compatible(x, weight)


def gated_product(
    x: Tensor,  # [R, K]
    weight: Tensor,  # [2W, K], rows of gate, then rows of up
    activation: str,
    bias: Tensor | None = None,  # [2W]
    limits: GpuLimits | None = None,
) -> Tensor:
    """Return activation(gate) * up [R, W], where gate and up are the products of x with their half of weight."""
    rows, inputs = x.shape
    width, row = weight.shape[0] // 2, weight.stride(0)
    y = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    programs = (limits or gpu_limits(x.device)).num_sms
    _gated_product[(min(programs, cdiv(rows, _BM) * cdiv(width, _BN)),)](
        make_descriptor(y, [_BM, _BN]),
        make_descriptor(x, [_BM, _BK]),
        make_descriptor(weight, [2, _BN, _BK], (2, width, inputs), (width * row, row, 1)),
        x if bias is None else bias, rows, width, inputs,
        PROGRAMS=programs, GROUP=_GROUP, BM=_BM, BN=_BN, BK=_BK, ACTIVATION=activation, BIAS=bias is not None,
        num_warps=_WARPS, num_stages=_STAGES,
    )  # fmt: skip
    return y
