"""torch's scaled_dot_product_attention over keys and values gathered from the paged cache. Runs on any device.

A step is divided into groups of adjacent sequences that one call can compute: decoding sequences of any context
lengths, or prompts with equal numbers of new and cached tokens. Keys are right-aligned, so that the same code computes
slots and mask for decode, chunked prefill and sliding windows.

Shapes: S sequences of a group · Q new tokens per sequence · L keys per sequence · H query heads · K KV heads ·
G = H / K · D head_dim · N blocks of the cache · B tokens per block.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from yalis.attention.base import AttentionBackend, AttentionNeeds, AttentionParams, ForwardBatch, LayerCache
from yalis.attention.context_slots import slots_at_positions


@dataclass(frozen=True)
class KeyRange:
    """The last L positions of each context of a group: all keys that its queries may attend to under one window."""

    length: int  # L
    slot_range: slice | None  # the slots, if they are contiguous
    slots: Tensor | None  # [S * L] otherwise
    mask: Tensor | None  # added to the scores, broadcast to [S, heads, Q, L]
    causal: bool  # use the kernel's built-in causal mask instead of `mask`


@dataclass
class SequenceGroup:
    """Adjacent sequences of a step that are computed by one call."""

    first: int  # index of the first sequence
    size: int  # S
    row: int  # first token of the group among the tokens of the step
    queries: int  # Q
    contexts: tuple[int, ...]
    key_ranges: dict[int | None, KeyRange] = field(default_factory=dict)  # by window


class SdpaAttention(AttentionBackend):
    name = "sdpa"

    @classmethod
    def unusable(cls, needs: AttentionNeeds) -> str | None:
        return None

    def prepare(self, batch: ForwardBatch) -> list[SequenceGroup]:
        return group_sequences(batch.query_lens, batch.context_lens)

    def attend(
        self, q: Tensor, cache: LayerCache, batch: ForwardBatch, shared: list[SequenceGroup], params: AttentionParams
    ) -> Tensor:
        if len(shared) == 1:
            return self.attend_group(q, cache, batch, shared[0], params)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        for group in shared:
            end = group.row + group.size * group.queries
            out[group.row : end] = self.attend_group(q[group.row : end], cache, batch, group, params)
        return out

    def attend_group(
        self, q: Tensor, cache: LayerCache, batch: ForwardBatch, group: SequenceGroup, params: AttentionParams
    ) -> Tensor:
        """Return the attention [S * Q, H, D] of one group; q holds the rows of this group only."""
        keys = group.key_ranges.get(params.window)
        if keys is None:
            allow_causal = params.softcap is None and params.sinks is None
            keys = make_key_range(group, batch, params.window, cache.k.shape[1], q.dtype, allow_causal)
            group.key_ranges[params.window] = keys
        k, v = gather_kv(cache.k, group.size, keys), gather_kv(cache.v, group.size, keys)
        _, heads, dim = q.shape
        kv_heads = k.shape[1]
        if group.queries == 1:
            # The query heads that share a KV head become rows of one query block, so that no key is repeated.
            q = q.reshape(group.size, kv_heads, heads // kv_heads, dim)
            return self._compute(q, k, v, keys, params).reshape(-1, heads, dim)
        q = q.reshape(group.size, group.queries, heads, dim).transpose(1, 2)
        return self._compute(q, k, v, keys, params).transpose(1, 2).reshape(-1, heads, dim)

    def _compute(self, q: Tensor, k: Tensor, v: Tensor, keys: KeyRange, params: AttentionParams) -> Tensor:
        grouped = q.shape[1] != k.shape[1]
        if params.softcap is not None or params.sinks is not None:
            return explicit_attention(q, k, v, keys.mask, params)
        if grouped and q.is_cuda and not (keys.causal and q.dtype != torch.float32):
            # Only torch's flash kernel supports grouped-query heads. The others would fall back to the math kernel,
            # which materializes the whole score matrix.
            k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
            grouped = False
        return scaled_dot_product_attention(
            q, k, v, attn_mask=keys.mask, is_causal=keys.causal, scale=params.scale, enable_gqa=grouped
        )


def group_sequences(query_lens: tuple[int, ...], context_lens: tuple[int, ...]) -> list[SequenceGroup]:
    """Group adjacent sequences that all decode, or that have equal numbers of new tokens and equal context lengths."""
    groups: list[SequenceGroup] = []
    row = first = 0
    while first < len(query_lens):
        queries, end = query_lens[first], first + 1
        while (
            end < len(query_lens)
            and query_lens[end] == queries
            and (queries == 1 or context_lens[end] == context_lens[first])
        ):
            end += 1
        groups.append(SequenceGroup(first, end - first, row, queries, context_lens[first:end]))
        row += queries * (end - first)
        first = end
    return groups


def make_key_range(
    group: SequenceGroup,
    batch: ForwardBatch,
    window: int | None,
    block_size: int,
    dtype: torch.dtype,
    allow_causal: bool,
) -> KeyRange:
    """Return slots and mask of the last L positions of each context, where L reaches back to the group's first key.

    With `allow_causal`, a plain causal mask is not built but requested from the kernel.
    """
    max_context = max(group.contexts)
    length = max_context if window is None else min(max_context, window + group.queries - 1)
    windowed = window is not None and window < max_context
    causal = allow_causal and group.queries == max_context and group.queries > 1 and not windowed
    mask: Tensor | None = None
    tables = batch.block_tables[group.first : group.first + group.size]
    slot_range = find_contiguous_slots(tables, group, length, block_size)
    slots: Tensor | None = None
    device = tables.device
    columns = torch.arange(length, device=device)
    positions = batch.context_len[group.first : group.first + group.size, None] + (columns - length)
    if slot_range is None:
        # Positions before the start of a sequence read its first token, and are masked below.
        slots = slots_at_positions(tables, positions.clamp(min=0), block_size).flatten()
    if group.queries == 1:
        if min(group.contexts) < length:
            mask = additive_mask(positions >= 0, dtype)[:, None, None, :]
    elif not causal:
        query = torch.arange(group.queries, device=device)[:, None] + (length - group.queries)
        allowed = columns <= query
        if window is not None:
            allowed &= columns > query - window
        mask = additive_mask(allowed, dtype)[None, None]
    return KeyRange(length, slot_range, slots, mask, causal)


def find_contiguous_slots(tables: Tensor, group: SequenceGroup, length: int, block_size: int) -> slice | None:
    """Return the slots as a slice if the group is one sequence with contiguous blocks, whose keys are then a view.

    Returns None on a GPU, where reading the block table would synchronize with the device.
    """
    if group.size > 1 or tables.device.type != "cpu":
        return None
    context = group.contexts[0]
    blocks = tables[0].tolist()[(context - length) // block_size : (context - 1) // block_size + 1]
    if blocks != list(range(blocks[0], blocks[0] + len(blocks))):
        return None
    start = blocks[0] * block_size + (context - length) % block_size
    return slice(start, start + length)


def gather_kv(cached: Tensor, size: int, keys: KeyRange) -> Tensor:
    """Return [S, K, L, D] of one layer's keys or values, cached [N, B, K, D]."""
    _, _, heads, dim = cached.shape
    flat = cached.view(-1, heads * dim)
    rows = flat[keys.slot_range] if keys.slots is None else flat.index_select(0, keys.slots)
    return rows.view(size, keys.length, heads, dim).transpose(1, 2)


def additive_mask(allowed: Tensor, dtype: torch.dtype) -> Tensor:
    """Return 0 where allowed and -inf elsewhere. torch's CPU kernel would convert a boolean mask in every call."""
    return torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill_(~allowed, -math.inf)


def explicit_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, params: AttentionParams) -> Tensor:
    """Return attention from all scores in float32, with softcap and sinks: softcap * tanh(scale * q k^T / softcap).

    q is [S, heads, Q, D], k and v are [S, K, L, D]. Query heads that share a KV head may be rows of one head of q.
    """
    size, heads, queries, dim = q.shape
    kv_heads, length = k.shape[1], k.shape[2]
    softcap = params.softcap
    folded = (q.float() * (params.scale / (softcap or 1.0))).reshape(size, kv_heads, -1, dim)
    scores = torch.matmul(folded, k.float().transpose(2, 3)).view(size, heads, queries, length)
    if softcap is not None:
        scores = scores.tanh_().mul_(softcap)
    if mask is not None:
        scores += mask
    if params.sinks is not None:
        sinks = params.sinks.float().view(heads, -1, 1).expand(size, heads, queries, 1)
        scores = torch.cat((scores, sinks), dim=-1)
    weights = scores.softmax(-1)[..., :length].reshape(size, kv_heads, -1, length)
    return torch.matmul(weights, v.float()).view(size, heads, queries, dim).to(q.dtype)
