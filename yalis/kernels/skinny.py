"""Skinny GEMMs in Triton: y[M, N] = x[M, K] weight[N, K]^T + bias for M of 1 to 64, or 128; reference in reference.py.

"Skinny" is the usual name for GEMMs whose M is small, as in a decode step. They are bound by reading the weights.

- M = 1 is a GEMV without tensor cores: a program holds a few rows of the weights and sums in registers.
- Larger M use the tensor cores with the weights as the left operand, so that M is the short side of the MMA tile.
- Where N gives too few programs to fill the GPU, K is split (split-K). Each program stores its partial sums, and the
  last one of a tile to finish adds them in order, so the result does not depend on timing.
- A tile has a power-of-two BLOCK_N, but a program may compute fewer outputs (OWNED_N) and leave the rest unloaded, so
  that every SM reads the same amount in each wave.
- M = 128 loads its tiles by TMA. It is the largest M for which the accumulators fit into registers.

The epilogue adds the bias and, for a gated MLP, computes activation(gate) * up. RMSNorm of the input is not fused,
because every program would repeat it; that was slower at every size tried. It is its own launch (kernels/fused.py),
which also adds the residual. Sums are float32. They are rounded to the tensors' dtype where separate operations would
round: after the bias, and in an MLP after gate, up, the activation and the product.

With programmatic dependent launch (`pdl`, see kernels/pdl.py) a program requests its first weights before it waits for
its input: M = 1 loads them into registers, larger M prefetch them into L2. Split-K counters are shared by all launches
on a device, so launches, captured or not, must be on one stream.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
# (arguments of a Triton kernel are pointers and scalars without Python types)

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from yalis.kernels.fused import gate
from yalis.kernels.gpu_limits import gpu_limits
from yalis.kernels.integer_math import cdiv, next_power_of_2
from yalis.kernels.pdl import pdl_option
from yalis.kernels.skinny_config import MAX_ROWS, TMA_ROWS, TUNED, GemmConfig, GemmShape, choose_config
from yalis.kernels.tma import make_descriptor, tma_compatible

_PREFETCH_LINES = 256  # cache lines that a program prefetches before its input is ready
_LINE_BYTES = 128


@triton.jit
def _prefetch_weights(row_ptrs, begin, end, LINE_ELEMENTS: tl.constexpr, LINES: tl.constexpr):
    """Prefetch into L2 the first LINES cache lines of columns begin..end of each weight row.

    Covers all rows of the tile. Those the program does not own belong to its neighbour, which prefetches them too.
    """
    k = tl.minimum(begin + tl.arange(0, LINES) * LINE_ELEMENTS, tl.maximum(end - 1, 0))
    ptrs = (row_ptrs[:, None] + k[None, :]).to(tl.int64)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [ptrs], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _epilogue(
    acc, up, y_ptr, bias_ptr, m, n, stride_ym, N, mask, ACTIVATION: tl.constexpr, BIAS: tl.constexpr
):  # fmt: skip
    """Add the bias, apply the gate and store outputs n of rows m. m, n and mask broadcast to the shape of acc."""
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    if BIAS:
        acc += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)
    out = acc.to(dtype)
    if ACTIVATION != "":
        if BIAS:
            up += tl.load(bias_ptr + N + n, mask=n < N, other=0.0).to(tl.float32)
        out = gate(out.to(tl.float32), up.to(dtype).to(tl.float32), ACTIVATION, dtype).to(dtype)
    tl.store(y_ptr + m * stride_ym + n, out, mask=mask)


@triton.jit
def _load_weights(row_ptrs, owned, start, end, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr):
    """Return columns start..start + BLOCK_K of the weight rows; 0 from `end` on and in rows that are not owned.

    EVEN_K: no column reaches `end`, so none is masked. owned: mask of the rows, or None if all are owned. Weights are
    read once per step, hence evict_first.
    """
    k = start + tl.arange(0, BLOCK_K)
    ptrs = row_ptrs[:, None] + k[None, :]
    if EVEN_K and owned is None:
        return tl.load(ptrs, eviction_policy="evict_first")
    else:
        mask = ((k < end) | EVEN_K)[None, :]
        if owned is not None:
            mask = mask & owned[:, None]
        return tl.load(ptrs, mask=mask, other=0.0, eviction_policy="evict_first")


@triton.jit
def _gemv_kernel(
    y_ptr, x_ptr, w_ptr, bias_ptr, stride_wn, N, K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    ACTIVATION: tl.constexpr, BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y[N] = weight[N, K] x[K]; with ACTIVATION, weight is [2N, K] and y = activation(gate) * up.

    Grid: (cdiv(N, BLOCK_N),). A program computes BLOCK_N outputs. Its accumulator is [BLOCK_N, BLOCK_K]: every thread
    sums its own columns, and one reduction follows at the end.
    """
    GATED: tl.constexpr = ACTIVATION != ""
    EVEN_K: tl.constexpr = K % BLOCK_K == 0
    k = tl.arange(0, BLOCK_K)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.minimum(n, N - 1).to(tl.int64)  # past the end, repeat the last row
    gate_rows = w_ptr + row * stride_wn
    up_rows = w_ptr + (row + N) * stride_wn
    if PDL:
        gdc_launch_dependents()
    # The first weights are loaded while the previous launch finishes.
    w = _load_weights(gate_rows, None, 0, K, BLOCK_K, EVEN_K)
    u = _load_weights(up_rows, None, 0, K, BLOCK_K, EVEN_K) if GATED else w
    if PDL:
        gdc_wait()

    acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for start in tl.static_range(0, K, BLOCK_K):  # unrolled, so that loads of several iterations are in flight
        mask = (start + k < K) | EVEN_K
        x = tl.load(x_ptr + start + k, mask=mask, other=0.0).to(tl.float32)[None, :]
        acc += w.to(tl.float32) * x
        if GATED:
            up += u.to(tl.float32) * x
        if start + BLOCK_K < K:
            w = _load_weights(gate_rows, None, start + BLOCK_K, K, BLOCK_K, EVEN_K)
            if GATED:
                u = _load_weights(up_rows, None, start + BLOCK_K, K, BLOCK_K, EVEN_K)
    _epilogue(tl.sum(acc, 1), tl.sum(up, 1), y_ptr, bias_ptr, 0, n, 0, N, n < N, ACTIVATION, BIAS)


@triton.jit(do_not_specialize=["M"])
def _skinny_gemm_kernel(
    y_ptr, x_ptr, x_desc, w_ptr, w_desc, bias_ptr, partial_ptr, counter_ptr, stride_xm, stride_wn, M, N, K,
    BLOCK_M: tl.constexpr, OWNED_N: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr,
    SPLIT_K: tl.constexpr, USE_TMA: tl.constexpr, LINE_ELEMENTS: tl.constexpr, LINES: tl.constexpr,
    ACTIVATION: tl.constexpr, BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y[M, N] = x[M, K] weight[N, K]^T; with ACTIVATION, weight is [2N, K] and y = activation(gate) * up.

    Grid: (cdiv(N, OWNED_N), SPLIT_K). A program computes OWNED_N <= BLOCK_N outputs of all M <= BLOCK_M rows, over its
    K / SPLIT_K columns in steps of BLOCK_K. Accumulators are [BLOCK_N, BLOCK_M]. With USE_TMA tiles come from the
    descriptors x_desc and w_desc, and OWNED_N = BLOCK_N. With SPLIT_K > 1 partial sums go to partial [SPLIT_K, M, N]
    float32 ([SPLIT_K, 2, M, N] if gated), and the program that brings the counter of its tile to SPLIT_K adds them.
    """
    GATED: tl.constexpr = ACTIVATION != ""
    tile = tl.program_id(0)
    split = tl.program_id(1)
    m = tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    n = tile * OWNED_N + tl.arange(0, BLOCK_N)
    owned = tl.arange(0, BLOCK_N) < OWNED_N if OWNED_N < BLOCK_N else None
    row = tl.minimum(n, N - 1).to(tl.int64)  # past the end, repeat the last row
    k_per_split = tl.cdiv(tl.cdiv(K, BLOCK_K), SPLIT_K) * BLOCK_K
    begin = split * k_per_split
    end = tl.minimum(K, begin + k_per_split)
    gate_rows = w_ptr + row * stride_wn
    up_rows = w_ptr + (row + N) * stride_wn
    if PDL:
        gdc_launch_dependents()
        _prefetch_weights(gate_rows, begin, end, LINE_ELEMENTS, LINES)
        if GATED:
            _prefetch_weights(up_rows, begin, end, LINE_ELEMENTS, LINES)
        gdc_wait()

    m_mask = (m < M)[:, None]
    x_ptrs = x_ptr + (m.to(tl.int64) * stride_xm)[:, None] + k[None, :]
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for start in range(begin, end, BLOCK_K):
        if USE_TMA:
            x = x_desc.load([0, start])
            w = w_desc.load([tile * BLOCK_N, start])
        else:
            k_mask = ((start + k < K) | EVEN_K)[None, :]
            x = tl.load(x_ptrs + start, mask=m_mask & k_mask, other=0.0)
            w = _load_weights(gate_rows, owned, start, K, BLOCK_K, EVEN_K)
        acc = tl.dot(w, tl.trans(x), acc, input_precision="ieee")
        if GATED:
            if USE_TMA:
                w = w_desc.load([N + tile * BLOCK_N, start])
            else:
                w = _load_weights(up_rows, owned, start, K, BLOCK_K, EVEN_K)
            up = tl.dot(w, tl.trans(x), up, input_precision="ieee")

    mask = (n < N)[:, None] & (m < M)[None, :]
    if owned is not None:
        mask = mask & owned[:, None]
    row = m.to(tl.int64)[None, :]
    if SPLIT_K == 1:
        _epilogue(acc, up, y_ptr, bias_ptr, row, n[:, None], N, N, mask, ACTIVATION, BIAS)
    else:
        partial_ptrs = partial_ptr + row * N + n[:, None]
        stride_partial = M * N
        HALVES: tl.constexpr = 2 if GATED else 1  # the sums of gate and of up alternate
        tl.store(partial_ptrs + split * HALVES * stride_partial, acc, mask=mask)
        if GATED:
            tl.store(partial_ptrs + (split * HALVES + 1) * stride_partial, up, mask=mask)
        # The barrier orders the stores of all threads before the increment. acq_rel makes them visible to the program
        # that reduces, and orders its loads after the increment.
        tl.debug_barrier()
        finished = tl.atomic_add(counter_ptr + tile, 1, sem="acq_rel")
        if finished == SPLIT_K - 1:
            tl.store(counter_ptr + tile, 0)  # for the next launch
            acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
            up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
            # .cg reads from L2: other SMs wrote these, and L1 is not coherent.
            for s in range(SPLIT_K):
                gate_ptrs = partial_ptrs + s * HALVES * stride_partial
                acc += tl.load(gate_ptrs, mask=mask, other=0.0, cache_modifier=".cg")
                if GATED:
                    up_ptrs = partial_ptrs + (s * HALVES + 1) * stride_partial
                    up += tl.load(up_ptrs, mask=mask, other=0.0, cache_modifier=".cg")
            _epilogue(acc, up, y_ptr, bias_ptr, row, n[:, None], N, N, mask, ACTIVATION, BIAS)


def linear(
    x: Tensor,  # [M, K]
    weight: Tensor,  # [N, K]
    bias: Tensor | None = None,  # [N]
    pdl: bool = False,
    config: GemmConfig | None = None,
) -> Tensor:
    """Return x weight^T + bias, [M, N], for M from 1 to MAX_ROWS or M = TMA_ROWS."""
    return _launch(x, weight, bias, "", pdl, config)


def gated_linear(
    x: Tensor,  # [M, K]
    weight: Tensor,  # [2N, K], the rows of gate before those of up
    activation: str,
    bias: Tensor | None = None,  # [2N]
    pdl: bool = False,
    config: GemmConfig | None = None,
) -> Tensor:
    """Return activation(gate) * up, [M, N], where gate and up are the products of x with their half of weight."""
    return _launch(x, weight, bias, activation, pdl, config)


def _launch(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, pdl: bool, config: GemmConfig | None
) -> Tensor:
    m, k = x.shape
    assert 1 <= m <= MAX_ROWS or m == TMA_ROWS, f"{m} rows"
    assert weight.stride(1) == 1, "rows of the weights must be contiguous"
    shape = GemmShape.of(x, weight, activation != "")
    config = config or choose_config(shape, gpu_limits(x.device))
    if x.stride(1) != 1:
        x = x.contiguous()
    n = shape.n
    y = torch.empty((m, n), dtype=x.dtype, device=x.device)
    tiles = cdiv(n, config.n_per_program)
    block_n = next_power_of_2(config.n_per_program)
    options = {
        "BLOCK_N": block_n, "BLOCK_K": config.block_k, "ACTIVATION": activation, "BIAS": bias is not None,
        "PDL": pdl, "num_warps": config.num_warps, **pdl_option(pdl),
    }  # fmt: skip
    if m == 1:
        _gemv_kernel[(tiles,)](y, x, weight, x if bias is None else bias, weight.stride(0), n, K=k, **options)
        return y
    partial, counters = y, y  # not accessed without split-K
    if config.split_k > 1:
        halves = 2 if shape.gated else 1
        partial = torch.empty((config.split_k * halves, m, n), dtype=torch.float32, device=x.device)
        counters = _counters(x.device)
        assert tiles <= counters.numel(), f"{tiles} tiles"
    x_desc, w_desc = x, weight
    use_tma = m == TMA_ROWS
    if use_tma:
        assert block_n == config.n_per_program, "TMA loads whole tiles"
        x_desc = make_descriptor(x, [shape.m, config.block_k])
        w_desc = make_descriptor(weight, [block_n, config.block_k])
    _skinny_gemm_kernel[(tiles, config.split_k)](
        y, x, x_desc, weight, w_desc, x if bias is None else bias, partial, counters,
        x.stride(0), weight.stride(0), m, n, k,
        LINE_ELEMENTS=_LINE_BYTES // x.itemsize, LINES=_prefetch_lines(shape, config),
        BLOCK_M=shape.m, OWNED_N=config.n_per_program, EVEN_K=k % config.block_k == 0, SPLIT_K=config.split_k,
        USE_TMA=use_tma, num_stages=config.num_stages, **options,
    )  # fmt: skip
    return y


def supports(x: Tensor, weight: Tensor, gated: bool = False) -> bool:
    """Return whether these kernels are the fastest known for a product of this size."""
    rows = x.shape[0]
    if rows == TMA_ROWS:
        return can_use_tma(x, weight) and GemmShape.of(x, weight, gated) in TUNED
    return 0 < rows <= MAX_ROWS


def can_use_tma(x: Tensor, weight: Tensor) -> bool:
    """Return whether TMA can load the tiles. float32 is excluded: exact products do not use the tensor cores."""
    return gpu_limits(x.device).has_tma and x.itemsize == 2 and tma_compatible(x, weight)


def _prefetch_lines(shape: GemmShape, config: GemmConfig) -> int:
    """Return the cache lines to prefetch from each weight row, a power of two."""
    row_lines = next_power_of_2(cdiv(shape.k * shape.itemsize, config.split_k * _LINE_BYTES))
    weight_rows = next_power_of_2(config.n_per_program) * (2 if shape.gated else 1)
    return max(1, min(row_lines, _PREFETCH_LINES // weight_rows))


@cache
def _counters(device: torch.device) -> Tensor:
    """Return the counters of finished K splits per tile, shared by all launches on one stream; zero between launches.

    CUDA graphs use them too, so the first launch, which allocates them, must not be captured.
    """
    assert device.type != "cuda" or not torch.cuda.is_current_stream_capturing(), "run once before capturing a graph"
    return torch.zeros(4096, dtype=torch.int32, device=device)
