"""What a decode step does between its matrices, each in one launch. kernels/reference.py says the same in plain torch.

All compute in float32 and round to the dtype of the tensors exactly where the operations they replace round, so that a
model's tokens do not depend on which of the two it runs.

A launch may be dependent (`pdl`, see kernels/pdl.py): it begins while the launch before it still runs, and waits
for that one's results before it reads anything.

Names: T tokens · R rows · C columns · H query heads · K key/value heads · D head_dim · B tokens a block holds.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
# (a kernel's arguments are pointers and numbers of a language of its own)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from yalis.kernels.integer_math import cdiv, next_power_of_2
from yalis.kernels.pdl import pdl_option

ACTIVATIONS = ("silu", "gelu", "gelu_tanh")


@triton.jit
def pdl_sync(PDL: tl.constexpr):
    """Let the next launch start, then wait until the one before is done."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """One of ACTIVATIONS, of float32."""
    if ACTIVATION == "silu":
        return x / (1.0 + tl.exp(-x))
    elif ACTIVATION == "gelu_tanh":
        # (1 + tanh(u)) / 2 is the logistic function of 2u.
        return x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
    else:
        return 0.5 * x * (1.0 + tl.erf(0.7071067811865476 * x))


@triton.jit
def gate(g, up, ACTIVATION: tl.constexpr, dtype: tl.constexpr):
    """activation(g) * up, of float32 values that `dtype` holds; the activation alone is rounded to it too."""
    return activate(g, ACTIVATION).to(dtype).to(tl.float32) * up


@triton.jit
def _add_rms_norm(
    y_ptr, sum_ptr, x_ptr, branch_ptr, weight_ptr, x_row, branch_row, eps,
    C: tl.constexpr, BC: tl.constexpr, BRANCH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pdl_sync(PDL)
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BC)
    here = c < C
    x = tl.load(x_ptr + row * x_row + c, mask=here, other=0.0).to(tl.float32)
    if BRANCH:
        x += tl.load(branch_ptr + row * branch_row + c, mask=here, other=0.0).to(tl.float32)
        rounded = x.to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + row * C + c, rounded, mask=here)
        x = rounded.to(tl.float32)
    x = x * tl.rsqrt(tl.sum(x * x, 0) / C + eps)
    y = x * tl.load(weight_ptr + c, mask=here, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * C + c, y.to(y_ptr.dtype.element_ty), mask=here)


def add_rms_norm(
    x: Tensor,  # [R, C]
    branch: Tensor | None,  # [R, C]
    weight: Tensor,  # [C], of any floating dtype
    eps: float,
    pdl: bool = False,
) -> tuple[Tensor, Tensor]:
    """(the norm of x + branch, x + branch), the second rounded before the first is taken of it."""
    rows, cols = x.shape
    x = dense(x)
    y = torch.empty((rows, cols), dtype=x.dtype, device=x.device)
    if branch is None:
        summed, other = x, x
    else:
        summed, other = torch.empty_like(y), dense(branch)
    if rows:
        block = next_power_of_2(cols)
        _add_rms_norm[(rows,)](
            y, summed, x, other, weight, x.stride(0), other.stride(0), eps,
            C=cols, BC=block, BRANCH=branch is not None, PDL=pdl, num_warps=min(16, max(1, block // 256)),
            **pdl_option(pdl),
        )  # fmt: skip
    return y, summed


@triton.jit
def _normed(x, partner, weight_ptr, d, other, inside, turned, eps, D: tl.constexpr, dtype: tl.constexpr):
    """Heads x [M, DP] and their partners, over the rms of x, times the weight; rounded to dtype."""
    scale = tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
    x = x * scale * tl.load(weight_ptr + d, mask=inside, other=0.0).to(tl.float32)[None, :]
    partner = partner * scale * tl.load(weight_ptr + other, mask=turned, other=0.0).to(tl.float32)[None, :]
    return x.to(dtype).to(tl.float32), partner.to(dtype).to(tl.float32)


@triton.jit(do_not_specialize_on_alignment=["slots_ptr"])  # they lie anywhere in a packed step
def _rope_write(
    q_ptr, k_ptr, v_ptr, qkv_ptr, cos_ptr, sin_ptr, slots_ptr, q_weight, k_weight,
    qkv_token, qkv_head, angle_token, k_block, k_slot, k_head, v_block, v_slot, v_head, eps,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, DIM: tl.constexpr, B: tl.constexpr,
    M: tl.constexpr, NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pdl_sync(PDL)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * M + tl.arange(0, M)
    d = tl.arange(0, DP)
    inside = d < D
    turned = d < DIM
    other = tl.where(d < DIM // 2, d + DIM // 2, d - DIM // 2)  # whom d turns with
    dtype: tl.constexpr = qkv_ptr.dtype.element_ty

    at = qkv_ptr + token * qkv_token + (head * qkv_head)[:, None]
    live = (head < H + 2 * K)[:, None]
    whole = tl.load(at + d[None, :], mask=live & inside[None, :], other=0.0)
    x = whole.to(tl.float32)
    partner = tl.load(at + other[None, :], mask=live & turned[None, :], other=0.0).to(tl.float32)
    if NORM:
        for_q, partner_q = _normed(x, partner, q_weight, d, other, inside, turned, eps, D, dtype)
        for_k, partner_k = _normed(x, partner, k_weight, d, other, inside, turned, eps, D, dtype)
        query = (head < H)[:, None]
        x, partner = tl.where(query, for_q, for_k), tl.where(query, partner_q, partner_k)
    cos = tl.load(cos_ptr + token * angle_token + d, mask=turned, other=1.0).to(tl.float32)
    sin = tl.load(sin_ptr + token * angle_token + d, mask=turned, other=0.0).to(tl.float32)
    out = ((x * cos[None, :]).to(dtype).to(tl.float32) + partner * sin[None, :]).to(dtype)

    is_q = (head < H)[:, None] & inside[None, :]
    tl.store(q_ptr + token * H * D + (head * D)[:, None] + d[None, :], out, mask=is_q)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    if slot >= 0:
        key, value = head - H, head - H - K
        is_k = ((key >= 0) & (key < K))[:, None] & inside[None, :]
        is_v = ((value >= 0) & (value < K))[:, None] & inside[None, :]
        block, place = slot // B, slot % B
        tl.store(k_ptr + block * k_block + place * k_slot + (key * k_head)[:, None] + d[None, :], out, mask=is_k)
        tl.store(v_ptr + block * v_block + place * v_slot + (value * v_head)[:, None] + d[None, :], whole, mask=is_v)


def rope_write(
    qkv: Tensor,  # [T, H + 2K, D]
    cos: Tensor,  # [T, 1, dim], dim of a head's D numbers are rotated
    sin: Tensor,  # [T, 1, dim], with the sign of the first half
    k_cache: Tensor,  # [N, B, K, D]
    v_cache: Tensor,  # [N, B, K, D]
    slots: Tensor,  # [T] where a token's key and value go; negative: nowhere
    q_norm: Tensor | None = None,  # [D], and then k_norm too
    k_norm: Tensor | None = None,
    eps: float = 0.0,
    pdl: bool = False,
) -> Tensor:
    """Norm (where there is one) and rotate queries and keys, write keys and values to the cache; the queries [T, H, D].

    The keys and values of one step have slots of their own.
    """
    tokens, all_heads, dim = qkv.shape
    _, block_size, kv_heads, _ = k_cache.shape
    heads = all_heads - 2 * kv_heads
    if qkv.stride(2) != 1:
        qkv = qkv.contiguous()
    if cos.stride() != sin.stride() or cos.stride(2) != 1:
        cos, sin = cos.contiguous(), sin.contiguous()
    q = torch.empty((tokens, heads, dim), dtype=qkv.dtype, device=qkv.device)
    if not tokens:
        return q
    norm = q_norm is not None and k_norm is not None
    rows = 8 if tokens <= 512 else 16  # few tokens: more programs
    _rope_write[(tokens, cdiv(all_heads, rows))](
        q, k_cache, v_cache, qkv, cos, sin, slots, q_norm if norm else qkv, k_norm if norm else qkv,
        *qkv.stride()[:2], cos.stride(0), *k_cache.stride()[:3], *v_cache.stride()[:3], eps,
        H=heads, K=kv_heads, D=dim, DP=next_power_of_2(dim), DIM=cos.shape[-1], B=block_size,
        M=rows, NORM=norm, PDL=pdl, num_warps=4, **pdl_option(pdl),
    )  # fmt: skip
    return q


@triton.jit(do_not_specialize_on_alignment=["rows_ptr"])  # they lie anywhere in a packed step
def _take(y_ptr, table_ptr, rows_ptr, table_row, C, BC: tl.constexpr, PDL: tl.constexpr):
    pdl_sync(PDL)
    place = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    row = tl.load(rows_ptr + place).to(tl.int64)
    tl.store(y_ptr + place * C + c, tl.load(table_ptr + row * table_row + c, mask=c < C), mask=c < C)


def take(table: Tensor, rows: Tensor, pdl: bool = False) -> Tensor:
    """The rows of table [N, C] that `rows` [T] int64 names, in its order."""
    table = dense(table)
    count, width = rows.shape[0], table.shape[1]
    y = torch.empty((count, width), dtype=table.dtype, device=table.device)
    if y.numel():
        block = min(2048, next_power_of_2(width))
        _take[(count, cdiv(width, block))](
            y, table, rows, table.stride(0), width, BC=block, PDL=pdl, num_warps=4, **pdl_option(pdl)
        )
    return y


@triton.jit
def _gated(
    y_ptr, x_ptr, x_row, W, BW: tl.constexpr, ACTIVATION: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    pdl_sync(PDL)
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BW + tl.arange(0, BW)
    here = c < W
    g = tl.load(x_ptr + row * x_row + c, mask=here, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * x_row + W + c, mask=here, other=0.0).to(tl.float32)
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    tl.store(y_ptr + row * W + c, gate(g, up, ACTIVATION, dtype).to(dtype), mask=here)


def gated(gate_up: Tensor, activation: str, pdl: bool = False) -> Tensor:
    """activation(gate) * up, for the two halves of gate_up [T, 2 * width]; silu, gelu or gelu_tanh."""
    gate_up = dense(gate_up)
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    y = torch.empty((rows, width), dtype=gate_up.dtype, device=gate_up.device)
    if y.numel():
        block = min(1024, next_power_of_2(width))
        _gated[(rows, cdiv(width, block))](
            y, gate_up, gate_up.stride(0), width, BW=block, ACTIVATION=activation, PDL=pdl, num_warps=4,
            **pdl_option(pdl),
        )  # fmt: skip
    return y


_LEAST = tl.constexpr(-(2**63))  # below every packed pair


@triton.jit
def _best_of_part(best_ptr, x_ptr, x_row, V, BV: tl.constexpr, PDL: tl.constexpr):
    """The best of BV logits as one integer: the value's order above, the place below, the lowest place the highest."""
    pdl_sync(PDL)
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    c = part * BV + tl.arange(0, BV)
    x = tl.load(x_ptr + row * x_row + c, mask=c < V, other=0.0).to(tl.float32)
    # Sign and magnitude become an order of integers; adding 0 makes -0 and 0 equals; NaN comes before any number.
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    order = tl.where(x != x, 0x7FFFFFFF, bits ^ ((bits >> 31) & 0x7FFFFFFF))
    packed = (order.to(tl.int64) << 32) | (0x7FFFFFFF - c).to(tl.int64)
    packed = tl.where(c < V, packed, _LEAST)
    tl.store(best_ptr + row * tl.num_programs(1) + part, tl.max(packed, 0))


@triton.jit
def _best_of_parts(place_ptr, best_ptr, parts, BP: tl.constexpr, PDL: tl.constexpr):
    pdl_sync(PDL)
    row = tl.program_id(0).to(tl.int64)
    p = tl.arange(0, BP)
    best = tl.max(tl.load(best_ptr + row * parts + p, mask=p < parts, other=_LEAST), 0)
    tl.store(place_ptr + row, 0x7FFFFFFF - (best & 0x7FFFFFFF))


def argmax(logits: Tensor, pdl: bool = False) -> Tensor:
    """The place of each row's highest logit, [R, V] -> [R] int64: the first among equals, and NaN before any number."""
    logits = dense(logits)
    rows, vocab = logits.shape
    block = min(2048, next_power_of_2(vocab))
    parts = cdiv(vocab, block)
    best = torch.empty((rows, parts), dtype=torch.int64, device=logits.device)
    places = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows:
        _best_of_part[(rows, parts)](
            best, logits, logits.stride(0), vocab, BV=block, PDL=pdl, num_warps=4, **pdl_option(pdl)
        )
        _best_of_parts[(rows,)](places, best, parts, BP=next_power_of_2(parts), PDL=pdl, num_warps=1, **pdl_option(pdl))
    return places


def dense(x: Tensor) -> Tensor:
    """x, whose rows may skip elements and whose columns may not."""
    return x if x.stride(1) == 1 else x.contiguous()
