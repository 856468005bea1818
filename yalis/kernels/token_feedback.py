"""Sampled tokens passed from one step to the next on the device, one launch each way.

`last_tokens` holds, for each request slot, the token last sampled there. See kernels/fused.py for `pdl`.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
# (kernel arguments are Triton pointers and scalars, which have no Python types)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from yalis.kernels.fused import argmax, pdl_sync, with_contiguous_rows
from yalis.kernels.integer_math import cdiv
from yalis.kernels.pdl import pdl_option

_BLOCK = 128


@triton.jit(do_not_specialize=["R"])
def _use_last_tokens(out_ptr, ids_ptr, last_ptr, request_slots_ptr, R, BLOCK: tl.constexpr, PDL: tl.constexpr):
    pdl_sync(PDL)
    r = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = r < R
    ids = tl.load(ids_ptr + r, mask=mask, other=0)
    request_slots = tl.load(request_slots_ptr + r, mask=mask, other=0)
    last = tl.load(last_ptr + request_slots, mask=mask, other=0)
    tl.store(out_ptr + r, tl.where(ids < 0, last, ids), mask=mask)


def use_last_tokens(token_ids: Tensor, last_tokens: Tensor, request_slots: Tensor, pdl: bool = False) -> Tensor:
    """Return token_ids [R] with each negative id replaced by the last token of its request slot."""
    out = torch.empty_like(token_ids)
    rows = token_ids.shape[0]
    _use_last_tokens[(cdiv(rows, _BLOCK),)](
        out, token_ids, last_tokens, request_slots, rows, BLOCK=_BLOCK, PDL=pdl, num_warps=4, **pdl_option(pdl)
    )
    return out


@triton.jit(do_not_specialize=["R"])
def _pick_greedy(
    out_ptr, best_ids_ptr, logits_ptr, logits_row, last_ptr, request_slots_ptr, R, NONE: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pdl_sync(PDL)
    r = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = r < R
    best_id = tl.load(best_ids_ptr + r, mask=mask, other=0)
    best = tl.load(logits_ptr + r.to(tl.int64) * logits_row + best_id, mask=mask, other=0.0)
    token = tl.where(best == best, best_id, NONE)
    tl.store(out_ptr + r, token, mask=mask)
    request_slots = tl.load(request_slots_ptr + r, mask=mask, other=0)
    tl.store(last_ptr + request_slots, tl.maximum(token, 0), mask=mask)


def pick_greedy(logits: Tensor, last_tokens: Tensor, request_slots: Tensor, none: int, pdl: bool = False) -> Tensor:
    """Return the argmax of each row of logits [R, V], or `none` for a row with NaN, and store it in last_tokens."""
    logits = with_contiguous_rows(logits)
    best_ids = argmax(logits, pdl)
    out = torch.empty_like(best_ids)
    rows = logits.shape[0]
    _pick_greedy[(cdiv(rows, _BLOCK),)](
        out, best_ids, logits, logits.stride(0), last_tokens, request_slots, rows,
        NONE=none, BLOCK=_BLOCK, PDL=pdl, num_warps=4, **pdl_option(pdl),
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["RANK", "FIRST", "R"])
def _find_best(
    packed_ptr, best_ids_ptr, logits_ptr, logits_row, RANK, FIRST, R, RANKS: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    pdl_sync(PDL)
    r = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = r < R
    best_id = tl.load(best_ids_ptr + r, mask=mask, other=0)
    best = tl.load(logits_ptr + r.to(tl.int64) * logits_row + best_id, mask=mask, other=0.0).to(tl.float32)
    token = (best_id + FIRST).to(tl.float32)
    for rank in range(RANKS):
        row = packed_ptr + rank * 2 * R
        tl.store(row + r, tl.where(rank == RANK, best, 0.0), mask=mask)
        tl.store(row + R + r, tl.where(rank == RANK, token, 0.0), mask=mask)


def find_best(logits: Tensor, rank: int, ranks: int, first: int, pdl: bool = False) -> Tensor:
    """Return the best value and token of each row of this rank's logits [R, W], to be summed over the ranks.

    The result is fp32 [ranks, 2, R], zero for the other ranks: values, then tokens. `first`: the token id of the first
    logit. Token ids must be below 2^24, which fp32 represents exactly.
    """
    logits = with_contiguous_rows(logits)
    best_ids = argmax(logits, pdl)
    rows = logits.shape[0]
    best = torch.empty((ranks, 2, rows), dtype=torch.float32, device=logits.device)
    _find_best[(cdiv(rows, _BLOCK),)](
        best, best_ids, logits, logits.stride(0), rank, first, rows,
        RANKS=ranks, BLOCK=_BLOCK, PDL=pdl, num_warps=4, **pdl_option(pdl),
    )  # fmt: skip
    return best


@triton.jit(do_not_specialize=["R"])
def _pick_best(
    out_ptr, packed_ptr, last_ptr, request_slots_ptr, R, NONE: tl.constexpr, RANKS: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    pdl_sync(PDL)
    r = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = r < R
    best = tl.load(packed_ptr + r, mask=mask, other=0.0)
    token = tl.load(packed_ptr + R + r, mask=mask, other=0.0)
    for rank in range(1, RANKS):
        row = packed_ptr + rank * 2 * R
        value = tl.load(row + r, mask=mask, other=0.0)
        better = (value > best) | ((value != value) & (best == best))  # NaN before any number
        token = tl.where(better, tl.load(row + R + r, mask=mask, other=0.0), token)
        best = tl.where(better, value, best)
    picked = tl.where(best == best, token.to(tl.int64), NONE)
    tl.store(out_ptr + r, picked, mask=mask)
    request_slots = tl.load(request_slots_ptr + r, mask=mask, other=0)
    tl.store(last_ptr + request_slots, tl.maximum(picked, 0), mask=mask)


def pick_best(best: Tensor, last_tokens: Tensor, request_slots: Tensor, none: int, pdl: bool = False) -> Tensor:
    """Return the token of the best value of each row, the first among equals, or `none` for a row with NaN.

    `best` [ranks, 2, R]: the sum of every rank's `find_best`. The tokens are also stored in last_tokens.
    """
    ranks, _, rows = best.shape
    out = torch.empty(rows, dtype=torch.int64, device=best.device)
    _pick_best[(cdiv(rows, _BLOCK),)](
        out, best, last_tokens, request_slots, rows,
        NONE=none, RANKS=ranks, BLOCK=_BLOCK, PDL=pdl, num_warps=4, **pdl_option(pdl),
    )  # fmt: skip
    return out
