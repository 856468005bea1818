"""Self-attention: project, rotate, write the cache, attend, project back."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from yalis.attention.base import AttentionParams, LayerCache
from yalis.attention.step import StepAttention
from yalis.kernels import ops
from yalis.parallel.linear import column_parallel, row_parallel
from yalis.parallel.norm import HeadNorm
from yalis.parallel.plan import Grid
from yalis.parallel.weights import RowShard
from yalis.spec import ModelSpec


class SelfAttention(nn.Module):
    """This rank's query heads and the key/value heads they read."""

    def __init__(
        self, spec: ModelSpec, grid: Grid, layer: int, prefix: str, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        heads, kv_heads = grid.heads(spec.num_heads, spec.num_kv_heads)
        self.num_heads, self.num_kv_heads, self.head_dim = len(heads), len(kv_heads), spec.head_dim
        self.before, self.behind = uneven_edges(heads, kv_heads, spec.num_heads // spec.num_kv_heads)
        self.params = AttentionParams(spec.attention_scale, spec.windows[layer], spec.attention_softcap)
        shards = _qkv_shards(spec, prefix, heads, kv_heads)
        self.qkv = column_parallel(grid, shards, spec.hidden_size, spec.qkv_bias, dtype, device)
        kept = range(heads.start * spec.head_dim, heads.stop * spec.head_dim)
        width = spec.num_heads * spec.head_dim
        self.out = row_parallel(grid, f"{prefix}.o_proj", width, kept, spec.hidden_size, spec.out_bias, dtype, device)
        self.q_norm, self.k_norm = (
            HeadNorm(f"{prefix}.{name}", spec.head_dim, dtype, device) if spec.qk_norm else None
            for name in ("q_norm", "k_norm")
        )
        self.eps = spec.norm_eps

    def forward(
        self,
        x: Tensor,
        rope: tuple[Tensor, Tensor],
        cache: LayerCache,
        step: StepAttention,
        rows: Tensor | None = None,
    ) -> Tensor:
        """What x, normed, attends to; of these rows, if not of all."""
        H, K = self.num_heads, self.num_kv_heads
        qkv = self.qkv(x).view(x.shape[0], H + 2 * K, self.head_dim)
        q_norm, k_norm = (None if head is None else head.weight for head in (self.q_norm, self.k_norm))
        q = ops.rope_write(qkv, *rope, *cache, step.batch.kv_slots, q_norm, k_norm, self.eps)
        if self.before or self.behind:
            q = pad(q, (0, 0, self.before, self.behind))
        attended = step.attend(q, cache, self.params)
        if self.before or self.behind:
            attended = attended[:, self.before : self.before + H]
        attended = attended.reshape(x.shape[0], H * self.head_dim)
        y: Tensor = self.out(attended if rows is None else ops.gather_rows(attended, rows))
        return y


def uneven_edges(heads: range, kv_heads: range, group: int) -> tuple[int, int]:
    """Query heads missing before and behind these, where a share begins or ends inside a key/value head's group.

    Backends want as many queries for each key/value head; empty ones fill the gap. A lone key/value head has no gap.
    """
    return (heads.start % group, -heads.stop % group) if len(kv_heads) > 1 else (0, 0)


def _qkv_shards(spec: ModelSpec, prefix: str, heads: range, kv_heads: range) -> list[RowShard]:
    """Rows of q, k and v for these heads, from three matrices or from a fused one that stacks them."""
    D = spec.head_dim
    sizes = {"q": spec.num_heads * D, "k": spec.num_kv_heads * D, "v": spec.num_kv_heads * D}
    shards, at = [], 0
    for part, size in sizes.items():
        kept = heads if part == "q" else kv_heads
        if spec.fused_projections:
            rows = range(at + kept.start * D, at + kept.stop * D)
            shards.append(RowShard(f"{prefix}.qkv_proj", sum(sizes.values()), rows))
        else:
            shards.append(RowShard(f"{prefix}.{part}_proj", size, range(kept.start * D, kept.stop * D)))
        at += size
    return shards
