"""Which cache slots hold the tokens a step may see: index tensors derived on the device, without a host read.

Shapes: S sequences · L keys a sequence may see, right-aligned · P keys of all sequences, packed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from yalis.attention.base import ForwardBatch


def slots_of(block_tables: Tensor, positions: Tensor, block_size: int) -> Tensor:
    """The slots, [S, L], of tokens at `positions` [S, L] of the sequences whose block tables are given."""
    block = block_tables.long().gather(1, positions // block_size)
    return block * block_size + positions % block_size


def packed_context(batch: ForwardBatch, block_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """(sequence, position, slot) of every cached token of every sequence, one sequence after another, [P] each."""
    total = sum(batch.context_lens)
    lengths = batch.context_len.long()
    everyone = torch.arange(lengths.shape[0], device=lengths.device)
    sequence = torch.repeat_interleave(everyone, lengths, output_size=total)
    start = lengths.cumsum(0) - lengths
    position = torch.arange(total, device=lengths.device) - start[sequence]
    block = batch.block_tables[sequence, position // block_size].long()
    return sequence, position, block * block_size + position % block_size
