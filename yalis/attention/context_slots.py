"""Cache slots of the keys a step attends to, as index tensors computed on the device without a host synchronization.

Shapes: S sequences · L keys per sequence, right-aligned · P keys of all sequences, packed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from yalis.attention.base import ForwardBatch


def slots_at_positions(block_tables: Tensor, positions: Tensor, block_size: int) -> Tensor:
    """Return the cache slots [S, L] of the tokens at `positions` [S, L], through block tables [S, max blocks]."""
    block = block_tables.long().gather(1, positions // block_size)
    return block * block_size + positions % block_size


def packed_context(batch: ForwardBatch, block_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return (sequence, position, slot), [P] each, of all cached tokens, one sequence after another."""
    total = sum(batch.context_lens)
    lengths = batch.context_len.long()
    sequences = torch.arange(lengths.shape[0], device=lengths.device)
    sequence = torch.repeat_interleave(sequences, lengths, output_size=total)
    start = lengths.cumsum(0) - lengths
    position = torch.arange(total, device=lengths.device) - start[sequence]
    block = batch.block_tables[sequence, position // block_size].long()
    return sequence, position, block * block_size + position % block_size
