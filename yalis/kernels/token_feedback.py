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
