"""Linear layers of an r x c grid. With c = 1 they are the usual column- and row-parallel ones; with 1 x 1, plain.

Up (qkv, gate + up): W keeps out/r x in/c, partial sums are reduced over the columns.
Down (attention output, mlp down): W keeps out/c x in/r, partial sums are reduced over the rows.
A block's output is laid out like its input: split over c.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from yalis.comm.allreduce_op import AllReduceOp
from yalis.comm.base import Communicator
from yalis.kernels import ops
from yalis.parallel.plan import Grid
from yalis.parallel.weights import DenseWeight, ParallelLayer, Piece, TensorSource


class GridLinear(ParallelLayer):
    """Stacked pieces of rows, cut to some columns; partial sums are reduced over `reduce`."""

    def __init__(
        self,
        pieces: Sequence[Piece],
        total_cols: int,
        cols: range,
        bias: bool,
        reduce: Communicator,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.pieces, self.total_cols, self.cols = tuple(pieces), total_cols, cols
        self.reduce, self.sum = reduce, AllReduceOp(reduce)
        rows = sum(len(piece.rows) for piece in pieces)
        self.weight = DenseWeight(rows, len(cols), dtype, device)
        # The bias joins one partial sum only, so that it is added once.
        has_bias = bias and reduce.rank == 0
        self.bias = (
            nn.Parameter(torch.empty(rows, dtype=dtype, device=device), requires_grad=False) if has_bias else None
        )

    def load(self, source: TensorSource) -> None:
        self.weight.fill(source, self.pieces, self.total_cols, self.cols)
        if self.bias is None:
            return
        at = 0
        for piece in self.pieces:
            out = self.bias[at : at + len(piece.rows)]
            piece.bias(source).read_into(out, slice(piece.rows.start, piece.rows.stop))
            at += len(piece.rows)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.weight(x, self.bias)
        return y if self.reduce.size == 1 else self.sum(y)

    def gated(self, x: Tensor, activation: str) -> Tensor:
        """activation(gate) * up, where the pieces are gate and up; all in one, but for what ranks must sum between."""
        if self.reduce.size > 1:
            return ops.gated(self(x), activation)
        return self.weight.gated(x, activation, self.bias)


def up_linear(
    grid: Grid, pieces: Sequence[Piece], hidden: int, bias: bool, dtype: torch.dtype, device: torch.device
) -> GridLinear:
    """From the hidden size, split over the columns, to heads or MLP width, split over the rows."""
    return GridLinear(pieces, hidden, grid.hidden(hidden), bias, grid.col_group, dtype, device)


def down_linear(
    grid: Grid,
    name: str,
    total_in: int,
    kept_in: range,
    hidden: int,
    bias: bool,
    dtype: torch.dtype,
    device: torch.device,
) -> GridLinear:
    """From heads or MLP width, split over the rows, back to the hidden size, split over the columns."""
    piece = Piece(name, hidden, grid.hidden(hidden))
    return GridLinear([piece], total_in, kept_in, bias, grid.row_group, dtype, device)
