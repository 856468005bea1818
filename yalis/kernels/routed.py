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


def route(logits: Tensor, moe: MoESpec, correction: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the weights [N, top_k] in fp32 and the experts [N, top_k] of each row, for router logits [N, E].

    `correction` [E] fp32 is added to the scores for the choice of experts, if the model has it.
    """
    if moe.scoring == "softmax_chosen":
        chosen_logits, experts = logits.float().topk(moe.top_k, dim=-1)
        weights = chosen_logits.softmax(-1)
    else:
        scores = logits.float().sigmoid() if moe.scoring == "sigmoid" else logits.softmax(-1, dtype=torch.float32)
        corrected = scores if correction is None else scores + correction
        if moe.top_groups < moe.groups:
            corrected = _mask_groups(corrected, moe)
        weights, experts = corrected.topk(moe.top_k, dim=-1)
        if corrected is not scores:
            weights = scores.gather(1, experts)
    if moe.renormalize:
        # Sigmoids may all be near zero.
        weights = weights / (weights.sum(-1, keepdim=True) + (1e-20 if moe.scoring == "sigmoid" else 0.0))
    return weights * moe.scale if moe.scale != 1.0 else weights, experts


def _mask_groups(scores: Tensor, moe: MoESpec) -> Tensor:
    """Return scores [N, E] with -inf for all experts outside the best groups, by the sum of their two best scores."""
    grouped = scores.view(-1, moe.groups, moe.num_experts // moe.groups)
    best = grouped.topk(2, dim=-1).values.sum(-1).topk(moe.top_groups, dim=-1).indices
    outside = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter_(1, best, False)
    return grouped.masked_fill(outside.unsqueeze(-1), -torch.inf).flatten(1)


def combine(y: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted sums [N, out] of the pairs y [N * top_k, out], rounded once."""
    rows, top_k = weights.shape
    return torch.bmm(weights.to(y.dtype).unsqueeze(1), y.view(rows, top_k, y.shape[1])).squeeze(1)


def grouped_linear(x: Tensor, weight: Tensor, experts: Tensor, linear: Linear) -> Tensor:
    """ops.expert_linear with one product for each expert that occurs. The host waits for the groups."""
    order = experts.argsort(stable=True)
    rows = x.index_select(0, _rows_of(order, x))
    counts = torch.bincount(experts, minlength=weight.shape[0]).tolist()
    grouped, start = x.new_empty(experts.shape[0], weight.shape[1]), 0
    for expert, count in enumerate(counts):
        if count:
            grouped[start : start + count] = linear(rows[start : start + count], weight[expert], None)
            start += count
    return torch.empty_like(grouped).index_copy_(0, order, grouped)


def blocked_linear(x: Tensor, weight: Tensor, experts: Tensor) -> Tensor:
    """ops.expert_linear with shapes that do not depend on the routing, and without waiting for the device.

    The pairs are sorted by expert, and each expert's are padded to whole blocks of rows. A block is multiplied by a
    copy of its expert's matrix.
    """
    pairs, count = experts.shape[0], weight.shape[0]
    block = 1 << max(0, min(_MAX_BLOCK, pairs // count).bit_length() - 1)
    blocks = (pairs + min(count, pairs) * (block - 1)) // block  # enough for any routing
    order = experts.argsort(stable=True)
    sizes = experts.new_zeros(count).scatter_add_(0, experts, torch.ones_like(experts))
    ends = ((sizes + block - 1) // block).cumsum(0)  # in blocks
    starts = ends - (sizes + block - 1) // block
    chosen = experts.index_select(0, order)
    within = torch.arange(pairs, device=x.device) - (sizes.cumsum(0) - sizes).index_select(0, chosen)
    slots = starts.index_select(0, chosen) * block + within
    padded = x.new_zeros(blocks * block, x.shape[1]).index_copy_(0, slots, x.index_select(0, _rows_of(order, x)))
    # Blocks after the last one in use multiply zeros by any matrix.
    expert_of_block = torch.searchsorted(ends, torch.arange(blocks, device=x.device), right=True).clamp_(max=count - 1)
    y = x.new_empty(blocks, block, weight.shape[1])
    step = max(1, _MAX_COPY // (weight.shape[1] * weight.shape[2] * weight.itemsize))
    for first in range(0, blocks, step):
        part = slice(first, first + step)
        matrices = weight.index_select(0, expert_of_block[part])
        torch.bmm(padded.view(blocks, block, -1)[part], matrices.transpose(1, 2), out=y[part])
    grouped = y.flatten(0, 1).index_select(0, slots)
    return torch.empty_like(grouped).index_copy_(0, order, grouped)


def _rows_of(pairs: Tensor, x: Tensor) -> Tensor:
    """Return the row of x that each pair multiplies."""
    repeated = pairs.shape[0] // max(1, x.shape[0])
    return pairs if repeated <= 1 else pairs // repeated
