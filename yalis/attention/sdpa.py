"""torch's scaled_dot_product_attention over keys and values gathered from the paged cache. Runs anywhere.

A step is cut into groups of neighbouring sequences that one call can serve: decoding sequences of any contexts, or
equally long prompts. Their keys are right-aligned, so one rule gives slots and mask for decode, chunk and window.

Shapes: S sequences of a group · Q tokens each brings · L keys each may see · H query heads · K key/value heads ·
G = H / K · D head_dim.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from yalis.attention.base import AttentionBackend, AttentionNeeds, AttentionParams, ForwardBatch, LayerCache
from yalis.attention.spans import slots_of


@dataclass(frozen=True)
class Span:
    """The keys a group sees under one window."""

    length: int  # L
    run: slice | None  # the slots, where they lie in a row
    slots: Tensor | None  # [S * L] otherwise
    mask: Tensor | None  # added to scores, broadcast over [S, heads, Q, L]
    causal: bool  # the mask is the plain triangle


@dataclass
class Group:
    first: int  # of its sequences
    size: int  # S
    row: int  # of its first token among the step's
    queries: int  # Q
    contexts: tuple[int, ...]
    spans: dict[int | None, Span] = field(default_factory=dict)  # by window


class SdpaAttention(AttentionBackend):
    name = "sdpa"

    @classmethod
    def unusable(cls, needs: AttentionNeeds) -> str | None:
        return None

    def prepare(self, batch: ForwardBatch) -> list[Group]:
        return group(batch.query_lens, batch.context_lens)

    def attend(
        self, q: Tensor, cache: LayerCache, batch: ForwardBatch, shared: list[Group], params: AttentionParams
    ) -> Tensor:
        if len(shared) == 1:
            return self.attend_group(q, cache, batch, shared[0], params)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        for part in shared:
            end = part.row + part.size * part.queries
            out[part.row : end] = self.attend_group(q[part.row : end], cache, batch, part, params)
        return out

    def attend_group(
        self, q: Tensor, cache: LayerCache, batch: ForwardBatch, part: Group, params: AttentionParams
    ) -> Tensor:
        """The group's rows of q alone."""
        span = part.spans.get(params.window)
        if span is None:
            triangle = params.softcap is None
            span = find_span(part, batch, params.window, cache.k.shape[1], q.dtype, triangle)
            part.spans[params.window] = span
        k, v = gather(cache.k, part.size, span), gather(cache.v, part.size, span)
        _, heads, dim = q.shape
        kv_heads = k.shape[1]
        if part.queries == 1:
            # The queries that share a key head become rows of one query block: no key is repeated.
            q = q.reshape(part.size, kv_heads, heads // kv_heads, dim)
            return self._score(q, k, v, span, params).reshape(-1, heads, dim)
        q = q.reshape(part.size, part.queries, heads, dim).transpose(1, 2)
        return self._score(q, k, v, span, params).transpose(1, 2).reshape(-1, heads, dim)

    def _score(self, q: Tensor, k: Tensor, v: Tensor, span: Span, params: AttentionParams) -> Tensor:
        grouped = q.shape[1] != k.shape[1]
        if params.softcap is not None:
            return capped_attention(q, k, v, span.mask, params.scale, params.softcap)
        if grouped and q.is_cuda and not (span.causal and q.dtype != torch.float32):
            # Only the flash kernel shares keys between heads; the others would fall back to whole score matrices.
            k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
            grouped = False
        return scaled_dot_product_attention(
            q, k, v, attn_mask=span.mask, is_causal=span.causal, scale=params.scale, enable_gqa=grouped
        )


def group(query_lens: tuple[int, ...], context_lens: tuple[int, ...]) -> list[Group]:
    """Neighbours go together when all decode, or bring the same number of tokens to contexts of the same length."""
    groups: list[Group] = []
    row = first = 0
    while first < len(query_lens):
        queries, end = query_lens[first], first + 1
        while (
            end < len(query_lens)
            and query_lens[end] == queries
            and (queries == 1 or context_lens[end] == context_lens[first])
        ):
            end += 1
        groups.append(Group(first, end - first, row, queries, context_lens[first:end]))
        row += queries * (end - first)
        first = end
    return groups


def find_span(
    part: Group, batch: ForwardBatch, window: int | None, block_size: int, dtype: torch.dtype, triangle: bool
) -> Span:
    """Slots and mask of the last L positions of each context, L being what the earliest query of the group can reach.

    With `triangle`, a mask that is the plain one is only named, for kernels that know it.
    """
    longest = max(part.contexts)
    length = longest if window is None else min(longest, window + part.queries - 1)
    windowed = window is not None and window < longest
    causal = triangle and part.queries == longest and part.queries > 1 and not windowed
    mask: Tensor | None = None
    tables = batch.block_tables[part.first : part.first + part.size]
    run = find_run(tables, part, length, block_size)
    slots: Tensor | None = None
    device = tables.device
    reach = torch.arange(length, device=device)
    positions = batch.context_len[part.first : part.first + part.size, None] + (reach - length)
    if run is None:
        # A place before a sequence's start reads its first token, and is masked below.
        slots = slots_of(tables, positions.clamp(min=0), block_size).flatten()
    if part.queries == 1:
        if min(part.contexts) < length:
            mask = additive(positions >= 0, dtype)[:, None, None, :]
    elif not causal:
        query = torch.arange(part.queries, device=device)[:, None] + (length - part.queries)
        seen = reach <= query
        if window is not None:
            seen &= reach > query - window
        mask = additive(seen, dtype)[None, None]
    return Span(length, run, slots, mask, causal)


def find_run(tables: Tensor, part: Group, length: int, block_size: int) -> slice | None:
    """The slots of a lone sequence whose blocks lie in a row: its keys are then a view.

    Only where reading the tables does not wait for a device.
    """
    if part.size > 1 or tables.device.type != "cpu":
        return None
    context = part.contexts[0]
    blocks = tables[0].tolist()[(context - length) // block_size : (context - 1) // block_size + 1]
    if blocks != list(range(blocks[0], blocks[0] + len(blocks))):
        return None
    start = blocks[0] * block_size + (context - length) % block_size
    return slice(start, start + length)


def gather(cached: Tensor, size: int, span: Span) -> Tensor:
    """[S, K, L, D] of one layer's keys or values, [N, B, K, D]."""
    _, _, heads, dim = cached.shape
    flat = cached.view(-1, heads * dim)
    rows = flat[span.run] if span.slots is None else flat.index_select(0, span.slots)
    return rows.view(size, span.length, heads, dim).transpose(1, 2)


def additive(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where seen, -inf elsewhere: torch's CPU kernel converts a boolean mask in every call."""
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, -math.inf)


def capped_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, softcap: float) -> Tensor:
    """Attention whose scores pass through cap * tanh(score / cap), in float32.

    q is [S, heads, Q, D], k and v are [S, K, L, D].
    """
    size, heads, queries, dim = q.shape
    kv_heads, length = k.shape[1], k.shape[2]
    folded = (q.float() * (scale / softcap)).reshape(size, kv_heads, -1, dim)
    scores = torch.matmul(folded, k.float().transpose(2, 3)).tanh_().mul_(softcap).view(size, heads, queries, length)
    if mask is not None:
        scores += mask
    weights = scores.softmax(-1).view(size, kv_heads, -1, length)
    return torch.matmul(weights, v.float()).view(size, heads, queries, dim).to(q.dtype)
