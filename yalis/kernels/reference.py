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
