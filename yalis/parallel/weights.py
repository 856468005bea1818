"""How a matrix is stored and multiplied: the format behind every linear layer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from yalis.kernels import ops


class ReadableTensor(Protocol):
    """A tensor of a checkpoint; only the slice asked for is read."""

    def read_into(self, out: Tensor, *index: slice) -> None: ...


class TensorSource(Protocol):
    """Where layers find their tensors by name; `shape` is the whole tensor's, checked against the checkpoint."""

    def tensor(self, name: str, shape: tuple[int, ...]) -> ReadableTensor: ...


class ParallelLayer(nn.Module, ABC):
    """A layer that holds weights: it knows which slices are its own and reads just those."""

    @abstractmethod
    def load(self, source: TensorSource) -> None: ...


@dataclass(frozen=True)
class Piece:
    """Some rows of a checkpoint's matrix. A layer may stack several: q, k and v; gate and up."""

    name: str  # without ".weight" or ".bias"
    total_rows: int  # of the tensor in the checkpoint
    rows: range  # those kept here

    def weight(self, source: TensorSource, total_cols: int) -> ReadableTensor:
        return source.tensor(f"{self.name}.weight", (self.total_rows, total_cols))

    def bias(self, source: TensorSource) -> ReadableTensor:
        return source.tensor(f"{self.name}.bias", (self.total_rows,))


class DenseWeight(nn.Module):
    """A matrix [out, in] in the compute dtype."""

    def __init__(self, out_features: int, in_features: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        shape = (out_features, in_features)
        self.data = nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)

    def fill(self, source: TensorSource, pieces: Sequence[Piece], total_cols: int, cols: range) -> None:
        """Read the pieces into the rows, one below the other, each cut to `cols`."""
        at = 0
        for piece in pieces:
            out = self.data[at : at + len(piece.rows)]
            lazy = piece.weight(source, total_cols)
            lazy.read_into(out, slice(piece.rows.start, piece.rows.stop), slice(cols.start, cols.stop))
            at += len(piece.rows)

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x times this, plus bias."""
        return ops.linear(x, self.data, bias)

    def gated(self, x: Tensor, activation: str, bias: Tensor | None) -> Tensor:
        """activation(gate) * up of x; the gate's rows are the first half."""
        return ops.gated_linear(x, self.data, activation, bias)
