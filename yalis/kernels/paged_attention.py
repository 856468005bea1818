"""Attention read straight from the paged KV cache, in Triton. kernels/reference.py says the same in plain torch.

Two launches serve a step: `prefill` for sequences that bring several tokens, `decode` for those that bring one. Its
contexts are cut into pieces, so that a small batch or one long context among short ones still fills the GPU. Which
program reads which piece is decided on the device, from all lengths of the step: a launch depends on nothing but the
number of sequences, and a captured one serves any contexts. The last piece of a context to arrive joins them, in their
order. All query heads that share a key head are rows of one program, so a key is read once for them.

Where a tile of keys never leaves its block, one instruction brings it: the cache comes as a descriptor (`WHOLE`).
Otherwise each key is found by an address of its own, which is what blocks smaller than a tile cost.

Names: S sequences · H query heads · K key/value heads · G = H / K · D head_dim · B tokens a block holds ·
M rows of a program (queries × group) · N keys it takes at a time.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
# (a kernel's arguments are pointers and numbers of a language of its own)

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from yalis.kernels.fused import follow
from yalis.kernels.numbers import ceil_div, power_of_two
from yalis.kernels.pdl import pdl_option
from yalis.kernels.pieces import PLANNED, cut
from yalis.kernels.room import Room, room_of
from yalis.kernels.tiles import described

LOG2E = tl.constexpr(1.4426950408889634)
# Stands for "no key seen yet" and for masked scores: finite, so that a difference of two is never NaN.
NEVER = tl.constexpr(-1.0e30)
PROGRAMS = 4  # of a decode step, for each of a device's processors
_JOINED = 4096  # numbers of parts that are joined at a time
_COUNTERS = 1 << 20


@triton.jit
def _blocks(table, table_step, start, end, B: tl.constexpr, N: tl.constexpr, WHOLE: tl.constexpr):
    """Those of the N keys from `start` on: one if WHOLE, else of each. Loops ask a tile ahead: keys wait for them."""
    if WHOLE:
        return tl.load(table + start // B * table_step, mask=start < end, other=0).to(tl.int32)
    else:
        position = start + tl.arange(0, N)
        return tl.load(table + position // B * table_step, mask=position < end, other=0).to(tl.int64)


@triton.jit
def _rows(
    cache, block, start, end, kv_head, block_step, slot_step, head_step,
    D: tl.constexpr, DP: tl.constexpr, B: tl.constexpr, N: tl.constexpr, WHOLE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Keys or values of one head from `start` on, [N, DP], in these blocks."""
    if WHOLE:
        return cache.load([block, start % B, kv_head * D]).reshape(N, DP)
    else:
        d = tl.arange(0, DP)
        position = start + tl.arange(0, N)
        here = position < end if MASKED else position >= 0
        # Offsets are 64 bits wide: a pool may hold more than 2**31 numbers.
        row = block * block_step + position % B * slot_step + kv_head * head_step
        return tl.load(cache + row[:, None] + d[None, :], mask=here[:, None] & (d < D)[None, :], other=0.0)


@triton.jit
def _absorb(
    q, m, total, acc, block, k_cache, v_cache, start, end, query, kv_head,
    k_block, k_slot, k_head, v_block, v_slot, v_head, scale, window, softcap,
    D: tl.constexpr, DP: tl.constexpr, B: tl.constexpr, N: tl.constexpr,
    WHOLE: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """One step of the running softmax: the N keys from `start` on, in these blocks, join m [M], total [M], acc [M, DP].

    m is in units of log2. Without MASKED, every row sees all N keys.
    """
    position = start + tl.arange(0, N)
    k = _rows(k_cache, block, start, end, kv_head, k_block, k_slot, k_head, D, DP, B, N, WHOLE, MASKED)
    v = _rows(v_cache, block, start, end, kv_head, v_block, v_slot, v_head, D, DP, B, N, WHOLE, MASKED)
    if WHOLE and MASKED:
        v = tl.where((position < end)[:, None], v, 0.0)  # what lies behind may be NaN, which times 0 still is
    score = tl.dot(q, tl.trans(k), input_precision="ieee")
    unit = scale * LOG2E  # what a score counts in log2; above 0
    if SOFTCAP:
        score = softcap * (1.0 - 2.0 / (tl.exp2(score * (2.0 * unit / softcap)) + 1.0))
        unit = LOG2E
    if MASKED:
        seen = (position < end)[None, :] & (position[None, :] <= query[:, None])
        if WINDOW:
            seen = seen & (position[None, :] > query[:, None] - window)
        score = tl.where(seen, score, NEVER)
    m_new = tl.maximum(m, tl.max(score, 1) * unit)
    weight = tl.exp2(score * unit - m_new[:, None])
    if MASKED:
        weight = tl.where(seen, weight, 0.0)
    fade = tl.exp2(m - m_new)
    total = total * fade + tl.sum(weight, 1)
    acc = tl.dot(weight.to(v.dtype), v, acc * fade[:, None], input_precision="ieee")
    return m_new, total, acc


# Numbers that change from step to step must not each compile another kernel.
@triton.jit(do_not_specialize=["table_row", "table_step", "window"])
def _prefill(
    out_ptr, q_ptr, k_cache, v_cache, query_start, context_len, tables, tile_sequence, tile_start,
    out_token, out_head, q_token, q_head, k_block, k_slot, k_head, v_block, v_slot, v_head, table_row, table_step,
    scale, window, softcap,
    G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, B: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    WHOLE: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    # Later tiles see more keys: they start first, so that short ones fill the end.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
    sequence = tl.load(tile_sequence + tile)
    row = tl.load(query_start + sequence).to(tl.int32)
    count = tl.load(query_start + sequence + 1).to(tl.int32) - row
    context = tl.load(context_len + sequence).to(tl.int32)
    PER: tl.constexpr = M // G  # queries of a tile
    begin = (tile - tl.load(tile_start + sequence)).to(tl.int32) * PER
    if begin >= count:
        return  # in a recorded prompt, what fills it up

    r = tl.arange(0, M)
    d = tl.arange(0, DP)
    mine = begin + r // G
    query = mine + (context - count)
    head = kv_head * G + r % G
    token = (row + mine).to(tl.int64)
    live = (mine < count) & (r < PER * G)
    access = live[:, None] & (d < D)[None, :]
    q = tl.load(q_ptr + (token * q_token + head * q_head)[:, None] + d[None, :], mask=access, other=0.0)

    table = tables + sequence * table_row
    m = tl.full([M], NEVER, tl.float32)
    total = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, DP], tl.float32)

    earliest = context - count + begin
    end = tl.minimum(context, earliest + PER)
    stop = (end + N - 1) // N * N
    # Keys [clear, full) are seen by every row; those before (the window) and after (causality) need a mask.
    low = 0
    clear = 0
    if WINDOW:
        low = tl.maximum(0, earliest - window + 1) // N * N
        clear = tl.minimum((tl.maximum(0, end - window) + N - 1) // N * N, stop)
    full = tl.maximum(clear, (earliest + 1) // N * N)
    block = _blocks(table, table_step, low, end, B, N, WHOLE)
    if WINDOW:
        for start in range(low, clear, N):
            here = block
            block = _blocks(table, table_step, start + N, end, B, N, WHOLE)
            m, total, acc = _absorb(
                q, m, total, acc, here, k_cache, v_cache, start, end, query, kv_head,
                k_block, k_slot, k_head, v_block, v_slot, v_head, scale, window, softcap,
                D, DP, B, N, WHOLE, WINDOW, SOFTCAP, True,
            )  # fmt: skip
    for start in range(clear, full, N):
        here = block
        block = _blocks(table, table_step, start + N, end, B, N, WHOLE)
        m, total, acc = _absorb(
            q, m, total, acc, here, k_cache, v_cache, start, end, query, kv_head,
            k_block, k_slot, k_head, v_block, v_slot, v_head, scale, window, softcap,
            D, DP, B, N, WHOLE, WINDOW, SOFTCAP, False,
        )  # fmt: skip
    for start in range(full, stop, N):
        here = block
        block = _blocks(table, table_step, start + N, end, B, N, WHOLE)
        m, total, acc = _absorb(
            q, m, total, acc, here, k_cache, v_cache, start, end, query, kv_head,
            k_block, k_slot, k_head, v_block, v_slot, v_head, scale, window, softcap,
            D, DP, B, N, WHOLE, WINDOW, SOFTCAP, True,
        )  # fmt: skip

    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    at = out_ptr + (token * out_token + head * out_head)[:, None] + d[None, :]
    tl.store(at, acc.to(out_ptr.dtype.element_ty), mask=access)


@triton.jit(do_not_specialize=["table_row", "table_step"])
def _decode(
    out_ptr, part_ptr, lse_ptr, arrived_ptr, q_ptr, k_cache, v_cache, query_start, cuts, tables,
    out_token, out_head, q_token, q_head, k_block, k_slot, k_head, v_block, v_slot, v_head, table_row, table_step,
    scale, softcap,
    G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, B: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    GP: tl.constexpr, CHUNK: tl.constexpr, WHOLE: tl.constexpr, SOFTCAP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    follow(PDL)
    kv_head = tl.program_id(0)
    piece = tl.program_id(1)
    pieces = tl.num_programs(1)
    # All loads that need nothing but the piece at once: one that waits for another costs more than its keys.
    sequence = tl.load(cuts + piece).to(tl.int64)
    begin = tl.load(cuts + pieces + piece)
    end = tl.load(cuts + 2 * pieces + piece)
    number = tl.load(cuts + 3 * pieces + piece)
    used = tl.load(cuts + 4 * pieces + piece)
    if sequence < 0:
        return
    table = tables + sequence * table_row

    r = tl.arange(0, M)
    d = tl.arange(0, DP)
    head = kv_head * G + r
    access = (r < G)[:, None] & (d < D)[None, :]
    token = tl.load(query_start + sequence).to(tl.int64)
    q = tl.load(q_ptr + token * q_token + (head * q_head)[:, None] + d[None, :], mask=access, other=0.0)
    m = tl.full([M], NEVER, tl.float32)
    total = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, DP], tl.float32)
    query = tl.zeros([M], tl.int32) + end
    full = begin + tl.maximum(0, end - begin) // N * N
    block = _blocks(table, table_step, begin, end, B, N, WHOLE)
    for start in range(begin, full, N):
        here = block
        block = _blocks(table, table_step, start + N, end, B, N, WHOLE)
        m, total, acc = _absorb(
            q, m, total, acc, here, k_cache, v_cache, start, end, query, kv_head,
            k_block, k_slot, k_head, v_block, v_slot, v_head, scale, 0, softcap,
            D, DP, B, N, WHOLE, False, SOFTCAP, False,
        )  # fmt: skip
    if full < end:
        m, total, acc = _absorb(
            q, m, total, acc, block, k_cache, v_cache, full, end, query, kv_head,
            k_block, k_slot, k_head, v_block, v_slot, v_head, scale, 0, softcap,
            D, DP, B, N, WHOLE, False, SOFTCAP, True,
        )  # fmt: skip

    acc = acc / total[:, None]  # every row saw a key
    out_ptr += token * out_token
    if used == 1:
        tl.store(out_ptr + (head * out_head)[:, None] + d[None, :], acc.to(out_ptr.dtype.element_ty), mask=access)
    else:
        at = kv_head.to(tl.int64) * pieces + piece
        part = at * G + r
        tl.store(part_ptr + (part * D)[:, None] + d[None, :], acc, mask=access)
        tl.store(lse_ptr + part, m + tl.log2(total), mask=r < G)
        # Every thread's stores come before the count, and the count before any load.
        tl.debug_barrier()
        arrived_ptr += sequence * tl.num_programs(0) + kv_head
        before = tl.atomic_add(arrived_ptr, 1, sem="acq_rel")
        if before == used - 1:
            tl.store(arrived_ptr, 0)  # for the next launch
            parts = (at - number) * G
            _join(out_ptr, part_ptr, lse_ptr, parts, used, kv_head * G, out_head, G, GP, D, DP, CHUNK)


@triton.jit
def _join(
    out_ptr, part_ptr, lse_ptr, parts, used, first_head, out_head,
    G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The parts of a context, CHUNK at a time, each by its share of the softmax's sum."""
    g = tl.arange(0, GP)
    d = tl.arange(0, DP)
    m = tl.full([GP], NEVER, tl.float32)
    total = tl.zeros([GP], tl.float32)
    acc = tl.zeros([GP, DP], tl.float32)
    for first in range(0, used, CHUNK):
        c = first + tl.arange(0, CHUNK)
        here = (c < used)[:, None] & (g < G)[None, :]
        part = parts + c[:, None] * G + g[None, :]
        lse = tl.load(lse_ptr + part, mask=here, other=NEVER, cache_modifier=".cg")
        at = part_ptr + (part * D)[:, :, None] + d[None, None, :]
        values = tl.load(at, mask=here[:, :, None] & (d < D)[None, None, :], other=0.0, cache_modifier=".cg")
        m_new = tl.maximum(m, tl.max(lse, 0))
        weight = tl.exp2(lse - m_new[None, :])
        fade = tl.exp2(m - m_new)
        total = total * fade + tl.sum(weight, 0)
        acc = acc * fade[:, None] + tl.sum(values * weight[:, :, None], 0)
        m = m_new
    at = out_ptr + ((first_head + g) * out_head)[:, None] + d[None, :]
    tl.store(at, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=(g < G)[:, None] & (d < D)[None, :])


class Launch(NamedTuple):
    """How one step is launched; the same for every layer."""

    tiles: int  # programs of `prefill` for each key head
    tile_sequence: Tensor  # [tiles] the sequence a tile belongs to
    tile_start: Tensor  # [S] the first tile of each sequence
    pieces: int  # of all decoding contexts together, at most; 0 when no sequence decodes
    programs: int  # that keep the device busy
    cuts: dict[int | None, Tensor]  # [5, pieces], by window: made for the first layer that has it


class Shape(NamedTuple):
    """A kernel's tile: M rows, N keys at a time, and how many warps and stages."""

    m: int
    n: int
    warps: int
    stages: int


def prefill_shape(group: int, head_dim: int, dtype: torch.dtype, room: Room, whole: bool = False) -> Shape:
    """Chosen on an H200 with 32 heads over 8 key heads of 128, bf16; the rows are the same by address and WHOLE."""
    # Exact float32 products run outside the tensor cores, and wide heads fill registers: smaller tiles for both.
    if dtype == torch.float32:
        shape = Shape(32, 32, 4, 2)
    elif head_dim > 128:
        shape = Shape(64, 32, 4, 2)
    else:
        large = Shape(128, 64, 8, 3) if whole else Shape(128, 128, 8, 2)
        shape = large if room.shared >= 160 << 10 else Shape(64, 64, 4, 2)
    return shape._replace(m=max(shape.m, power_of_two(group)))


def decode_shape(group: int, head_dim: int, dtype: torch.dtype) -> Shape:
    """Chosen as above. Sixteen rows are the least a matrix product takes."""
    if dtype == torch.float32:
        shape = Shape(16, 32, 4, 2)
    else:
        shape = Shape(16, 32, 2 if group <= 16 else 4, 3 if head_dim <= 128 else 2)
    return shape._replace(m=max(shape.m, power_of_two(group)))


def plan_launch(
    query_start: Tensor, query_lens: tuple[int, ...], num_heads: int, num_kv_heads: int, head_dim: int,
    dtype: torch.dtype, programs: int,
) -> Launch:  # fmt: skip
    """Sizes come from the lengths the host knows, index tensors from those on the device: nothing waits.

    `programs` is how many decode programs keep the device busy.
    """
    sequences = len(query_lens)
    # Each context has its part of all programs, and one at least.
    pieces = sequences + programs // num_kv_heads if 1 in query_lens else 0
    if sequences == sum(query_lens):
        return Launch(0, query_start, query_start, pieces, programs, {})
    group = num_heads // num_kv_heads
    per = prefill_shape(group, head_dim, dtype, room_of(query_start.device)).m // group
    tiles = sum(-(-n // per) for n in query_lens if n != 1)
    if sequences == 1:  # a recorded prompt may have fewer tokens than it was recorded with
        nothing = torch.zeros(tiles, dtype=torch.int64, device=query_start.device)
        return Launch(tiles, nothing, nothing, pieces, programs, {})
    counts = query_start.diff().long()
    needed = torch.where(counts == 1, 0, (counts + per - 1) // per)
    everyone = torch.arange(sequences, device=query_start.device)
    tile_sequence = torch.repeat_interleave(everyone, needed, output_size=tiles)
    tile_start = needed.cumsum(0) - needed
    return Launch(tiles, tile_sequence, tile_start, pieces, programs, {})


def paged_attention(
    q: Tensor,  # [T, H, D]
    k_cache: Tensor,  # [N, B, K, D]
    v_cache: Tensor,  # [N, B, K, D]
    query_start: Tensor,  # [S + 1] of any integers
    context_len: Tensor,  # [S] of any integers
    block_tables: Tensor,  # [S, most blocks] of any integers and strides
    launch: Launch,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    pdl: bool = False,
) -> Tensor:
    """Causal attention of each sequence's last tokens over its own blocks, [T, H, D]."""
    num_tokens, heads, dim = q.shape
    _, block_size, kv_heads, _ = k_cache.shape
    group, sequences = heads // kv_heads, context_len.shape[0]
    if q.stride(2) != 1:
        q = q.contiguous()
    out = torch.empty((num_tokens, heads, dim), dtype=q.dtype, device=q.device)
    padded = max(16, power_of_two(dim))
    strides = (
        *out.stride()[:2], *q.stride()[:2], *k_cache.stride()[:3], *v_cache.stride()[:3], *block_tables.stride()
    )  # fmt: skip
    numbers = (scale, window or 0, softcap or 1.0)
    flags = {"WINDOW": window is not None, "SOFTCAP": softcap is not None}
    sizes = {"G": group, "D": dim, "DP": padded, "B": block_size}
    room = room_of(q.device)
    if launch.tiles:
        shape = prefill_shape(group, dim, q.dtype, room, whole=True)
        whole = in_blocks(k_cache, v_cache, shape, room)
        if not whole:
            shape = prefill_shape(group, dim, q.dtype, room)
        k, v = (by_keys(cache, shape.n) if whole else cache for cache in (k_cache, v_cache))
        _prefill[(launch.tiles, kv_heads)](
            out, q, k, v, query_start, context_len, block_tables, launch.tile_sequence, launch.tile_start,
            *strides, *numbers, **sizes, M=shape.m, N=shape.n, WHOLE=whole, **flags,
            num_warps=shape.warps, num_stages=shape.stages,
        )  # fmt: skip
    if launch.pieces:
        shape = decode_shape(group, dim, q.dtype)
        # Behind a window, pieces begin anywhere in a block.
        whole = window is None and in_blocks(k_cache, v_cache, shape, room)
        k, v = (by_keys(cache, shape.n) if whole else cache for cache in (k_cache, v_cache))
        pieces = launch.pieces
        part = torch.empty((kv_heads, pieces, group, dim), dtype=torch.float32, device=q.device)
        lse = torch.empty((kv_heads, pieces, group), dtype=torch.float32, device=q.device)
        arrived = _counters(q.device)
        assert sequences * kv_heads <= arrived.numel(), f"{sequences} sequences"
        if window not in launch.cuts:
            launch.cuts[window] = torch.empty((5, pieces), dtype=torch.int32, device=q.device)
            cut[(ceil_div(pieces, PLANNED.value),)](
                launch.cuts[window], query_start, context_len, sequences, kv_heads, pieces, launch.programs,
                window or 0, N=shape.n, WINDOW=window is not None, PDL=pdl, num_warps=4, **pdl_option(pdl),
            )  # fmt: skip
        rows = power_of_two(group)
        _decode[(kv_heads, pieces)](
            out, part, lse, arrived, q, k, v, query_start, launch.cuts[window], block_tables,
            *strides, scale, softcap or 1.0,
            **sizes, M=shape.m, N=shape.n, GP=rows, CHUNK=max(1, min(32, _JOINED // (rows * padded))),
            WHOLE=whole, SOFTCAP=softcap is not None, PDL=pdl,
            num_warps=shape.warps, num_stages=shape.stages, **pdl_option(pdl),
        )  # fmt: skip
    return out


def in_blocks(k_cache: Tensor, v_cache: Tensor, shape: Shape, room: Room) -> bool:
    """Whether a tile of keys never leaves its block, and the device brings what a descriptor describes.

    Exact float32 products take keys from registers: there a descriptor costs more of them than addresses do.
    """
    _, block_size, _, dim = k_cache.shape
    if not room.descriptors or k_cache.dtype == torch.float32 or block_size % shape.n or dim != power_of_two(dim):
        return False
    dense = all(cache.stride()[2:] == (dim, 1) and cache.data_ptr() % 16 == 0 for cache in (k_cache, v_cache))
    return dim >= 16 and dense


def by_keys(cache: Tensor, keys: int) -> Any:
    """The cache as tiles of so many keys of one head."""
    blocks, size, heads, dim = cache.shape
    return described(cache, [1, keys, dim], (blocks, size, heads * dim), (cache.stride(0), cache.stride(1), 1))


@cache
def _counters(device: torch.device) -> Tensor:
    """How many pieces of each context are done: all zero between launches, which follow each other in one stream.

    Made by the first launch, which compiles the kernel too: not while a graph is captured.
    """
    return torch.zeros(_COUNTERS, dtype=torch.int32, device=device)
