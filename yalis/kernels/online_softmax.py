"""Device functions shared by the paged attention kernels: load one tile of the KV cache, do one online-softmax step.

A tile is BLOCK_N consecutive keys of one sequence and one KV head. The cache is [num_blocks, BLOCK_SIZE, K, HEAD_DIM];
the block table of the sequence maps position // BLOCK_SIZE to a block. There are two load paths:

- USE_TMA: BLOCK_SIZE is a multiple of BLOCK_N and tiles start at multiples of BLOCK_N, so a tile is within one block.
  `cache` is a tensor descriptor and one instruction loads the tile.
- otherwise `cache` is a pointer, and every key has an address of its own.

BLOCK_D is HEAD_DIM padded to a power of two; the padding is loaded as zero.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
# (arguments of a Triton kernel are pointers and scalars without Python types)

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
# Score of a masked key and initial running maximum. Finite, because -inf - (-inf) would be NaN.
MASKED_SCORE = tl.constexpr(-1.0e30)


@triton.jit
def load_block_ids(
    table_ptr, stride_tb, start, end, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, USE_TMA: tl.constexpr
):  # fmt: skip
    """Return the KV block ids of the keys start..start + BLOCK_N: one int32 with USE_TMA, else int64 [BLOCK_N].

    Keys from `end` on get block 0. Loops call this one tile ahead, because the loads of a tile depend on its block ids.
    """
    if USE_TMA:
        return tl.load(table_ptr + start // BLOCK_SIZE * stride_tb, mask=start < end, other=0).to(tl.int32)
    else:
        position = start + tl.arange(0, BLOCK_N)
        return tl.load(table_ptr + position // BLOCK_SIZE * stride_tb, mask=position < end, other=0).to(tl.int64)


@triton.jit
def load_kv_tile(
    cache, block_ids, start, end, kv_head, stride_block, stride_slot, stride_head,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
    USE_TMA: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Return the keys or values start..start + BLOCK_N of one KV head, [BLOCK_N, BLOCK_D].

    With MASKED, those from `end` on are zero when loaded by address, and undefined when loaded by TMA.
    """
    if USE_TMA:
        return cache.load([block_ids, start % BLOCK_SIZE, kv_head * HEAD_DIM]).reshape(BLOCK_N, BLOCK_D)
    else:
        d = tl.arange(0, BLOCK_D)
        position = start + tl.arange(0, BLOCK_N)
        valid = position < end if MASKED else position >= 0
        # block_ids are int64, so offsets are too: a cache may hold more than 2**31 elements.
        offset = block_ids * stride_block + position % BLOCK_SIZE * stride_slot + kv_head * stride_head
        mask = valid[:, None] & (d < HEAD_DIM)[None, :]
        return tl.load(cache + offset[:, None] + d[None, :], mask=mask, other=0.0)


@triton.jit
def online_softmax_step(
    q, m_i, l_i, acc, block_ids, k_cache, v_cache, start, end, query_position, kv_head,
    stride_kb, stride_ks, stride_kh, stride_vb, stride_vs, stride_vh, scale, window, softcap,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
    USE_TMA: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Accumulate the keys start..start + BLOCK_N into the running softmax of q [BLOCK_M, BLOCK_D]:

        s = scale * q k^T, with SOFTCAP softcap * tanh(s / softcap), times log2(e)
        m' = max(m, rowmax(s));  p = exp2(s - m');  alpha = exp2(m - m')
        l' = alpha * l + rowsum(p);  acc' = alpha * acc + p v

    Returns the new m_i [BLOCK_M] (running maximum, in units of log2), l_i [BLOCK_M] and acc [BLOCK_M, BLOCK_D].
    With MASKED, a row attends to the keys before `end` that causality and the window allow. Without, to all of them.
    """
    position = start + tl.arange(0, BLOCK_N)
    k = load_kv_tile(
        k_cache, block_ids, start, end, kv_head, stride_kb, stride_ks, stride_kh,
        HEAD_DIM, BLOCK_D, BLOCK_SIZE, BLOCK_N, USE_TMA, MASKED,
    )  # fmt: skip
    v = load_kv_tile(
        v_cache, block_ids, start, end, kv_head, stride_vb, stride_vs, stride_vh,
        HEAD_DIM, BLOCK_D, BLOCK_SIZE, BLOCK_N, USE_TMA, MASKED,
    )  # fmt: skip
    if USE_TMA and MASKED:
        # The rest of the block may hold NaN, and NaN times a weight of 0 is NaN.
        v = tl.where((position < end)[:, None], v, 0.0)
    qk = tl.dot(q, tl.trans(k), input_precision="ieee")
    qk_scale = scale * LOG2E  # positive, so the maximum of qk is the maximum of the scores
    if SOFTCAP:
        # tanh(x) = 1 - 2 / (exp(2x) + 1)
        qk = softcap * (1.0 - 2.0 / (tl.exp2(qk * (2.0 * qk_scale / softcap)) + 1.0))
        qk_scale = LOG2E
    if MASKED:
        mask = (position < end)[None, :] & (position[None, :] <= query_position[:, None])
        if WINDOW:
            mask = mask & (position[None, :] > query_position[:, None] - window)
        qk = tl.where(mask, qk, MASKED_SCORE)
    m_new = tl.maximum(m_i, tl.max(qk, 1) * qk_scale)
    p = tl.exp2(qk * qk_scale - m_new[:, None])
    if MASKED:
        p = tl.where(mask, p, 0.0)
    alpha = tl.exp2(m_i - m_new)
    l_i = l_i * alpha + tl.sum(p, 1)
    acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision="ieee")
    return m_new, l_i, acc
