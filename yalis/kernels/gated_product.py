"""Gate and up products of an MLP for many rows, and the gate behind them. kernels/reference.py says the same plainly.

A program keeps both products of a tile, so the gate is taken where the sums are: their outputs, the largest tensor of a
prefill, are never written. There is one program for each processor, which goes from tile to tile; the next tile's loads
are on their way while the last one's outputs leave. Tiles come by descriptor. Sums are float32, and rounded where
separate operations round.

Names: R rows of x · N outputs · K inputs · BM, BN, BK rows, outputs and inputs a program takes at a time.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
# (a kernel's arguments are descriptors and numbers of a language of its own)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from yalis.kernels.fused import gate
from yalis.kernels.gpu_limits import GpuLimits, gpu_limits
from yalis.kernels.integer_math import cdiv
from yalis.kernels.tma import make_descriptor, tma_compatible

_BM, _BN, _BK, _STAGES, _WARPS = 128, 128, 64, 3, 8  # by search on an H200, for Llama-3.1-8B's matrix
_SHARED = 181 << 10  # bytes that those take
_GROUP = 8  # tiles of rows that share what is read of the matrix


@triton.jit(do_not_specialize=["R"])
def _gated_product(
    y_tiles, x_tiles, w_tiles, bias_ptr, R, N, K, PROGRAMS: tl.constexpr, GROUP: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, ACTIVATION: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = y_tiles.dtype
    down = tl.cdiv(R, BM)
    across = tl.cdiv(N, BN)
    for tile in tl.range(tl.program_id(0), down * across, PROGRAMS, flatten=True):
        # Programs that run together take GROUP tiles of rows times as many of outputs, which the L2 cache holds.
        first = tile // (GROUP * across) * GROUP
        rows = tl.minimum(down - first, GROUP)
        m = (first + tile % (GROUP * across) % rows) * BM
        n = tile % (GROUP * across) // rows * BN
        both = tl.zeros([BM, 2 * BN], tl.float32)
        for k in range(0, K, BK):
            x = x_tiles.load([m, k])
            w = w_tiles.load([0, n, k]).reshape(2 * BN, BK)
            both = tl.dot(x, tl.trans(w), both, input_precision="ieee")
        g, up = both.reshape(BM, 2, BN).permute(0, 2, 1).split()
        if BIAS:
            c = n + tl.arange(0, BN)
            g += tl.load(bias_ptr + c, mask=c < N, other=0.0).to(tl.float32)[None, :]
            up += tl.load(bias_ptr + N + c, mask=c < N, other=0.0).to(tl.float32)[None, :]
        out = gate(g.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32), ACTIVATION, dtype)
        y_tiles.store([m, n], out.to(dtype))


def suits(x: Tensor, weight: Tensor) -> bool:
    """Whether the kernel supports these dtypes, strides and sizes on this GPU."""
    if x.dtype == torch.float32 or weight.dtype != x.dtype:
        return False
    limits = gpu_limits(x.device)
    whole = weight.shape[0] // 2 * x.itemsize % 16 == 0  # outputs are stored by descriptor too
    return whole and limits.has_tma and limits.max_shared_memory >= _SHARED and tma_compatible(x, weight)


def gated_product(
    x: Tensor,  # [R, K]
    weight: Tensor,  # [2W, K], the gate's rows before those of up
    activation: str,
    bias: Tensor | None = None,  # [2W]
    limits: GpuLimits | None = None,
) -> Tensor:
    """activation(gate) * up, both products of x with their half of weight: [R, W]."""
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
