"""Self-attention: QKV projection, rotary embedding, KV cache write, attention, output projection."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from yalis.attention.base import AttentionParams, LayerCache
from yalis.attention.step import StepAttention
from yalis.kernels import ops
from yalis.parallel.linear import column_parallel, row_parallel
from yalis.parallel.norm import HeadNorm, HeadSinks, JointHeadNorm
from yalis.parallel.plan import Grid
from yalis.parallel.weights import RowShard
from yalis.spec import ModelSpec


class SelfAttention(nn.Module):
    """The query heads of this rank and the KV heads that they attend to."""

    def __init__(
        self, spec: ModelSpec, grid: Grid, layer: int, prefix: str, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        heads, kv_heads = grid.heads(spec.num_heads, spec.num_kv_heads)
        self.num_heads, self.num_kv_heads, self.head_dim = len(heads), len(kv_heads), spec.head_dim
        self.pad_before, self.pad_after = head_padding(heads, kv_heads, spec.num_heads // spec.num_kv_heads)
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
        self.joint_norm = JointHeadNorm(grid, prefix, spec, dtype, device) if spec.joint_qk_norm else None
        self.sinks: HeadSinks | None = None
        if spec.attention_sinks:
            self.sinks = HeadSinks(f"{prefix}.sinks", spec.num_heads, heads, dtype, device)
        self.eps = spec.norm_eps

    def forward(
        self,
        x: Tensor,
        rope: tuple[Tensor, Tensor],
        cache: LayerCache,
        step: StepAttention,
        rows: Tensor | None = None,
    ) -> Tensor:
        """Return the attention output of x [T, hidden / c], already normed; with `rows`, of these rows of x only.

        Keys and values of all tokens are written to the cache in either case.
        """
        H, K = self.num_heads, self.num_kv_heads
        qkv = self.qkv(x).view(x.shape[0], H + 2 * K, self.head_dim)
        if self.joint_norm is not None:
            qkv = self.joint_norm(qkv)
        q_norm, k_norm = (None if head is None else head.weight for head in (self.q_norm, self.k_norm))
        q = ops.rope_write(qkv, *rope, *cache, step.batch.kv_slots, q_norm, k_norm, self.eps)
        if self.pad_before or self.pad_after:
            q = pad(q, (0, 0, self.pad_before, self.pad_after))
        attended = step.attend(q, cache, self.params if self.sinks is None else self._params_with(self.sinks.weight))
        if self.pad_before or self.pad_after:
            attended = attended[:, self.pad_before : self.pad_before + H]
        attended = attended.reshape(x.shape[0], H * self.head_dim)
        y: Tensor = self.out(attended if rows is None else ops.gather_rows(attended, rows))
        return y

    def _params_with(self, sinks: Tensor) -> AttentionParams:
        if self.pad_before or self.pad_after:
            sinks = pad(sinks, (self.pad_before, self.pad_after))
        return AttentionParams(self.params.scale, self.params.window, self.params.softcap, sinks)


def head_padding(heads: range, kv_heads: range, group: int) -> tuple[int, int]:
    """Return how many zero query heads to add before and after the heads of this rank.

    Backends need equally many query heads for each KV head. If the shard starts or ends inside the `group` of a KV
    head, the missing ones are padded. With a single KV head no padding is needed.
    """
    return (heads.start % group, -heads.stop % group) if len(kv_heads) > 1 else (0, 0)


def _qkv_shards(spec: ModelSpec, prefix: str, heads: range, kv_heads: range) -> list[RowShard]:
    """Return the rows of q, k and v for these heads, from three matrices or from one fused QKV matrix."""
    D = spec.head_dim
    sizes = {"q": spec.num_heads * D, "k": spec.num_kv_heads * D, "v": spec.num_kv_heads * D}
    shards, offset = [], 0
    for part, size in sizes.items():
        kept = heads if part == "q" else kv_heads
        if spec.fused_projections:
            rows = range(offset + kept.start * D, offset + kept.stop * D)
            shards.append(RowShard(f"{prefix}.qkv_proj", sum(sizes.values()), rows))
        else:
            shards.append(RowShard(f"{prefix}.{part}_proj", size, range(kept.start * D, kept.stop * D)))
        offset += size
    return shards
