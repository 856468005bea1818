"""Tokens that go from one step to the next on the device, each way in one launch.

`last` has a row for each slot: the token last sampled there. kernels/fused.py says what `pdl` means.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
# (a kernel's arguments are pointers and numbers of a language of its own)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from yalis.kernels.dependent import option
from yalis.kernels.fused import argmax, dense, follow
from yalis.kernels.numbers import ceil_div

_BLOCK = 128


@triton.jit(do_not_specialize=["R"])
def _feed(out_ptr, ids_ptr, last_ptr, owners_ptr, R, BLOCK: tl.constexpr, PDL: tl.constexpr):
    follow(PDL)
    r = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here = r < R
    ids = tl.load(ids_ptr + r, mask=here, other=0)
    owners = tl.load(owners_ptr + r, mask=here, other=0)
    last = tl.load(last_ptr + owners, mask=here, other=0)
    tl.store(out_ptr + r, tl.where(ids < 0, last, ids), mask=here)


def feed(ids: Tensor, last: Tensor, owners: Tensor, pdl: bool = False) -> Tensor:
    """ids [R], where negative the owner's last token."""
    out = torch.empty_like(ids)
    rows = ids.shape[0]
    _feed[(ceil_div(rows, _BLOCK),)](out, ids, last, owners, rows, BLOCK=_BLOCK, PDL=pdl, num_warps=4, **option(pdl))
    return out


@triton.jit(do_not_specialize=["R"])
def _settle(
    out_ptr, places_ptr, logits_ptr, logits_row, last_ptr, owners_ptr, R, NONE: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    follow(PDL)
    r = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here = r < R
    place = tl.load(places_ptr + r, mask=here, other=0)
    best = tl.load(logits_ptr + r.to(tl.int64) * logits_row + place, mask=here, other=0.0)
    token = tl.where(best == best, place, NONE)
    tl.store(out_ptr + r, token, mask=here)
    owners = tl.load(owners_ptr + r, mask=here, other=0)
    tl.store(last_ptr + owners, tl.maximum(token, 0), mask=here)


def settle(logits: Tensor, last: Tensor, owners: Tensor, none: int, pdl: bool = False) -> Tensor:
    """The best token of each row of logits [R, V], `none` for a row with NaN; its owner's last token from now on."""
    logits = dense(logits)
    places = argmax(logits, pdl)
    out = torch.empty_like(places)
    rows = logits.shape[0]
    _settle[(ceil_div(rows, _BLOCK),)](
        out, places, logits, logits.stride(0), last, owners, rows,
        NONE=none, BLOCK=_BLOCK, PDL=pdl, num_warps=4, **option(pdl),
    )  # fmt: skip
    return out
