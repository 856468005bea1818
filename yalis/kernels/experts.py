"""Mixture of experts in Triton: routing, grouping, products with the matrices of experts, and their weighted sum.

kernels/routed.py computes the same in plain torch. All launches have sizes that do not depend on the routing, and
nothing waits for the device, so CUDA graphs capture a step with any routing.

- Where few pairs share an expert (uses_gemv), each pair is a GEMV without tensor cores, and nothing is grouped.
- Otherwise pairs of a row and an expert are sorted by expert and cut into blocks. A program multiplies a block by
  some outputs of its expert's matrix, with the weights as the left operand, as in kernels/skinny.py. There are enough
  programs for the worst routing; those without a block return at once. With up to MAX_RANKED pairs the sort is one
  launch, which counts for each pair the pairs that come before it.
- Gate and up are one product with the activation in its epilogue.

An expert of -1 marks a pair that another rank computes: its output is zeros.

Sums are float32. They are rounded to the tensors' dtype where separate operations round.

Names: R rows of x · P pairs · E experts · N outputs and K inputs of a matrix.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
# (kernel arguments are Triton pointers and scalars, which have no Python types)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from yalis.kernels.experts_config import (
    ExpertShape,
    GemmLaunch,
    block_rows,
    choose_gemm,
    choose_gemv,
    count_blocks,
    uses_gemv,
)
from yalis.kernels.fused import gate, pdl_sync
from yalis.kernels.gpu_limits import gpu_limits
from yalis.kernels.integer_math import cdiv, next_power_of_2
from yalis.kernels.pdl import pdl_option

MAX_RANKED = 1024  # pairs that one launch sorts; its work grows with their square
_RANKED_BLOCK = 32  # pairs of one program of that launch
_GROUP_WARPS = 4


@triton.jit
def _route_kernel(
    weights_ptr, experts_ptr, logits_ptr, correction_ptr, stride, E, scale,
    TOP_K: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_E: tl.constexpr, SIGMOID: tl.constexpr,
    RENORMALIZE: tl.constexpr, CORRECTED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The experts and weights of a row of logits [R, E], as routed.choose_experts without groups. Grid: (R,).

    The lower index comes first among equal scores. A softmax of the chosen logits is a renormalized one of all.
    """
    pdl_sync(PDL)
    row = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, BLOCK_E)
    k = tl.arange(0, BLOCK_K)
    logits = tl.load(logits_ptr + row * stride + e, mask=e < E, other=-float("inf")).to(tl.float32)
    if SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-logits))
    else:
        scores = tl.exp(logits - tl.max(logits, 0))
        if CORRECTED or not RENORMALIZE:
            scores = scores / tl.sum(scores, 0)
    free = logits
    if CORRECTED:
        free = scores + tl.load(correction_ptr + e, mask=e < E, other=0.0)
        free = tl.where(e < E, free, -float("inf"))
    chosen = tl.zeros([BLOCK_K], tl.int32)
    weights = tl.zeros([BLOCK_K], tl.float32)
    for i in range(TOP_K):
        best = tl.minimum(tl.argmax(free, 0, tie_break_left=True), E - 1)  # a valid index even if logits are NaN
        weights = tl.where(k == i, tl.sum(tl.where(e == best, scores, 0.0), 0), weights)
        chosen = tl.where(k == i, best, chosen)
        free = tl.where(e == best, -float("inf"), free)
    if RENORMALIZE:
        weights = weights / (tl.sum(weights, 0) + (1e-20 if SIGMOID else 0.0))
    tl.store(weights_ptr + row * TOP_K + k, weights * scale, mask=k < TOP_K)
    tl.store(experts_ptr + row * TOP_K + k, chosen.to(tl.int64), mask=k < TOP_K)


def route(
    logits: Tensor,  # [R, E]
    correction: Tensor | None,  # [E] fp32
    top_k: int,
    scoring: str,
    renormalize: bool,
    scale: float = 1.0,
    pdl: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return the weights [R, top_k] in fp32 and the experts [R, top_k] int64; see routed.choose_experts."""
    rows, count = logits.shape
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    weights = torch.empty((rows, top_k), dtype=torch.float32, device=logits.device)
    experts = torch.empty((rows, top_k), dtype=torch.int64, device=logits.device)
    if rows:
        _route_kernel[(rows,)](
            weights, experts, logits, logits if correction is None else correction, logits.stride(0), count, scale,
            TOP_K=top_k, BLOCK_K=next_power_of_2(top_k), BLOCK_E=next_power_of_2(count),
            SIGMOID=scoring == "sigmoid", RENORMALIZE=renormalize or scoring == "softmax_chosen",
            CORRECTED=correction is not None, PDL=pdl, num_warps=1 if count <= 256 else 4, **pdl_option(pdl),
        )  # fmt: skip
    return weights, experts


# block_ptr follows the order at any offset, so its alignment varies.
@triton.jit(do_not_specialize=["P", "E", "blocks"], do_not_specialize_on_alignment=["block_ptr"])
def _group_kernel(
    order_ptr, block_ptr, experts_ptr, P, E, blocks,
    BLOCK_P: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Sort P pairs by expert, and cut each expert's into blocks of up to BLOCK_M. Grid: (1 + cdiv(P, CHUNK),).

    Program 0 writes the blocks [blocks, 3]: expert, start and end in the order; unused ones are empty. The others write
    the order, CHUNK pairs each. Pairs with a negative expert come last, as those of expert E.
    """
    pdl_sync(PDL)
    p = tl.arange(0, BLOCK_P)
    expert = tl.load(experts_ptr + p, mask=p < P, other=0).to(tl.int32)
    expert = tl.where(p < P, tl.where(expert < 0, E, expert), BLOCK_E)  # BLOCK_E > E: after all pairs
    if tl.program_id(0) == 0:
        e = tl.arange(0, BLOCK_E)
        sizes = tl.histogram(tl.where(p < P, expert, BLOCK_E - 1), BLOCK_E)
        sizes -= tl.where(e == BLOCK_E - 1, BLOCK_P - P, 0)
        ends = tl.cumsum(sizes, 0)
        needed = (sizes + BLOCK_M - 1) // BLOCK_M
        used = tl.cumsum(needed, 0)
        for i in range(tl.max(needed, 0)):  # the i-th block of each expert
            start = ends - sizes + i * BLOCK_M
            block = block_ptr + (used - needed + i) * 3
            tl.store(block, e, mask=i < needed)
            tl.store(block + 1, start, mask=i < needed)
            tl.store(block + 2, tl.minimum(start + BLOCK_M, ends), mask=i < needed)
        total = tl.sum(needed, 0)
        for first in range(total, blocks, BLOCK_E):
            b = first + e
            tl.store(block_ptr + b * 3, e * 0 + E, mask=b < blocks)
            tl.store(block_ptr + b * 3 + 1, e * 0, mask=b < blocks)
            tl.store(block_ptr + b * 3 + 2, e * 0, mask=b < blocks)
    else:
        own = (tl.program_id(0) - 1) * CHUNK + tl.arange(0, CHUNK)
        own_expert = tl.load(experts_ptr + own, mask=own < P, other=0).to(tl.int32)
        own_key = tl.where(own_expert < 0, E, own_expert) * BLOCK_P + own
        before = (expert * BLOCK_P + p)[None, :] < own_key[:, None]
        tl.store(order_ptr + tl.sum(before.to(tl.int32), 1), own, mask=own < P)


def group(experts: Tensor, count: int, pdl: bool = False) -> Tensor:
    """Return the plan of the grouped products of pairs with these experts [P], of `count`: order and blocks, int32.

    The plan is the order [P] of the pairs, sorted by expert, followed by the blocks [B, 3]: expert, and start and end
    in the order. Pairs with a negative expert come last, in blocks of expert `count`.
    """
    pairs = experts.shape[0]
    block_m = block_rows(pairs, count)
    blocks = count_blocks(pairs, count, block_m)
    plan = torch.empty(pairs + 3 * blocks, dtype=torch.int32, device=experts.device)
    if pairs > MAX_RANKED:
        _sort(plan, experts, count, block_m, blocks)
    elif pairs:
        _group_kernel[(1 + cdiv(pairs, _RANKED_BLOCK),)](
            plan, plan[pairs:], experts, pairs, count, blocks,
            BLOCK_P=next_power_of_2(max(32 * _GROUP_WARPS, pairs)), BLOCK_E=next_power_of_2(count + 2), BLOCK_M=block_m,
            CHUNK=_RANKED_BLOCK, PDL=pdl, num_warps=_GROUP_WARPS, **pdl_option(pdl),
        )  # fmt: skip
    return plan


def _sort(plan: Tensor, experts: Tensor, count: int, block_m: int, blocks: int) -> None:
    """Fill the plan by torch operations, whose launches do not count with this many pairs."""
    pairs = experts.shape[0]
    keys = torch.where(experts < 0, count, experts)
    ordered, order = keys.to(torch.int32).sort(stable=True)
    plan[:pairs] = order
    ends = torch.searchsorted(ordered, torch.arange(count + 1, dtype=torch.int32, device=plan.device), right=True)
    starts = torch.cat((ends.new_zeros(1), ends[:-1]))
    used = ((ends - starts + block_m - 1) // block_m).cumsum(0)
    b = torch.arange(blocks, device=plan.device)
    expert = torch.searchsorted(used, b, right=True).clamp_(max=count)
    first = starts[expert] + (b - torch.where(expert > 0, used[expert - 1], 0)) * block_m
    end = torch.minimum(first + block_m, ends[expert])
    end = torch.where(b < used[-1], end, first)  # unused blocks are empty
    plan[pairs:] = torch.stack((expert, first, end), dim=1).flatten()


@triton.jit
def _epilogue(
    acc, up, y_ptr, bias_ptr, rows, n, N, mask, ACTIVATION: tl.constexpr, BIAS: tl.constexpr
):  # fmt: skip
    """Add the bias of the expert, apply the gate and store outputs n of rows; n and rows broadcast to acc's shape."""
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    if BIAS:
        acc += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)
    out = acc.to(dtype)
    if ACTIVATION != "":
        if BIAS:
            up += tl.load(bias_ptr + N + n, mask=n < N, other=0.0).to(tl.float32)
        out = gate(out.to(tl.float32), up.to(dtype).to(tl.float32), ACTIVATION, dtype).to(dtype)
    tl.store(y_ptr + rows * N + n, out, mask=mask)


@triton.jit(do_not_specialize=["per_row"])
def _expert_gemv_kernel(
    y_ptr, x_ptr, w_ptr, bias_ptr, experts_ptr, stride_x, stride_we, stride_wn, per_row, N, K: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, ACTIVATION: tl.constexpr, BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y[p] = w[experts[p]] x[p // per_row]; with ACTIVATION, w is [E, 2 * N, K]. Grid: (cdiv(N, BLOCK_N), P).

    As in kernels/skinny.py every thread sums its own columns of [BLOCK_N, BLOCK_K], and one reduction follows.
    """
    GATED: tl.constexpr = ACTIVATION != ""
    HALVES: tl.constexpr = 2 if GATED else 1
    EVEN_K: tl.constexpr = K % BLOCK_K == 0
    pdl_sync(PDL)
    pair = tl.program_id(1).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    expert = tl.load(experts_ptr + pair).to(tl.int64)
    if expert < 0:
        zeros = tl.zeros([BLOCK_N], tl.float32).to(y_ptr.dtype.element_ty)
        tl.store(y_ptr + pair * N + n, zeros, mask=n < N)
        return
    rows = w_ptr + expert * stride_we + tl.minimum(n, N - 1).to(tl.int64) * stride_wn  # past the end, repeat the last
    x_row = x_ptr + pair // per_row * stride_x
    acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for start in tl.static_range(0, K, BLOCK_K):  # unrolled, so that loads of several iterations are in flight
        mask = (start + k < K) | EVEN_K
        x = tl.load(x_row + start + k, mask=mask, other=0.0).to(tl.float32)[None, :]
        ptrs = rows[:, None] + (start + k)[None, :]
        acc += tl.load(ptrs, mask=mask[None, :], other=0.0, eviction_policy="evict_first").to(tl.float32) * x
        if GATED:
            ptrs += N * stride_wn
            up += tl.load(ptrs, mask=mask[None, :], other=0.0, eviction_policy="evict_first").to(tl.float32) * x
    bias_ptr += expert * HALVES * N
    _epilogue(tl.sum(acc, 1), tl.sum(up, 1), y_ptr, bias_ptr, pair, n, N, n < N, ACTIVATION, BIAS)


@triton.jit(do_not_specialize=["per_row", "E", "blocks"], do_not_specialize_on_alignment=["block_ptr"])
def _expert_gemm_kernel(
    y_ptr, x_ptr, w_ptr, bias_ptr, order_ptr, block_ptr, stride_x, stride_we, stride_wn, per_row, E, blocks, N, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, EVEN_K: tl.constexpr,
    ACTIVATION: tl.constexpr, BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The product of each block of pairs with its expert's matrix. Grid: (blocks * cdiv(N, BLOCK_N),).

    Concurrent programs cover GROUP blocks, whose rows and weights fit in L2. Accumulators are [BLOCK_N, BLOCK_M].
    """
    GATED: tl.constexpr = ACTIVATION != ""
    HALVES: tl.constexpr = 2 if GATED else 1
    pdl_sync(PDL)
    tile = tl.program_id(0)
    col_tiles = tl.cdiv(N, BLOCK_N)
    first = tile // (GROUP * col_tiles) * GROUP
    grouped = tl.minimum(blocks - first, GROUP)
    block = block_ptr + (first + tile % (GROUP * col_tiles) % grouped) * 3
    start, end = tl.load(block + 1), tl.load(block + 2)
    if start >= end:
        return
    expert = tl.load(block).to(tl.int64)
    n = tile % (GROUP * col_tiles) // grouped * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    m = start + tl.arange(0, BLOCK_M)
    pair = tl.load(order_ptr + m, mask=m < end, other=0).to(tl.int64)
    stop = tl.where(expert < E, K, 0)  # pairs that are left out become zeros
    expert = tl.minimum(expert, E - 1)
    x_rows = x_ptr + pair // per_row * stride_x
    w_rows = w_ptr + expert * stride_we + tl.minimum(n, N - 1).to(tl.int64) * stride_wn
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for begin in range(0, stop, BLOCK_K):
        k_mask = ((begin + k < K) | EVEN_K)[None, :]
        x = tl.load(x_rows[:, None] + (begin + k)[None, :], mask=(m < end)[:, None] & k_mask, other=0.0)
        ptrs = w_rows[:, None] + (begin + k)[None, :]
        acc = tl.dot(tl.load(ptrs, mask=k_mask, other=0.0), tl.trans(x), acc, input_precision="ieee")
        if GATED:
            ptrs += N * stride_wn
            up = tl.dot(tl.load(ptrs, mask=k_mask, other=0.0), tl.trans(x), up, input_precision="ieee")
    mask = (n < N)[:, None] & (m < end)[None, :]
    if BIAS:  # not for pairs that are left out
        bias_ptr += expert * HALVES * N
        n_bias = tl.where(stop > 0, n, N)
        acc += tl.load(bias_ptr + n_bias, mask=n_bias < N, other=0.0).to(tl.float32)[:, None]
        if GATED:
            up += tl.load(bias_ptr + N + n_bias, mask=n_bias < N, other=0.0).to(tl.float32)[:, None]
    _epilogue(acc, up, y_ptr, bias_ptr, pair[None, :], n[:, None], N, mask, ACTIVATION, False)


def expert_linear(
    x: Tensor,  # [R, K]
    weight: Tensor,  # [E, N, K]
    experts: Tensor,  # [P], P a multiple of R
    plan: Tensor | None = None,  # of group()
    bias: Tensor | None = None,  # [E, N]
    activation: str = "",
    pdl: bool = False,
    launch: GemmLaunch | None = None,
) -> Tensor:
    """Return [P, N]: pair p is row p // (P / R) of x times the matrix of its expert; zeros if that is negative.

    With an activation, weight is [E, 2 * N, K], rows of gate before rows of up, and the result activation(gate) * up.
    """
    pairs, (count, outputs, inputs) = experts.shape[0], weight.shape
    gated = activation != ""
    outputs //= 2 if gated else 1
    y = torch.empty((pairs, outputs), dtype=x.dtype, device=x.device)
    if not pairs:
        return y
    if x.stride(1) != 1:
        x = x.contiguous()
    if weight.stride(2) != 1 or (bias is not None and not bias.is_contiguous()):
        raise ValueError("rows of the weights and biases must be contiguous")
    shape = ExpertShape(pairs, count, outputs, inputs, x.itemsize, gated)
    limits, added = gpu_limits(x.device), x if bias is None else bias
    options = {"ACTIVATION": activation, "BIAS": bias is not None, "PDL": pdl, **pdl_option(pdl)}
    if plan is None and launch is None and uses_gemv(pairs, count):
        gemv = choose_gemv(shape)
        _expert_gemv_kernel[(cdiv(outputs, gemv.block_n), pairs)](
            y, x, weight, added, experts, x.stride(0), weight.stride(0), weight.stride(1), pairs // x.shape[0],
            outputs, K=inputs, BLOCK_N=gemv.block_n, BLOCK_K=gemv.block_k, num_warps=gemv.num_warps, **options,
        )  # fmt: skip
        return y
    plan = group(experts, count, pdl) if plan is None else plan
    block_m = block_rows(pairs, count)
    blocks = count_blocks(pairs, count, block_m)
    launch = launch or choose_gemm(shape, limits)
    _expert_gemm_kernel[(blocks * cdiv(outputs, launch.block_n),)](
        y, x, weight, added, plan, plan[pairs:], x.stride(0), weight.stride(0), weight.stride(1),
        pairs // x.shape[0], count, blocks, outputs, inputs,
        BLOCK_M=block_m, BLOCK_N=launch.block_n, BLOCK_K=launch.block_k, GROUP=launch.group,
        EVEN_K=inputs % launch.block_k == 0, num_warps=launch.num_warps, num_stages=launch.num_stages, **options,
    )  # fmt: skip
    return y


@triton.jit
def _combine_kernel(
    out_ptr, y_ptr, weights_ptr, shared_ptr, gate_ptr, stride_shared, stride_gate, C,
    TOP_K: tl.constexpr, BLOCK_C: tl.constexpr, SHARED: tl.constexpr, GATE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out[r] = sum over k of weights[r, k] * y[r * TOP_K + k], plus the shared expert. Grid: (R, cdiv(C, BLOCK_C))."""
    pdl_sync(PDL)
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask = c < C
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    acc = tl.zeros([BLOCK_C], tl.float32)
    for k in range(TOP_K):
        weight = tl.load(weights_ptr + row * TOP_K + k).to(dtype).to(tl.float32)
        acc += weight * tl.load(y_ptr + (row * TOP_K + k) * C + c, mask=mask, other=0.0).to(tl.float32)
    out = acc.to(dtype)
    if SHARED:
        shared = tl.load(shared_ptr + row * stride_shared + c, mask=mask, other=0.0).to(tl.float32)
        if GATE:
            logit = tl.load(gate_ptr + row * stride_gate).to(tl.float32)
            shared = (shared * (1.0 / (1.0 + tl.exp(-logit))).to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
        out = (out.to(tl.float32) + shared).to(dtype)
    tl.store(out_ptr + row * C + c, out, mask=mask)


def combine(
    y: Tensor,  # [R * top_k, C], contiguous
    weights: Tensor,  # [R, top_k] fp32
    shared: Tensor | None = None,  # [R, C]
    gate: Tensor | None = None,  # [R, 1]
    pdl: bool = False,
) -> Tensor:
    """Return the weighted sum [R, C] of each row's experts, plus `shared` times the sigmoid of `gate`."""
    (rows, top_k), cols = weights.shape, y.shape[1]
    out = torch.empty((rows, cols), dtype=y.dtype, device=y.device)
    if shared is not None and shared.stride(1) != 1:
        shared = shared.contiguous()
    if out.numel():
        block = min(1024, next_power_of_2(cols))
        _combine_kernel[(rows, cdiv(cols, block))](
            out, y.contiguous(), weights.contiguous(), y if shared is None else shared, y if gate is None else gate,
            0 if shared is None else shared.stride(0), 0 if gate is None else gate.stride(0), cols,
            TOP_K=top_k, BLOCK_C=block, SHARED=shared is not None, GATE=gate is not None, PDL=pdl, num_warps=4,
            **pdl_option(pdl),
        )  # fmt: skip
    return out
