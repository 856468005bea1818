"""The choices of a router that concern one rank with whole experts, counted on the device: one launch per layer."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
# (kernel arguments are Triton pointers and scalars, which have no Python types)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from yalis.kernels.integer_math import cdiv

_BLOCK = 256


@triton.jit(do_not_specialize=["P", "padding", "first", "held"])
def _own_experts(
    out_ptr, experts_ptr, kv_slots_ptr, counts_ptr, P, padding, first, held,
    TOP_K: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = pair < P
    expert = tl.load(experts_ptr + pair, mask=mask, other=0)
    if PADDED:
        slot = tl.load(kv_slots_ptr + pair // TOP_K, mask=mask, other=0)
        expert = tl.where(slot < 0, padding, expert)
    tl.atomic_add(counts_ptr + expert, tl.full((BLOCK,), 1, tl.int64), mask=mask, sem="relaxed")
    own = expert - first
    tl.store(out_ptr + pair, tl.where((own >= 0) & (own < held), own, -1), mask=mask)


def own_experts(experts: Tensor, kv_slots: Tensor | None, counts: Tensor, first: int, held: int) -> Tensor:
    """ops.own_experts on a GPU."""
    experts = experts.contiguous()
    pairs = experts.numel()
    out = torch.empty(pairs, dtype=torch.int64, device=experts.device)
    slots = experts if kv_slots is None else kv_slots.contiguous()
    if pairs:
        _own_experts[(cdiv(pairs, _BLOCK),)](
            out, experts, slots, counts, pairs, counts.shape[0] - 1, first, held,
            TOP_K=experts.shape[1], PADDED=kv_slots is not None, BLOCK=_BLOCK, num_warps=4,
        )  # fmt: skip
    return out
