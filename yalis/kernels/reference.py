"""Reference implementations of the kernels in plain torch: slow and readable; tests compare the kernels with them.

Shapes: T tokens of a step, packed · S sequences · H query heads · K KV heads · D head_dim · N blocks of the cache ·
B tokens per block. Matrix products are [M, K] by [N, K] transposed.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def paged_attention(
    q: Tensor,  # [T, H, D]
    k_cache: Tensor,  # [N, B, K, D]
    v_cache: Tensor,  # [N, B, K, D]
    query_start: Tensor,  # [S + 1]
    context_len: Tensor,  # [S]
    block_tables: Tensor,  # [S, max blocks]
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,  # [H]
) -> Tensor:
    """Return the causal attention [T, H, D] of each sequence's new tokens over its own blocks, in the dtype of q."""
    out = torch.empty_like(q)
    group = q.shape[1] // k_cache.shape[2]
    starts = query_start.tolist()
    for i, context in enumerate(context_len.tolist()):
        rows = slice(starts[i], starts[i + 1])
        blocks = block_tables[i, : math.ceil(context / k_cache.shape[1])].long()
        k, v = (cache[blocks].flatten(0, 1)[:context].repeat_interleave(group, dim=1) for cache in (k_cache, v_cache))
        scores = torch.einsum("qhd,khd->hqk", q[rows], k) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        key = torch.arange(context, device=q.device)
        query = key[context - (starts[i + 1] - starts[i]) :, None]
        masked = key > query
        if window is not None:
            masked |= key <= query - window
        scores = scores.masked_fill(masked, -math.inf)
        if sinks is not None:
            scores = torch.cat((scores, sinks.to(scores.dtype).view(-1, 1, 1).expand_as(scores[..., :1])), dim=-1)
        weights = scores.softmax(-1)[..., :context]
        out[rows] = torch.einsum("hqk,khd->qhd", weights, v)
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x / rms(x) * weight over the last dimension, computed in float64 and rounded to the dtype of x."""
    wide = x.double()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * weight.double()).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return (RMSNorm of x + residual, x + residual)."""
    summed = x if residual is None else x + residual
    return rms_norm(summed, weight, eps), summed


def linear(
    x: Tensor,  # [M, K]
    weight: Tensor,  # [N, K]
    bias: Tensor | None = None,
) -> Tensor:
    """Return x weight^T + bias, [M, N]."""
    y = x.double() @ weight.double().T
    if bias is not None:
        y = y + bias.double()
    return y.to(x.dtype)


def gated(gate_up: Tensor, activation: str) -> Tensor:
    """Return activation(gate) * up for the two halves of the last dimension; activation: silu, gelu or gelu_tanh."""
    gate, up = gate_up.chunk(2, dim=-1)
    wide = gate.double()
    if activation == "silu":
        activated = wide.sigmoid() * wide
    else:
        activated = torch.nn.functional.gelu(wide, approximate="tanh" if activation == "gelu_tanh" else "none")
    return activated.to(gate.dtype) * up


def gated_linear(
    x: Tensor,  # [M, K]
    weight: Tensor,  # [2N, K], the rows of gate before those of up
    activation: str,
    bias: Tensor | None = None,
) -> Tensor:
    """Return activation(gate) * up, [M, N], where gate and up are the products of x with their half of weight."""
    return gated(linear(x, weight, bias), activation)


def rope_write(
    qkv: Tensor,  # [T, H + 2K, D]
    cos: Tensor,  # [T, 1, rotary_dim]
    sin: Tensor,  # [T, 1, rotary_dim], the first half negated
    k_cache: Tensor,  # [N, B, K, D]
    v_cache: Tensor,  # [N, B, K, D]
    kv_slots: Tensor,  # [T] cache slot of each token; negative: do not write
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """Norm and rotate queries and keys, and write keys and values to the cache. Returns the queries, [T, H, D]."""
    block_size, kv_heads = k_cache.shape[1:3]
    q, k, v = qkv.split((qkv.shape[1] - 2 * kv_heads, kv_heads, kv_heads), dim=1)
    if q_norm is not None and k_norm is not None:
        q, k = rms_norm(q, q_norm, eps), rms_norm(k, k_norm, eps)
    q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
    for token, slot in enumerate(kv_slots.tolist()):
        if slot >= 0:
            k_cache[slot // block_size, slot % block_size] = k[token]
            v_cache[slot // block_size, slot % block_size] = v[token]
    return q


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    dim = cos.shape[-1]
    rotated, rest = x[..., :dim], x[..., dim:]
    first, second = rotated.chunk(2, dim=-1)
    partner = torch.cat((second, first), dim=-1)
    out = ((rotated * cos).double() + partner.double() * sin.double()).to(x.dtype)
    return torch.cat((out, rest), dim=-1)


def expert_linear(
    x: Tensor,  # [N, K]
    weight: Tensor,  # [E, O, K]
    experts: Tensor,  # [P], P a multiple of N
    bias: Tensor | None = None,  # [E, O]
) -> Tensor:
    """Return [P, O]: pair p is row p // (P / N) of x times the matrix of expert experts[p]; zeros if that is -1."""
    y = x.new_zeros(experts.shape[0], weight.shape[1])
    for expert in range(weight.shape[0]):
        pairs = (experts == expert).nonzero().flatten()
        rows = x[pairs * x.shape[0] // experts.shape[0]]
        y[pairs] = linear(rows, weight[expert], None if bias is None else bias[expert])
    return y
