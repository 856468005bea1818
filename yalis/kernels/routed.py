"""Routing, and products of rows with the matrix of an expert each, in plain torch.

Shapes: N rows, P pairs of a row and one of its experts, E experts.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from yalis.moe import MoESpec

# Rows of a block: its product reads one matrix. From about this size on a GPU computes longer than it reads.
_MAX_BLOCK = 128
# Bytes of the copies of matrices that one batched product uses.
_MAX_COPY = 256 << 20

Linear = Callable[[Tensor, Tensor, Tensor | None], Tensor]


#: The values of MoESpec.scoring. native.c takes their index.
SCORINGS = ("softmax", "sigmoid", "softmax_chosen")


def route(logits: Tensor, moe: MoESpec, correction: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the weights [N, top_k] in fp32 and the experts [N, top_k] of each row, for router logits [N, E].

    `correction` [E] fp32 is added to the scores for the choice of experts, if the model has it.
    """
    routing = (moe.top_k, moe.scoring, moe.renormalize, moe.groups, moe.top_groups, moe.scale)
    return choose_experts(logits, correction, *routing)


def choose_experts(
    logits: Tensor,
    correction: Tensor | None,
    top_k: int,
    scoring: str,
    renormalize: bool,
    groups: int,
    top_groups: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """route() with the fields of the MoESpec one by one, as custom ops take them."""
    if scoring == "softmax_chosen":
        chosen_logits, experts = logits.float().topk(top_k, dim=-1)
        weights = chosen_logits.softmax(-1)
    else:
        scores = logits.float().sigmoid() if scoring == "sigmoid" else logits.softmax(-1, dtype=torch.float32)
        corrected = scores if correction is None else scores + correction
        if top_groups < groups:
            corrected = _mask_groups(corrected, groups, top_groups)
        weights, experts = corrected.topk(top_k, dim=-1)
        if corrected is not scores:
            weights = scores.gather(1, experts)
    if renormalize:
        # Sigmoids may all be near zero.
        weights = weights / (weights.sum(-1, keepdim=True) + (1e-20 if scoring == "sigmoid" else 0.0))
    return weights * scale if scale != 1.0 else weights, experts


def _mask_groups(scores: Tensor, groups: int, top_groups: int) -> Tensor:
    """Return scores [N, E] with -inf for all experts outside the best groups, by the sum of their two best scores."""
    grouped = scores.view(-1, groups, scores.shape[1] // groups)
    best = grouped.topk(2, dim=-1).values.sum(-1).topk(top_groups, dim=-1).indices
    outside = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter_(1, best, False)
    return grouped.masked_fill(outside.unsqueeze(-1), -torch.inf).flatten(1)


def own_experts(experts: Tensor, kv_slots: Tensor | None, counts: Tensor, first: int, held: int) -> Tensor:
    """ops.own_experts in plain torch."""
    padding = counts.shape[0] - 1
    chosen = (experts if kv_slots is None else torch.where(kv_slots.unsqueeze(1) < 0, padding, experts)).flatten()
    counts.scatter_add_(0, chosen, torch.ones_like(chosen))
    own = chosen - first
    return torch.where((own >= 0) & (own < held), own, -1)


def combine(y: Tensor, weights: Tensor, shared: Tensor | None = None, gate: Tensor | None = None) -> Tensor:
    """ops.combine_experts. The sum over the experts is rounded once."""
    rows, top_k = weights.shape
    combined = torch.bmm(weights.to(y.dtype).unsqueeze(1), y.view(rows, top_k, y.shape[1])).squeeze(1)
    if shared is None:
        return combined
    return combined + (shared if gate is None else shared * torch.sigmoid(gate))


def grouped_linear(x: Tensor, weight: Tensor, experts: Tensor, linear: Linear, bias: Tensor | None = None) -> Tensor:
    """ops.expert_linear with one product for each expert that occurs. The host waits for the groups."""
    left_out, *counts = torch.bincount(experts + 1, minlength=weight.shape[0] + 1).tolist()
    order = experts.argsort(stable=True)[left_out:]
    rows = x.index_select(0, _rows_of(order, experts, x))
    grouped, start = x.new_empty(order.shape[0], weight.shape[1]), 0
    for expert, count in enumerate(counts):
        if count:
            added = None if bias is None else bias[expert]
            grouped[start : start + count] = linear(rows[start : start + count], weight[expert], added)
            start += count
    y = x.new_zeros if left_out else x.new_empty
    return y(experts.shape[0], weight.shape[1]).index_copy_(0, order, grouped)


def blocked_linear(x: Tensor, weight: Tensor, experts: Tensor, bias: Tensor | None = None) -> Tensor:
    """ops.expert_linear with shapes that do not depend on the routing, and without waiting for the device.

    The pairs are sorted by expert, and each expert's are padded to whole blocks of rows. A block is multiplied by a
    copy of its expert's matrix. Pairs that are left out share a row after the last block.
    """
    pairs, count = experts.shape[0], weight.shape[0]
    block = 1 << max(0, min(_MAX_BLOCK, pairs // count).bit_length() - 1)
    blocks = (pairs + min(count, pairs) * (block - 1)) // block  # enough for any routing
    order = experts.argsort(stable=True)
    sizes = experts.new_zeros(count + 1).scatter_add_(0, experts + 1, torch.ones_like(experts))  # the first: left out
    needed = (sizes[1:] + block - 1) // block  # blocks of each expert
    ends = needed.cumsum(0)
    chosen = experts.index_select(0, order)
    within = torch.arange(pairs, device=x.device) - (sizes.cumsum(0) - sizes).index_select(0, chosen + 1)
    slots = (ends - needed).index_select(0, chosen.clamp(min=0)) * block + within
    slots = torch.where(chosen < 0, blocks * block, slots)
    rows = x.index_select(0, _rows_of(order, experts, x))
    padded = x.new_zeros(blocks * block + 1, x.shape[1]).index_copy_(0, slots, rows)[:-1]
    # Blocks after the last one in use multiply zeros by any matrix.
    expert_of_block = torch.searchsorted(ends, torch.arange(blocks, device=x.device), right=True).clamp_(max=count - 1)
    flat = x.new_empty(blocks * block + 1, weight.shape[1])
    flat[-1] = 0
    y = flat[:-1].view(blocks, block, weight.shape[1])
    step = max(1, _MAX_COPY // (weight.shape[1] * weight.shape[2] * weight.itemsize))
    for first in range(0, blocks, step):
        part = slice(first, first + step)
        matrices = weight.index_select(0, expert_of_block[part])
        torch.bmm(padded.view(blocks, block, -1)[part], matrices.transpose(1, 2), out=y[part])
    if bias is not None:
        y += bias.index_select(0, expert_of_block).unsqueeze(1)
    grouped = flat.index_select(0, slots)
    return torch.empty_like(grouped).index_copy_(0, order, grouped)


def _rows_of(pairs: Tensor, experts: Tensor, x: Tensor) -> Tensor:
    """Return the row of x that each of these pairs multiplies."""
    repeated = experts.shape[0] // max(1, x.shape[0])
    return pairs if repeated <= 1 else pairs // repeated
