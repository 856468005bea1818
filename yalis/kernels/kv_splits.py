"""Split planning for flash-decoding, in Triton: which range of keys each program of the decode kernel reads.

A decode step has one query per sequence. A program per (sequence, KV head) would leave most SMs idle for a small batch,
or for one long context among short ones. As in flash-decoding, each context is therefore divided into KV splits that
different programs read at the same time; kernels/paged_attention.py merges their partial softmax results.

The plan is computed on the device from the context lengths stored there. The host supplies only the number of
sequences, so a captured CUDA graph serves any context lengths.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
# (arguments of a Triton kernel are pointers and scalars without Python types)

from __future__ import annotations

import triton
import triton.language as tl

from yalis.kernels.fused import pdl_sync

BLOCK_SEQS = tl.constexpr(128)  # sequences read at a time
BLOCK_SPLITS = tl.constexpr(64)  # splits planned by one program


@triton.jit
def _total_keys(query_start_ptr, context_len_ptr, num_seqs, window, WINDOW: tl.constexpr):
    """Return the number of keys that all decoding sequences (those with one query) attend to, as int64."""
    total = tl.zeros([BLOCK_SEQS], tl.int32)
    for first in range(0, num_seqs, BLOCK_SEQS):
        i = first + tl.arange(0, BLOCK_SEQS)
        mask = i < num_seqs
        queries = tl.load(query_start_ptr + i + 1, mask=mask, other=0) - tl.load(
            query_start_ptr + i, mask=mask, other=0
        )
        keys = tl.load(context_len_ptr + i, mask=mask, other=0).to(tl.int32)
        if WINDOW:
            keys = tl.minimum(keys, window)
        total += tl.where(queries == 1, keys, 0)
    return tl.sum(total.to(tl.int64), 0)


@triton.jit
def _split_len(keys, total_work, target_programs, BLOCK_N: tl.constexpr):
    """Return the number of keys per split of a context of `keys` keys, a multiple of BLOCK_N.

    A context gets its proportional share of all programs:

        num_splits = clamp(keys * target_programs / total_work, 1, min(sqrt(keys) / 2, cdiv(keys, BLOCK_N)))

    Splits are read in parallel but merged by one program, one chunk after another. With more than sqrt(keys) / 2 splits
    the merge takes longer than the parallel reads save.
    """
    num_splits = (keys.to(tl.int64) * target_programs // total_work).to(tl.int32)
    num_splits = tl.minimum(num_splits, tl.sqrt_rn(keys.to(tl.float32) * 0.25).to(tl.int32))
    num_splits = tl.maximum(1, tl.minimum(num_splits, tl.cdiv(keys, BLOCK_N)))
    return tl.cdiv(tl.cdiv(keys, num_splits), BLOCK_N) * BLOCK_N


@triton.jit(do_not_specialize=["num_seqs", "num_kv_heads", "max_splits", "target_programs", "window"])
def plan_splits(
    plan_ptr, query_start_ptr, context_len_ptr, num_seqs, num_kv_heads, max_splits, target_programs, window,
    BLOCK_N: tl.constexpr, WINDOW: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write the split plan [5, max_splits] int32, one column per program of the decode kernel (per KV head):

    row 0: sequence, or -1 for an unused column; row 1: first key; row 2: end of the keys (exclusive); row 3: index of
    the split within its sequence; row 4: number of splits of the sequence. The splits of a sequence are neighbours.

    Grid: (cdiv(max_splits, BLOCK_SPLITS),). Each program recomputes the prefix sum over all sequences and writes its
    BLOCK_SPLITS columns. Launched once per step and window size; all layers and KV heads share the plan.
    """
    pdl_sync(PDL)
    total_work = tl.maximum(1, _total_keys(query_start_ptr, context_len_ptr, num_seqs, window, WINDOW) * num_kv_heads)
    split = tl.program_id(0) * BLOCK_SPLITS + tl.arange(0, BLOCK_SPLITS)
    sequence = tl.zeros([BLOCK_SPLITS], tl.int32)
    first_split = tl.zeros([BLOCK_SPLITS], tl.int32)  # of the same sequence
    total_splits = 0
    for start in range(0, num_seqs, BLOCK_SEQS):
        i = start + tl.arange(0, BLOCK_SEQS)
        mask = i < num_seqs
        queries = tl.load(query_start_ptr + i + 1, mask=mask, other=0) - tl.load(
            query_start_ptr + i, mask=mask, other=0
        )
        keys = tl.load(context_len_ptr + i, mask=mask, other=1).to(tl.int32)
        if WINDOW:
            keys = tl.minimum(keys, window)
        num_splits = tl.where(queries == 1, tl.cdiv(keys, _split_len(keys, total_work, target_programs, BLOCK_N)), 0)
        split_ends = (total_splits + tl.cumsum(num_splits, 0))[None, :]
        # A split belongs to the first sequence whose splits end after it.
        passed = split_ends <= split[:, None]
        sequence += tl.sum(passed.to(tl.int32), 1)
        first_split = tl.maximum(first_split, tl.max(tl.where(passed, split_ends, 0), 1))
        total_splits += tl.sum(num_splits, 0)
    used = split < total_splits
    context = tl.load(context_len_ptr + sequence, mask=used, other=1).to(tl.int32)
    keys = tl.minimum(context, window) if WINDOW else context
    length = _split_len(keys, total_work, target_programs, BLOCK_N)
    index = split - first_split
    begin = context - keys + index * length
    mask = split < max_splits
    tl.store(plan_ptr + split, tl.where(used, sequence, -1), mask=mask)
    tl.store(plan_ptr + max_splits + split, begin, mask=mask)
    tl.store(plan_ptr + 2 * max_splits + split, tl.minimum(context, begin + length), mask=mask)
    tl.store(plan_ptr + 3 * max_splits + split, index, mask=mask)
    tl.store(plan_ptr + 4 * max_splits + split, tl.cdiv(keys, length), mask=mask)
