"""Causal attention over the paged KV cache, in Triton. kernels/reference.py computes the same in plain torch.

    out = softmax(mask(scale * q k^T)) v, with grouped-query heads, an optional sliding window and score soft-capping

With sinks, the softmax of a query also has the logit sinks[head], whose value is zero: the sums of a row start with it.

A step is at most two launches: `_paged_prefill_kernel` for sequences with several new tokens, `_paged_decode_kernel`
for those with one. Both are flash attention with an online softmax (kernels/online_softmax.py); the query heads that
share a KV head are rows of one tile, so each key is read once for all of them.

Decoding divides contexts into KV splits (flash-decoding; kernels/kv_splits.py), so that small batches, or one long
context among short ones, still fill the GPU. The last split of a context to finish merges all of them in order, so the
result does not depend on timing. Launch sizes depend on the number of sequences alone, so a captured CUDA graph serves
any context lengths.

Shapes: T tokens of a step, packed · S sequences · H query heads · K KV heads · G = H / K · D head_dim · N blocks of the
cache · B tokens per block.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
# (arguments of a Triton kernel are pointers and scalars without Python types)

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from yalis.kernels.fused import pdl_sync
from yalis.kernels.gpu_limits import GpuLimits, gpu_limits
from yalis.kernels.integer_math import cdiv, next_power_of_2
from yalis.kernels.kv_splits import BLOCK_SPLITS, plan_splits
from yalis.kernels.online_softmax import LOG2E, MASKED_SCORE, load_block_ids, online_softmax_step
from yalis.kernels.pdl import pdl_option
from yalis.kernels.tma import make_descriptor

PROGRAMS_PER_SM = 4  # decode programs that keep an SM busy
_MERGE_ELEMENTS = 4096  # elements of partial outputs that a program merges at a time
_MAX_COUNTERS = 1 << 20


# Arguments that vary from step to step are not specialized: each value would compile another kernel.
@triton.jit(do_not_specialize=["stride_ts", "stride_tb", "window"])
def _paged_prefill_kernel(
    out_ptr, q_ptr, k_cache, v_cache, query_start_ptr, context_len_ptr, tables_ptr, tile_sequence_ptr, tile_start_ptr,
    stride_ot, stride_oh, stride_qt, stride_qh, stride_kb, stride_ks, stride_kh, stride_vb, stride_vs, stride_vh,
    stride_ts, stride_tb, scale, window, softcap, sinks_ptr,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, USE_TMA: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
):  # fmt: skip
    """Attention of sequences with several queries. Grid: (num_tiles, K).

    A program computes one tile: BLOCK_M // GROUP consecutive queries of one sequence, with the GROUP query heads of one
    KV head. Row r is query r // GROUP and head r % GROUP; rows beyond GROUP * (BLOCK_M // GROUP) are idle.
    tile_sequence_ptr [num_tiles] maps a tile to its sequence, tile_start_ptr [S] a sequence to its first tile.
    """
    # Later tiles attend to more keys. They start first, so that short ones fill the tail of the launch.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
    sequence = tl.load(tile_sequence_ptr + tile)
    first_token = tl.load(query_start_ptr + sequence).to(tl.int32)
    num_queries = tl.load(query_start_ptr + sequence + 1).to(tl.int32) - first_token
    context = tl.load(context_len_ptr + sequence).to(tl.int32)
    QUERIES: tl.constexpr = BLOCK_M // GROUP  # of a tile
    first_query = (tile - tl.load(tile_start_ptr + sequence)).to(tl.int32) * QUERIES
    if first_query >= num_queries:
        return  # padding of a captured prefill

    r = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    query = first_query + r // GROUP
    query_position = query + (context - num_queries)
    head = kv_head * GROUP + r % GROUP
    token = (first_token + query).to(tl.int64)
    row_mask = (query < num_queries) & (r < QUERIES * GROUP)
    mask = row_mask[:, None] & (d < HEAD_DIM)[None, :]
    q = tl.load(q_ptr + (token * stride_qt + head * stride_qh)[:, None] + d[None, :], mask=mask, other=0.0)

    table_ptr = tables_ptr + sequence * stride_ts
    m_i = tl.full([BLOCK_M], MASKED_SCORE, tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    if SINKS:
        m_i = tl.load(sinks_ptr + head).to(tl.float32) * LOG2E
        l_i += 1.0
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)

    # Keys [low, stop) are visited. Every row attends to all of [clear, full); the tiles before (window) and after
    # (causality) are masked.
    first_position = context - num_queries + first_query
    end = tl.minimum(context, first_position + QUERIES)
    stop = (end + BLOCK_N - 1) // BLOCK_N * BLOCK_N
    low = 0
    clear = 0
    if WINDOW:
        low = tl.maximum(0, first_position - window + 1) // BLOCK_N * BLOCK_N
        clear = tl.minimum((tl.maximum(0, end - window) + BLOCK_N - 1) // BLOCK_N * BLOCK_N, stop)
    full = tl.maximum(clear, (first_position + 1) // BLOCK_N * BLOCK_N)
    next_ids = load_block_ids(table_ptr, stride_tb, low, end, BLOCK_SIZE, BLOCK_N, USE_TMA)
    if WINDOW:
        for start in range(low, clear, BLOCK_N):
            block_ids = next_ids
            next_ids = load_block_ids(table_ptr, stride_tb, start + BLOCK_N, end, BLOCK_SIZE, BLOCK_N, USE_TMA)
            m_i, l_i, acc = online_softmax_step(
                q, m_i, l_i, acc, block_ids, k_cache, v_cache, start, end, query_position, kv_head,
                stride_kb, stride_ks, stride_kh, stride_vb, stride_vs, stride_vh, scale, window, softcap,
                HEAD_DIM, BLOCK_D, BLOCK_SIZE, BLOCK_N, USE_TMA, WINDOW, SOFTCAP, True,
            )  # fmt: skip
    for start in range(clear, full, BLOCK_N):
        block_ids = next_ids
        next_ids = load_block_ids(table_ptr, stride_tb, start + BLOCK_N, end, BLOCK_SIZE, BLOCK_N, USE_TMA)
        m_i, l_i, acc = online_softmax_step(
            q, m_i, l_i, acc, block_ids, k_cache, v_cache, start, end, query_position, kv_head,
            stride_kb, stride_ks, stride_kh, stride_vb, stride_vs, stride_vh, scale, window, softcap,
            HEAD_DIM, BLOCK_D, BLOCK_SIZE, BLOCK_N, USE_TMA, WINDOW, SOFTCAP, False,
        )  # fmt: skip
    for start in range(full, stop, BLOCK_N):
        block_ids = next_ids
        next_ids = load_block_ids(table_ptr, stride_tb, start + BLOCK_N, end, BLOCK_SIZE, BLOCK_N, USE_TMA)
        m_i, l_i, acc = online_softmax_step(
            q, m_i, l_i, acc, block_ids, k_cache, v_cache, start, end, query_position, kv_head,
            stride_kb, stride_ks, stride_kh, stride_vb, stride_vs, stride_vh, scale, window, softcap,
            HEAD_DIM, BLOCK_D, BLOCK_SIZE, BLOCK_N, USE_TMA, WINDOW, SOFTCAP, True,
        )  # fmt: skip

    acc = acc / tl.where(l_i > 0, l_i, 1.0)[:, None]
    out_ptrs = out_ptr + (token * stride_ot + head * stride_oh)[:, None] + d[None, :]
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["stride_ts", "stride_tb"])
def _paged_decode_kernel(
    out_ptr, partial_out_ptr, partial_lse_ptr, counter_ptr, q_ptr, k_cache, v_cache, query_start_ptr, plan_ptr,
    tables_ptr, stride_ot, stride_oh, stride_qt, stride_qh, stride_kb, stride_ks, stride_kh, stride_vb, stride_vs,
    stride_vh, stride_ts, stride_tb, scale, softcap, sinks_ptr,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_G: tl.constexpr, MERGE_CHUNK: tl.constexpr,
    USE_TMA: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Attention of sequences with one query. Grid: (K, max_splits).

    A program computes one KV split of one sequence for the GROUP query heads of one KV head, which are the first rows
    of its BLOCK_M (tl.dot needs 16). plan_ptr [5, max_splits] is written by kv_splits.plan_splits. A context with one
    split is written to out. Otherwise the program stores its normalized output, partial_out [K, max_splits, GROUP,
    HEAD_DIM] float32, and log2-sum-exp2, partial_lse [K, max_splits, GROUP], and increments the counter [S, K] of its
    context. The program that brings the counter to the number of splits merges them and resets it.
    """
    pdl_sync(PDL)
    kv_head = tl.program_id(0)
    split = tl.program_id(1)
    max_splits = tl.num_programs(1)
    # All loads that depend on the split alone are issued together. A chain of dependent loads takes longer than
    # reading the keys of a short split.
    sequence = tl.load(plan_ptr + split).to(tl.int64)
    begin = tl.load(plan_ptr + max_splits + split)
    end = tl.load(plan_ptr + 2 * max_splits + split)
    index = tl.load(plan_ptr + 3 * max_splits + split)
    num_splits = tl.load(plan_ptr + 4 * max_splits + split)
    if sequence < 0:
        return
    table_ptr = tables_ptr + sequence * stride_ts

    r = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    head = kv_head * GROUP + r
    mask = (r < GROUP)[:, None] & (d < HEAD_DIM)[None, :]
    token = tl.load(query_start_ptr + sequence).to(tl.int64)
    q = tl.load(q_ptr + token * stride_qt + (head * stride_qh)[:, None] + d[None, :], mask=mask, other=0.0)
    m_i = tl.full([BLOCK_M], MASKED_SCORE, tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    if SINKS:  # of the first split only: the merge adds the sums of all splits
        sink = tl.load(sinks_ptr + head, mask=r < GROUP, other=0.0).to(tl.float32) * LOG2E
        m_i = tl.where(index == 0, sink, m_i)
        l_i = tl.where(index == 0, 1.0, l_i)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    query_position = tl.zeros([BLOCK_M], tl.int32) + end  # not before any key, so only `end` masks
    full = begin + tl.maximum(0, end - begin) // BLOCK_N * BLOCK_N  # end of the tiles without a mask
    next_ids = load_block_ids(table_ptr, stride_tb, begin, end, BLOCK_SIZE, BLOCK_N, USE_TMA)
    for start in range(begin, full, BLOCK_N):
        block_ids = next_ids
        next_ids = load_block_ids(table_ptr, stride_tb, start + BLOCK_N, end, BLOCK_SIZE, BLOCK_N, USE_TMA)
        m_i, l_i, acc = online_softmax_step(
            q, m_i, l_i, acc, block_ids, k_cache, v_cache, start, end, query_position, kv_head,
            stride_kb, stride_ks, stride_kh, stride_vb, stride_vs, stride_vh, scale, 0, softcap,
            HEAD_DIM, BLOCK_D, BLOCK_SIZE, BLOCK_N, USE_TMA, False, SOFTCAP, False,
        )  # fmt: skip
    if full < end:
        m_i, l_i, acc = online_softmax_step(
            q, m_i, l_i, acc, next_ids, k_cache, v_cache, full, end, query_position, kv_head,
            stride_kb, stride_ks, stride_kh, stride_vb, stride_vs, stride_vh, scale, 0, softcap,
            HEAD_DIM, BLOCK_D, BLOCK_SIZE, BLOCK_N, USE_TMA, False, SOFTCAP, True,
        )  # fmt: skip

    acc = acc / l_i[:, None]  # positive: a split has at least one key
    out_ptr += token * stride_ot
    if num_splits == 1:
        out_ptrs = out_ptr + (head * stride_oh)[:, None] + d[None, :]
        tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=mask)
    else:
        column = kv_head.to(tl.int64) * max_splits + split
        row = column * GROUP + r
        tl.store(partial_out_ptr + (row * HEAD_DIM)[:, None] + d[None, :], acc, mask=mask)
        tl.store(partial_lse_ptr + row, m_i + tl.log2(l_i), mask=r < GROUP)
        # The barrier orders the stores of all threads before the increment. acq_rel makes them visible to the program
        # that merges, and orders its loads after the increment.
        tl.debug_barrier()
        counter_ptr += sequence * tl.num_programs(0) + kv_head
        finished = tl.atomic_add(counter_ptr, 1, sem="acq_rel")
        if finished == num_splits - 1:
            tl.store(counter_ptr, 0)  # for the next launch
            _merge_splits(
                out_ptr, partial_out_ptr, partial_lse_ptr, (column - index) * GROUP, num_splits, kv_head * GROUP,
                stride_oh, GROUP, BLOCK_G, HEAD_DIM, BLOCK_D, MERGE_CHUNK,
            )  # fmt: skip


@triton.jit
def _merge_splits(
    out_ptr, partial_out_ptr, partial_lse_ptr, first_row, num_splits, first_head, stride_oh,
    GROUP: tl.constexpr, BLOCK_G: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    MERGE_CHUNK: tl.constexpr,
):  # fmt: skip
    """Merge the splits of one context, MERGE_CHUNK at a time in their order, and write the output of GROUP heads:

    out = sum_s 2^lse_s partial_out_s / sum_s 2^lse_s
    """
    g = tl.arange(0, BLOCK_G)
    d = tl.arange(0, BLOCK_D)
    m_i = tl.full([BLOCK_G], MASKED_SCORE, tl.float32)
    l_i = tl.zeros([BLOCK_G], tl.float32)
    acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    for first in range(0, num_splits, MERGE_CHUNK):
        s = first + tl.arange(0, MERGE_CHUNK)
        mask = (s < num_splits)[:, None] & (g < GROUP)[None, :]
        row = first_row + s[:, None] * GROUP + g[None, :]
        # .cg reads from L2: other SMs wrote these, and L1 is not coherent.
        lse = tl.load(partial_lse_ptr + row, mask=mask, other=MASKED_SCORE, cache_modifier=".cg")
        ptrs = partial_out_ptr + (row * HEAD_DIM)[:, :, None] + d[None, None, :]
        outs = tl.load(ptrs, mask=mask[:, :, None] & (d < HEAD_DIM)[None, None, :], other=0.0, cache_modifier=".cg")
        m_new = tl.maximum(m_i, tl.max(lse, 0))
        p = tl.exp2(lse - m_new[None, :])
        alpha = tl.exp2(m_i - m_new)
        l_i = l_i * alpha + tl.sum(p, 0)
        acc = acc * alpha[:, None] + tl.sum(outs * p[:, :, None], 0)
        m_i = m_new
    out_ptrs = out_ptr + ((first_head + g) * stride_oh)[:, None] + d[None, :]
    out_mask = (g < GROUP)[:, None] & (d < HEAD_DIM)[None, :]
    tl.store(out_ptrs, (acc / l_i[:, None]).to(out_ptr.dtype.element_ty), mask=out_mask)


class LaunchPlan(NamedTuple):
    """Launch sizes and index tensors of one step, shared by all layers."""

    num_tiles: int  # programs of the prefill kernel per KV head; 0 if no sequence has several queries
    tile_sequence: Tensor  # [num_tiles] sequence of each tile
    tile_start: Tensor  # [S] first tile of each sequence
    max_splits: int  # upper bound on the KV splits of all decoding sequences; 0 if none decodes
    target_programs: int  # decode programs that fill the GPU
    split_plans: dict[int | None, Tensor]  # [5, max_splits] by window, computed by the first layer that needs it


class TileConfig(NamedTuple):
    """Launch configuration of an attention kernel."""

    block_m: int  # rows: queries times query heads per KV head
    block_n: int  # keys per tile
    num_warps: int
    num_stages: int


def prefill_config(
    group: int, head_dim: int, dtype: torch.dtype, limits: GpuLimits, use_tma: bool = False
) -> TileConfig:
    """Return the prefill kernel's configuration. block_m does not depend on use_tma, since plan_launch relies on it.

    Tuned on an H200 with 32 query heads, 8 KV heads and head_dim 128 in bfloat16.
    """
    # Exact float32 products do not use the tensor cores, and wide heads use many registers: smaller tiles for both.
    if dtype == torch.float32:
        config = TileConfig(32, 32, 4, 2)
    elif head_dim > 128:
        config = TileConfig(64, 32, 4, 2)
    else:
        large = TileConfig(128, 64, 8, 3) if use_tma else TileConfig(128, 128, 8, 2)
        config = large if limits.max_shared_memory >= 160 << 10 else TileConfig(64, 64, 4, 2)
    return config._replace(block_m=max(config.block_m, next_power_of_2(group)))


def decode_config(group: int, head_dim: int, dtype: torch.dtype) -> TileConfig:
    """Return the decode kernel's configuration, tuned like prefill_config. tl.dot needs at least 16 rows."""
    if dtype == torch.float32:
        config = TileConfig(16, 32, 4, 2)
    else:
        config = TileConfig(16, 32, 2 if group <= 16 else 4, 3 if head_dim <= 128 else 2)
    return config._replace(block_m=max(config.block_m, next_power_of_2(group)))


def plan_launch(
    query_start: Tensor, query_lens: tuple[int, ...], num_heads: int, num_kv_heads: int, head_dim: int,
    dtype: torch.dtype, target_programs: int,
) -> LaunchPlan:  # fmt: skip
    """Plan the launches of a step, without a device synchronization.

    Sizes come from the lengths on the host, index tensors from query_start [S + 1] on the device. `target_programs` is
    the number of decode programs that fill the GPU.
    """
    num_seqs = len(query_lens)
    # Each context has at least one split, and the proportional shares of kv_splits.py add up to target_programs / K.
    max_splits = num_seqs + target_programs // num_kv_heads if 1 in query_lens else 0
    if num_seqs == sum(query_lens):
        return LaunchPlan(0, query_start, query_start, max_splits, target_programs, {})
    group = num_heads // num_kv_heads
    queries = prefill_config(group, head_dim, dtype, gpu_limits(query_start.device)).block_m // group
    num_tiles = sum(-(-n // queries) for n in query_lens if n != 1)
    if num_seqs == 1:  # a captured prefill may be replayed with fewer tokens than it was captured with
        zeros = torch.zeros(num_tiles, dtype=torch.int64, device=query_start.device)
        return LaunchPlan(num_tiles, zeros, zeros, max_splits, target_programs, {})
    counts = query_start.diff().long()
    tiles = torch.where(counts == 1, 0, (counts + queries - 1) // queries)
    sequences = torch.arange(num_seqs, device=query_start.device)
    tile_sequence = torch.repeat_interleave(sequences, tiles, output_size=num_tiles)
    tile_start = tiles.cumsum(0) - tiles
    return LaunchPlan(num_tiles, tile_sequence, tile_start, max_splits, target_programs, {})


def paged_attention(
    q: Tensor,  # [T, H, D]
    k_cache: Tensor,  # [N, B, K, D]
    v_cache: Tensor,  # [N, B, K, D]
    query_start: Tensor,  # [S + 1] any integer dtype
    context_len: Tensor,  # [S] any integer dtype
    block_tables: Tensor,  # [S, max blocks] any integer dtype and strides
    plan: LaunchPlan,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    pdl: bool = False,
    sinks: Tensor | None = None,  # [H]
) -> Tensor:
    """Return the causal attention [T, H, D] of each sequence's new tokens over all of its cached tokens.

    With `pdl`, decode launches use programmatic dependent launch.
    """
    num_tokens, heads, dim = q.shape
    _, block_size, kv_heads, _ = k_cache.shape
    group, num_seqs = heads // kv_heads, context_len.shape[0]
    if q.stride(2) != 1:
        q = q.contiguous()
    out = torch.empty((num_tokens, heads, dim), dtype=q.dtype, device=q.device)
    block_d = max(16, next_power_of_2(dim))
    strides = (
        *out.stride()[:2], *q.stride()[:2], *k_cache.stride()[:3], *v_cache.stride()[:3], *block_tables.stride()
    )  # fmt: skip
    sizes = {"GROUP": group, "HEAD_DIM": dim, "BLOCK_D": block_d, "BLOCK_SIZE": block_size}
    limits = gpu_limits(q.device)
    if plan.num_tiles:
        config = prefill_config(group, dim, q.dtype, limits, use_tma=True)
        use_tma = can_use_tma(k_cache, v_cache, config, limits)
        if not use_tma:
            config = prefill_config(group, dim, q.dtype, limits)
        k, v = (kv_descriptor(cache, config.block_n) if use_tma else cache for cache in (k_cache, v_cache))
        _paged_prefill_kernel[(plan.num_tiles, kv_heads)](
            out, q, k, v, query_start, context_len, block_tables, plan.tile_sequence, plan.tile_start,
            *strides, scale, window or 0, softcap or 1.0, sinks,
            **sizes, BLOCK_M=config.block_m, BLOCK_N=config.block_n,
            USE_TMA=use_tma, WINDOW=window is not None, SOFTCAP=softcap is not None, SINKS=sinks is not None,
            num_warps=config.num_warps, num_stages=config.num_stages,
        )  # fmt: skip
    if plan.max_splits:
        config = decode_config(group, dim, q.dtype)
        # With a window, splits start anywhere in a block.
        use_tma = window is None and can_use_tma(k_cache, v_cache, config, limits)
        k, v = (kv_descriptor(cache, config.block_n) if use_tma else cache for cache in (k_cache, v_cache))
        max_splits = plan.max_splits
        partial_out = torch.empty((kv_heads, max_splits, group, dim), dtype=torch.float32, device=q.device)
        partial_lse = torch.empty((kv_heads, max_splits, group), dtype=torch.float32, device=q.device)
        counters = _counters(q.device)
        assert num_seqs * kv_heads <= counters.numel(), f"too few split counters for {num_seqs} sequences"
        if window not in plan.split_plans:
            plan.split_plans[window] = torch.empty((5, max_splits), dtype=torch.int32, device=q.device)
            plan_splits[(cdiv(max_splits, BLOCK_SPLITS.value),)](
                plan.split_plans[window], query_start, context_len, num_seqs, kv_heads, max_splits,
                plan.target_programs, window or 0,
                BLOCK_N=config.block_n, WINDOW=window is not None, PDL=pdl, num_warps=4, **pdl_option(pdl),
            )  # fmt: skip
        block_g = next_power_of_2(group)
        _paged_decode_kernel[(kv_heads, max_splits)](
            out, partial_out, partial_lse, counters, q, k, v, query_start, plan.split_plans[window], block_tables,
            *strides, scale, softcap or 1.0, sinks,
            **sizes, BLOCK_M=config.block_m, BLOCK_N=config.block_n,
            BLOCK_G=block_g, MERGE_CHUNK=max(1, min(32, _MERGE_ELEMENTS // (block_g * block_d))),
            USE_TMA=use_tma, SOFTCAP=softcap is not None, SINKS=sinks is not None, PDL=pdl,
            num_warps=config.num_warps, num_stages=config.num_stages, **pdl_option(pdl),
        )  # fmt: skip
    return out


def can_use_tma(k_cache: Tensor, v_cache: Tensor, config: TileConfig, limits: GpuLimits) -> bool:
    """Return whether tiles can be loaded by TMA: the GPU has it, and a tile of block_n keys is within one block.

    float32 caches are loaded by address. Their exact products take operands from registers, of which the
    kernel would need more with TMA.
    """
    _, block_size, _, dim = k_cache.shape
    if not limits.has_tma or k_cache.dtype == torch.float32:
        return False
    if block_size % config.block_n or dim != next_power_of_2(dim) or dim < 16:
        return False
    return all(cache.stride()[2:] == (dim, 1) and cache.data_ptr() % 16 == 0 for cache in (k_cache, v_cache))


def kv_descriptor(cache: Tensor, block_n: int) -> Any:
    """Return a tensor descriptor of `cache` [N, B, K, D] for tiles of `block_n` keys of one head."""
    blocks, size, heads, dim = cache.shape
    return make_descriptor(cache, [1, block_n, dim], (blocks, size, heads * dim), (cache.stride(0), cache.stride(1), 1))


@cache
def _counters(device: torch.device) -> Tensor:
    """Return the counters of finished KV splits, shared by all launches on one stream; zero between launches.

    The first launch allocates them. It also compiles the kernel, so it must not be captured in a CUDA graph.
    """
    return torch.zeros(_MAX_COUNTERS, dtype=torch.int32, device=device)
