"""How weight matrices are stored and multiplied. Layers create them with `make_weight`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from yalis.kernels import ops


class ReadableTensor(Protocol):
    """A tensor of a checkpoint, of which only the requested slice is read."""

    def read_into(self, out: Tensor, *index: slice) -> None: ...


class TensorSource(Protocol):
    """Looks up checkpoint tensors by name and checks that the full tensor has this shape."""

    def tensor(self, name: str, shape: tuple[int, ...]) -> ReadableTensor: ...

    def has(self, name: str) -> bool:
        """Whether the checkpoint lists this tensor. Random weights list none."""
        ...


class ParallelLayer(nn.Module, ABC):
    """A layer that holds weights and reads only this rank's slices of them."""

    @abstractmethod
    def load(self, source: TensorSource) -> None: ...


@dataclass(frozen=True)
class RowShard:
    """The rows of a checkpoint matrix that this rank holds. A layer may stack several: q, k and v, or gate and up."""

    name: str  # without ".weight" or ".bias"
    total_rows: int  # of the matrix in the checkpoint
    rows: range  # held by this rank

    def weight(self, source: TensorSource, total_cols: int) -> ReadableTensor:
        return source.tensor(f"{self.name}.weight", (self.total_rows, total_cols))

    def bias(self, source: TensorSource) -> ReadableTensor:
        return source.tensor(f"{self.name}.bias", (self.total_rows,))


@dataclass(frozen=True)
class AliasedShard(RowShard):
    """Rows of a matrix that some checkpoints have under another name."""

    alias: str  # without ".weight"

    def weight(self, source: TensorSource, total_cols: int) -> ReadableTensor:
        name = self.alias if source.has(f"{self.alias}.weight") else self.name
        return source.tensor(f"{name}.weight", (self.total_rows, total_cols))


@dataclass(frozen=True)
class ExpertShard(RowShard):
    """Rows of one matrix of one expert. The checkpoint has it alone as `name`, or in a tensor of all experts."""

    fused: str  # the tensor of all experts [experts, matrices * total_rows, columns]
    expert: int
    num_experts: int
    matrices: int = 1  # stacked in the rows of the fused tensor
    matrix: int = 0  # which of them this is

    def weight(self, source: TensorSource, total_cols: int) -> ReadableTensor:
        if not source.has(self.fused):
            return super().weight(source, total_cols)
        shape = (self.num_experts, self.matrices * self.total_rows, total_cols)
        return _MatrixOfExpert(source.tensor(self.fused, shape), self.expert, self.matrix * self.total_rows)


@dataclass(frozen=True)
class TransposedExpertShard(RowShard):
    """Rows of one expert in the layout of gpt-oss: a tensor of all experts [experts, columns, matrices * total_rows].

    With two matrices, their columns alternate, and the shard has the rows of the first above those of the second. A
    checkpoint may also have each of them alone, as in the other families: then `names` are their names.
    """

    fused: str
    expert: int
    num_experts: int
    names: tuple[str, ...]  # without ".weight" or ".bias"

    def weight(self, source: TensorSource, total_cols: int) -> ReadableTensor:
        each = self.total_rows // len(self.names)
        if source.has(f"{self.names[0]}.weight"):
            return _Stacked(tuple(source.tensor(f"{name}.weight", (each, total_cols)) for name in self.names))
        tensor = source.tensor(self.fused, (self.num_experts, total_cols, self.total_rows))
        return _TransposedMatrices(tensor, self.expert, len(self.names))

    def bias(self, source: TensorSource) -> ReadableTensor:
        each = self.total_rows // len(self.names)
        if source.has(f"{self.names[0]}.bias"):
            return _Stacked(tuple(source.tensor(f"{name}.bias", (each,)) for name in self.names))
        tensor = source.tensor(f"{self.fused}_bias", (self.num_experts, self.total_rows))
        return _TransposedMatrices(tensor, self.expert, len(self.names))


@dataclass(frozen=True)
class _Stacked:
    """The same rows of several matrices or vectors, one above the other."""

    tensors: tuple[ReadableTensor, ...]

    def read_into(self, out: Tensor, *index: slice) -> None:
        rows, *columns = index
        each = slice(rows.start // len(self.tensors), rows.stop // len(self.tensors))
        for tensor, part in zip(self.tensors, out.chunk(len(self.tensors)), strict=True):
            tensor.read_into(part, each, *columns)


@dataclass(frozen=True)
class _TransposedMatrices:
    """Matrices or vectors of an expert that alternate in the last dimension of a tensor of all experts.

    Read as _Stacked would: rows start to stop of all of them are the columns from start to stop of the tensor.
    """

    tensor: ReadableTensor
    expert: int
    matrices: int

    def read_into(self, out: Tensor, *index: slice) -> None:
        rows, *columns = index
        stored = torch.empty_like(out).movedim(0, -1).unsqueeze(0)  # rows stay contiguous
        self.tensor.read_into(stored, slice(self.expert, self.expert + 1), *columns, rows)
        for matrix, part in enumerate(out.chunk(self.matrices)):
            part.copy_(stored[0, ..., matrix :: self.matrices].movedim(-1, 0))


@dataclass(frozen=True)
class _MatrixOfExpert:
    """One matrix in a tensor of all experts."""

    tensor: ReadableTensor
    expert: int
    first_row: int

    def read_into(self, out: Tensor, *index: slice) -> None:
        rows, columns = index
        shifted = slice(self.first_row + rows.start, self.first_row + rows.stop)
        self.tensor.read_into(out.unsqueeze(0), slice(self.expert, self.expert + 1), shifted, columns)


class Weight(nn.Module, ABC):
    """A matrix [out, in] in one stored format: stacked row shards, of which this rank has the columns `cols`."""

    def __init__(self, shards: Sequence[RowShard], total_cols: int, cols: range) -> None:
        super().__init__()
        self.shards, self.total_cols, self.cols = tuple(shards), total_cols, cols

    @abstractmethod
    def load(self, source: TensorSource) -> None:
        """Read this rank's slices."""

    @abstractmethod
    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return x @ weight.T + bias: [T, in] to [T, out]."""

    @abstractmethod
    def gated(self, x: Tensor, activation: str, bias: Tensor | None) -> Tensor:
        """Return activation(gate) * up, where the first half of the rows is gate: [T, in] to [T, out / 2]."""

    @abstractmethod
    def routed(
        self,
        x: Tensor,
        experts: Tensor,
        num_experts: int,
        bias: Tensor | None = None,
        activation: str = "",
        plan: Tensor | None = None,
    ) -> Tensor:
        """Multiply each row by the matrix of an expert (ops.expert_linear); the rows are those of all experts."""

    @abstractmethod
    def gather_rows(self, rows: Tensor) -> Tensor:
        """Return the rows of an embedding table: [T] indices to [T, in]."""


class DenseWeight(Weight):
    """A matrix stored in the compute dtype."""

    def __init__(
        self, shards: Sequence[RowShard], total_cols: int, cols: range, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(shards, total_cols, cols)
        shape = (sum(len(shard.rows) for shard in shards), len(cols))
        self.data = nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)

    def load(self, source: TensorSource) -> None:
        start = 0
        for shard in self.shards:
            out = self.data[start : start + len(shard.rows)]
            tensor = shard.weight(source, self.total_cols)
            tensor.read_into(out, slice(shard.rows.start, shard.rows.stop), slice(self.cols.start, self.cols.stop))
            start += len(shard.rows)

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return ops.linear(x, self.data, bias)

    def gated(self, x: Tensor, activation: str, bias: Tensor | None) -> Tensor:
        return ops.gated_linear(x, self.data, activation, bias)

    def routed(
        self,
        x: Tensor,
        experts: Tensor,
        num_experts: int,
        bias: Tensor | None = None,
        activation: str = "",
        plan: Tensor | None = None,
    ) -> Tensor:
        matrices = self.data.view(num_experts, -1, self.data.shape[1])
        biases = None if bias is None else bias.view(num_experts, -1)
        return ops.expert_linear(x, matrices, experts, biases, activation, plan)

    def gather_rows(self, rows: Tensor) -> Tensor:
        return ops.gather_rows(self.data, rows)


def make_weight(
    shards: Sequence[RowShard], total_cols: int, cols: range, dtype: torch.dtype, device: torch.device
) -> Weight:
    """Return the weight of a linear layer or embedding table, not loaded yet.

    This is the one place that chooses a stored format. A new format (fp8, int4, GGUF blocks) is a subclass of Weight
    in a separate file, returned from here.
    """
    return DenseWeight(shards, total_cols, cols, dtype, device)
