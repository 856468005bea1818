"""What the kernels compute, in plain torch: slow, readable, and what they are tested against."""

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
    block_tables: Tensor,  # [S, most blocks]
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Causal attention of each sequence's last tokens over its own blocks, in the dtype of q."""
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
        hidden = key > query
        if window is not None:
            hidden |= key <= query - window
        weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
        out[rows] = torch.einsum("hqk,khd->qhd", weights, v)
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dimension, rounded once to the dtype of x."""
    wide = x.double()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * weight.double()).to(x.dtype)


def add_rms_norm(x: Tensor, branch: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(the norm of x + branch, x + branch)."""
    summed = x if branch is None else x + branch
    return rms_norm(summed, weight, eps), summed


def linear(
    x: Tensor,  # [R, K]
    weight: Tensor,  # [N, K]
    bias: Tensor | None = None,
) -> Tensor:
    """x times weight transposed, plus bias."""
    y = x.double() @ weight.double().T
    if bias is not None:
        y = y + bias.double()
    return y.to(x.dtype)


def gated(gate_up: Tensor, activation: str) -> Tensor:
    """activation(gate) * up, for the two halves of gate_up's last dimension; silu, gelu or gelu_tanh."""
    gate, up = gate_up.chunk(2, dim=-1)
    wide = gate.double()
    if activation == "silu":
        turned = wide.sigmoid() * wide
    else:
        turned = torch.nn.functional.gelu(wide, approximate="tanh" if activation == "gelu_tanh" else "none")
    return turned.to(gate.dtype) * up


def gated_linear(
    x: Tensor,  # [R, K]
    weight: Tensor,  # [2W, K]
    activation: str,
    bias: Tensor | None = None,
) -> Tensor:
    """activation(gate) * up, both products of x with their half of weight."""
    return gated(linear(x, weight, bias), activation)


def rope_write(
    qkv: Tensor,  # [T, H + 2K, D]
    cos: Tensor,  # [T, 1, dim]
    sin: Tensor,  # [T, 1, dim], with the sign of the first half
    k_cache: Tensor,  # [N, B, K, D]
    v_cache: Tensor,  # [N, B, K, D]
    slots: Tensor,  # [T], negative: nowhere
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """Norm and rotate queries and keys, write keys and values to the cache; the queries [T, H, D]."""
    block_size, kv_heads = k_cache.shape[1:3]
    q, k, v = qkv.split((qkv.shape[1] - 2 * kv_heads, kv_heads, kv_heads), dim=1)
    if q_norm is not None and k_norm is not None:
        q, k = rms_norm(q, q_norm, eps), rms_norm(k, k_norm, eps)
    q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            k_cache[slot // block_size, slot % block_size] = k[token]
            v_cache[slot // block_size, slot % block_size] = v[token]
    return q


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    dim = cos.shape[-1]
    turned, rest = x[..., :dim], x[..., dim:]
    first, second = turned.chunk(2, dim=-1)
    partner = torch.cat((second, first), dim=-1)
    out = ((turned * cos).double() + partner.double() * sin.double()).to(x.dtype)
    return torch.cat((out, rest), dim=-1)
