"""How the contexts of a decode step are cut into pieces for the programs of kernels/paged_attention.py, in Triton.

Found on the device, from the lengths that are there: the host knows nothing but the number of sequences, so a captured
launch serves any contexts.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
# (a kernel's arguments are pointers and numbers of a language of its own)

from __future__ import annotations

import triton
import triton.language as tl

from yalis.kernels.fused import follow

COUNTED = tl.constexpr(128)  # contexts looked at together
PLANNED = tl.constexpr(64)  # pieces that a program finds


@triton.jit
def _seen_by_all(query_start, context_len, sequences, window, WINDOW: tl.constexpr):
    """How many keys all decoding sequences see together."""
    seen = tl.zeros([COUNTED], tl.int32)
    for first in range(0, sequences, COUNTED):
        i = first + tl.arange(0, COUNTED)
        here = i < sequences
        counts = tl.load(query_start + i + 1, mask=here, other=0) - tl.load(query_start + i, mask=here, other=0)
        keys = tl.load(context_len + i, mask=here, other=0).to(tl.int32)
        if WINDOW:
            keys = tl.minimum(keys, window)
        seen += tl.where(counts == 1, keys, 0)
    return tl.sum(seen.to(tl.int64), 0)


@triton.jit
def _piece(keys, everyone, programs, N: tl.constexpr):
    """How many keys a piece of a context of `keys` has: as many pieces as its part of all programs, of whole tiles.

    Pieces are read at once, but joined one after the other: more than this takes longer than it saves.
    """
    wanted = (keys.to(tl.int64) * programs // everyone).to(tl.int32)
    wanted = tl.minimum(wanted, tl.sqrt_rn(keys.to(tl.float32) * 0.25).to(tl.int32))
    wanted = tl.maximum(1, tl.minimum(wanted, tl.cdiv(keys, N)))
    return tl.cdiv(tl.cdiv(keys, wanted), N) * N


@triton.jit(do_not_specialize=["sequences", "kv_heads", "pieces", "programs", "window"])
def cut(
    cuts_ptr, query_start, context_len, sequences, kv_heads, pieces, programs, window,
    N: tl.constexpr, WINDOW: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Which keys each program reads, as five rows of [pieces]: sequence (or -1), begin, end, number, how many it has.

    Once a step, for all layers and heads.
    """
    follow(PDL)
    everyone = tl.maximum(1, _seen_by_all(query_start, context_len, sequences, window, WINDOW) * kv_heads)
    piece = tl.program_id(0) * PLANNED + tl.arange(0, PLANNED)
    sequence = tl.zeros([PLANNED], tl.int32)
    first = tl.zeros([PLANNED], tl.int32)  # piece of the same context
    total = 0
    for start in range(0, sequences, COUNTED):
        i = start + tl.arange(0, COUNTED)
        here = i < sequences
        counts = tl.load(query_start + i + 1, mask=here, other=0) - tl.load(query_start + i, mask=here, other=0)
        keys = tl.load(context_len + i, mask=here, other=1).to(tl.int32)
        if WINDOW:
            keys = tl.minimum(keys, window)
        needed = tl.where(counts == 1, tl.cdiv(keys, _piece(keys, everyone, programs, N)), 0)
        ends = (total + tl.cumsum(needed, 0))[None, :]
        past = ends <= piece[:, None]
        sequence += tl.sum(past.to(tl.int32), 1)
        first = tl.maximum(first, tl.max(tl.where(past, ends, 0), 1))
        total += tl.sum(needed, 0)
    used = piece < total
    context = tl.load(context_len + sequence, mask=used, other=1).to(tl.int32)
    keys = tl.minimum(context, window) if WINDOW else context
    size = _piece(keys, everyone, programs, N)
    number = piece - first
    begin = context - keys + number * size
    here = piece < pieces
    tl.store(cuts_ptr + piece, tl.where(used, sequence, -1), mask=here)
    tl.store(cuts_ptr + pieces + piece, begin, mask=here)
    tl.store(cuts_ptr + 2 * pieces + piece, tl.minimum(context, begin + size), mask=here)
    tl.store(cuts_ptr + 3 * pieces + piece, number, mask=here)
    tl.store(cuts_ptr + 4 * pieces + piece, tl.cdiv(keys, size), mask=here)
