"""Fused element-wise and reduction kernels of a step, in Triton. kernels/reference.py computes the same in plain torch.

They do the work between the GEMMs and attention, one launch each: residual add + RMSNorm, rotary embedding + KV cache
write, row gather, gated activation and argmax. All of them compute in float32 and round to the tensors' dtype exactly
where the separate torch operations round, so the tokens of a model do not depend on which of the two it runs.

With `pdl` a launch uses programmatic dependent launch (kernels/pdl.py): it starts while the previous launch is still
running, and waits for its results before it reads anything.

Shapes: T tokens · M rows · C columns · H query heads · K KV heads · D head_dim · N blocks of the cache · B tokens per
block.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
# (arguments of a Triton kernel are pointers and scalars without Python types)

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
    """Allow the next launch to start, then wait until the previous one has finished. No-op without PDL."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """Return the activation of float32 x; ACTIVATION is one of ACTIVATIONS."""
    if ACTIVATION == "silu":
        return x / (1.0 + tl.exp(-x))
    elif ACTIVATION == "gelu_tanh":
        # 0.5 * (1 + tanh(u)) = sigmoid(2u)
        return x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
    else:
        return 0.5 * x * (1.0 + tl.erf(0.7071067811865476 * x))


@triton.jit
def gate(g, up, ACTIVATION: tl.constexpr, dtype: tl.constexpr):
    """Return activation(g) * up in float32, with the activation rounded to `dtype` first.

    g and up are float32 and already rounded to `dtype`.
    """
    return activate(g, ACTIVATION).to(dtype).to(tl.float32) * up


@triton.jit
def _add_rms_norm_kernel(
    y_ptr, sum_ptr, x_ptr, residual_ptr, weight_ptr, stride_xm, stride_rm, eps,
    C: tl.constexpr, BLOCK_C: tl.constexpr, RESIDUAL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """s = x + residual (if RESIDUAL);  y = s / sqrt(mean(s^2) + eps) * weight. Grid: (M,), one program per row.

    BLOCK_C is C padded to a power of two. y and sum are contiguous [M, C].
    """
    pdl_sync(PDL)
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK_C)
    mask = c < C
    x = tl.load(x_ptr + row * stride_xm + c, mask=mask, other=0.0).to(tl.float32)
    if RESIDUAL:
        x += tl.load(residual_ptr + row * stride_rm + c, mask=mask, other=0.0).to(tl.float32)
        rounded = x.to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + row * C + c, rounded, mask=mask)
        x = rounded.to(tl.float32)
    x = x * tl.rsqrt(tl.sum(x * x, 0) / C + eps)
    y = x * tl.load(weight_ptr + c, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * C + c, y.to(y_ptr.dtype.element_ty), mask=mask)


def add_rms_norm(
    x: Tensor,  # [M, C]
    residual: Tensor | None,  # [M, C]
    weight: Tensor,  # [C], any floating dtype
    eps: float,
    pdl: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return (RMSNorm of x + residual, x + residual). The sum is rounded to the dtype of x before it is normed."""
    rows, cols = x.shape
    x = with_contiguous_rows(x)
    y = torch.empty((rows, cols), dtype=x.dtype, device=x.device)
    if residual is None:
        summed, addend = x, x
    else:
        summed, addend = torch.empty_like(y), with_contiguous_rows(residual)
    if rows:
        block = next_power_of_2(cols)
        _add_rms_norm_kernel[(rows,)](
            y, summed, x, addend, weight, x.stride(0), addend.stride(0), eps,
            C=cols, BLOCK_C=block, RESIDUAL=residual is not None, PDL=pdl, num_warps=min(16, max(1, block // 256)),
            **pdl_option(pdl),
        )  # fmt: skip
    return y, summed


@triton.jit
def _norm_heads(x, partner, weight_ptr, d, partner_d, d_mask, rotary_mask, eps, D: tl.constexpr, dtype: tl.constexpr):
    """Return heads x [BLOCK_H, BLOCK_D] and their rotation partners, normed by the RMS of x and rounded to dtype."""
    scale = tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
    x = x * scale * tl.load(weight_ptr + d, mask=d_mask, other=0.0).to(tl.float32)[None, :]
    partner = partner * scale * tl.load(weight_ptr + partner_d, mask=rotary_mask, other=0.0).to(tl.float32)[None, :]
    return x.to(dtype).to(tl.float32), partner.to(dtype).to(tl.float32)


# slots_ptr is a slice at any offset of a packed step, so its alignment varies.
@triton.jit(do_not_specialize_on_alignment=["slots_ptr"])
def _rope_write_kernel(
    q_ptr, k_ptr, v_ptr, qkv_ptr, cos_ptr, sin_ptr, slots_ptr, q_weight_ptr, k_weight_ptr,
    stride_qkv_t, stride_qkv_h, stride_angle, stride_kb, stride_ks, stride_kh, stride_vb, stride_vs, stride_vh, eps,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, ROTARY_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_H: tl.constexpr, NORM: tl.constexpr, NORM_LAST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Rotate queries and keys and write keys and values to the cache.

    With NORM, a per-head RMSNorm comes before the rotation, or with NORM_LAST as well after it.

        out[d] = x[d] * cos[d] + x[partner(d)] * sin[d], partner(d) = d +- ROTARY_DIM / 2, for d < ROTARY_DIM

    Grid: (T, cdiv(H + 2K, BLOCK_H)). A program handles BLOCK_H heads of one token. A token's H query heads come first
    in qkv [T, H + 2K, D], then its K key heads, then its K value heads. Queries go to q [T, H, D], contiguous; keys and
    values to cache slot slots[t], or nowhere if it is negative (padding).
    """
    pdl_sync(PDL)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    d = tl.arange(0, BLOCK_D)
    d_mask = d < D
    rotary_mask = d < ROTARY_DIM
    partner_d = tl.where(d < ROTARY_DIM // 2, d + ROTARY_DIM // 2, d - ROTARY_DIM // 2)
    dtype: tl.constexpr = qkv_ptr.dtype.element_ty

    head_ptrs = qkv_ptr + token * stride_qkv_t + (head * stride_qkv_h)[:, None]
    head_mask = (head < H + 2 * K)[:, None]
    unrotated = tl.load(head_ptrs + d[None, :], mask=head_mask & d_mask[None, :], other=0.0)
    x = unrotated.to(tl.float32)
    partner_mask = head_mask & rotary_mask[None, :]
    partner = tl.load(head_ptrs + partner_d[None, :], mask=partner_mask, other=0.0).to(tl.float32)
    if NORM and not NORM_LAST:
        for_q, partner_q = _norm_heads(x, partner, q_weight_ptr, d, partner_d, d_mask, rotary_mask, eps, D, dtype)
        for_k, partner_k = _norm_heads(x, partner, k_weight_ptr, d, partner_d, d_mask, rotary_mask, eps, D, dtype)
        query = (head < H)[:, None]
        x, partner = tl.where(query, for_q, for_k), tl.where(query, partner_q, partner_k)
    # cos is 1 and sin is 0 for the elements that are not rotated.
    cos = tl.load(cos_ptr + token * stride_angle + d, mask=rotary_mask, other=1.0).to(tl.float32)
    sin = tl.load(sin_ptr + token * stride_angle + d, mask=rotary_mask, other=0.0).to(tl.float32)
    out = ((x * cos[None, :]).to(dtype).to(tl.float32) + partner * sin[None, :]).to(dtype)
    if NORM and NORM_LAST:
        x = out.to(tl.float32)
        q_weight = tl.load(q_weight_ptr + d, mask=d_mask, other=0.0).to(tl.float32)[None, :]
        k_weight = tl.load(k_weight_ptr + d, mask=d_mask, other=0.0).to(tl.float32)[None, :]
        scale = tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
        out = (x * scale * tl.where((head < H)[:, None], q_weight, k_weight)).to(dtype)

    q_mask = (head < H)[:, None] & d_mask[None, :]
    tl.store(q_ptr + token * H * D + (head * D)[:, None] + d[None, :], out, mask=q_mask)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    if slot >= 0:
        k_head, v_head = head - H, head - H - K
        k_mask = ((k_head >= 0) & (k_head < K))[:, None] & d_mask[None, :]
        v_mask = ((v_head >= 0) & (v_head < K))[:, None] & d_mask[None, :]
        block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
        k_ptrs = k_ptr + block * stride_kb + offset * stride_ks + (k_head * stride_kh)[:, None] + d[None, :]
        tl.store(k_ptrs, out, mask=k_mask)
        v_ptrs = v_ptr + block * stride_vb + offset * stride_vs + (v_head * stride_vh)[:, None] + d[None, :]
        tl.store(v_ptrs, unrotated, mask=v_mask)


def rope_write(
    qkv: Tensor,  # [T, H + 2K, D]
    cos: Tensor,  # [T, 1, rotary_dim], rotary_dim <= D
    sin: Tensor,  # [T, 1, rotary_dim], the first half negated
    k_cache: Tensor,  # [N, B, K, D]
    v_cache: Tensor,  # [N, B, K, D]
    kv_slots: Tensor,  # [T] cache slot of each token, all different; negative: do not write
    q_norm: Tensor | None = None,  # [D]; given together with k_norm
    k_norm: Tensor | None = None,
    eps: float = 0.0,
    pdl: bool = False,
    norm_last: bool = False,
) -> Tensor:
    """Norm (if weights are given) and rotate queries and keys, and write keys and values to the cache.

    With `norm_last` they are rotated first. Returns the queries, [T, H, D].
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
    block_h = 8 if tokens <= 512 else 16  # fewer heads per program where there are few tokens, for more programs
    _rope_write_kernel[(tokens, cdiv(all_heads, block_h))](
        q, k_cache, v_cache, qkv, cos, sin, kv_slots, q_norm if norm else qkv, k_norm if norm else qkv,
        *qkv.stride()[:2], cos.stride(0), *k_cache.stride()[:3], *v_cache.stride()[:3], eps,
        H=heads, K=kv_heads, D=dim, BLOCK_D=next_power_of_2(dim), ROTARY_DIM=cos.shape[-1], BLOCK_SIZE=block_size,
        BLOCK_H=block_h, NORM=norm, NORM_LAST=norm_last, PDL=pdl, num_warps=4, **pdl_option(pdl),
    )  # fmt: skip
    return q


# rows_ptr is a slice at any offset of a packed step, so its alignment varies.
@triton.jit(do_not_specialize_on_alignment=["rows_ptr"])
def _gather_rows_kernel(y_ptr, table_ptr, rows_ptr, stride_table, C, BLOCK_C: tl.constexpr, PDL: tl.constexpr):
    """y[t] = table[rows[t]]. Grid: (T, cdiv(C, BLOCK_C)), one program per BLOCK_C columns of a row."""
    pdl_sync(PDL)
    t = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    row = tl.load(rows_ptr + t).to(tl.int64)
    tl.store(y_ptr + t * C + c, tl.load(table_ptr + row * stride_table + c, mask=c < C), mask=c < C)


def gather_rows(table: Tensor, rows: Tensor, pdl: bool = False) -> Tensor:
    """Return the rows of table [N, C] at the indices rows [T] int64, as [T, C]."""
    table = with_contiguous_rows(table)
    count, width = rows.shape[0], table.shape[1]
    y = torch.empty((count, width), dtype=table.dtype, device=table.device)
    if y.numel():
        block = min(2048, next_power_of_2(width))
        _gather_rows_kernel[(count, cdiv(width, block))](
            y, table, rows, table.stride(0), width, BLOCK_C=block, PDL=pdl, num_warps=4, **pdl_option(pdl)
        )
    return y


@triton.jit
def _gated_kernel(
    y_ptr, x_ptr, stride_xm, W, BLOCK_W: tl.constexpr, ACTIVATION: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """y[M, W] = activation(x[:, :W]) * x[:, W:]. Grid: (M, cdiv(W, BLOCK_W)), one program per BLOCK_W outputs."""
    pdl_sync(PDL)
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK_W + tl.arange(0, BLOCK_W)
    mask = c < W
    g = tl.load(x_ptr + row * stride_xm + c, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * stride_xm + W + c, mask=mask, other=0.0).to(tl.float32)
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    tl.store(y_ptr + row * W + c, gate(g, up, ACTIVATION, dtype).to(dtype), mask=mask)


def gated(gate_up: Tensor, activation: str, pdl: bool = False) -> Tensor:
    """Return activation(gate) * up, [T, W], for gate_up [T, 2W] with the gate first; activation is in ACTIVATIONS."""
    gate_up = with_contiguous_rows(gate_up)
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    y = torch.empty((rows, width), dtype=gate_up.dtype, device=gate_up.device)
    if y.numel():
        block = min(1024, next_power_of_2(width))
        _gated_kernel[(rows, cdiv(width, block))](
            y, gate_up, gate_up.stride(0), width, BLOCK_W=block, ACTIVATION=activation, PDL=pdl, num_warps=4,
            **pdl_option(pdl),
        )  # fmt: skip
    return y


_INT64_MIN = tl.constexpr(-(2**63))  # below every packed (value, index) pair


@triton.jit
def _argmax_chunk_kernel(best_ptr, x_ptr, stride_xm, V, BLOCK_V: tl.constexpr, PDL: tl.constexpr):
    """Write the maximum of each chunk of BLOCK_V logits as a packed int64. Grid: (M, cdiv(V, BLOCK_V)).

    The upper 32 bits hold the value as an order-preserving int32, the lower 32 bits INT32_MAX - index. The maximum of
    packed values is then the highest logit, and among equal ones the lowest index.
    """
    pdl_sync(PDL)
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    v = chunk * BLOCK_V + tl.arange(0, BLOCK_V)
    x = tl.load(x_ptr + row * stride_xm + v, mask=v < V, other=0.0).to(tl.float32)
    # Negative floats get their magnitude bits flipped, so that integer order is float order. Adding 0 turns -0 into 0.
    # NaN sorts above every number.
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    order = tl.where(x != x, 0x7FFFFFFF, bits ^ ((bits >> 31) & 0x7FFFFFFF))
    packed = (order.to(tl.int64) << 32) | (0x7FFFFFFF - v).to(tl.int64)
    packed = tl.where(v < V, packed, _INT64_MIN)
    tl.store(best_ptr + row * tl.num_programs(1) + chunk, tl.max(packed, 0))


@triton.jit
def _argmax_reduce_kernel(index_ptr, best_ptr, num_chunks, BLOCK_CHUNKS: tl.constexpr, PDL: tl.constexpr):
    """Reduce the packed maxima [M, num_chunks] of a row to the index of its highest logit. Grid: (M,)."""
    pdl_sync(PDL)
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, BLOCK_CHUNKS)
    best = tl.max(tl.load(best_ptr + row * num_chunks + chunk, mask=chunk < num_chunks, other=_INT64_MIN), 0)
    tl.store(index_ptr + row, 0x7FFFFFFF - (best & 0x7FFFFFFF))


def argmax(logits: Tensor, pdl: bool = False) -> Tensor:
    """Return the index of each row's highest logit, [M, V] -> [M] int64. Ties go to the first index; NaN is highest."""
    logits = with_contiguous_rows(logits)
    rows, vocab = logits.shape
    block = min(2048, next_power_of_2(vocab))
    chunks = cdiv(vocab, block)
    best = torch.empty((rows, chunks), dtype=torch.int64, device=logits.device)
    indices = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows:
        _argmax_chunk_kernel[(rows, chunks)](
            best, logits, logits.stride(0), vocab, BLOCK_V=block, PDL=pdl, num_warps=4, **pdl_option(pdl)
        )
        _argmax_reduce_kernel[(rows,)](
            indices, best, chunks, BLOCK_CHUNKS=next_power_of_2(chunks), PDL=pdl, num_warps=1, **pdl_option(pdl)
        )
    return indices


def with_contiguous_rows(x: Tensor) -> Tensor:
    """Return x [M, C] itself if its column stride is 1, else a contiguous copy. Rows may be any distance apart."""
    return x if x.stride(1) == 1 else x.contiguous()
