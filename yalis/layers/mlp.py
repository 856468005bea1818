"""The MLP of a decoder layer. `ModelSpec.mlp` chooses the class from MLPS."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from yalis.parallel.linear import column_parallel, row_parallel
from yalis.parallel.plan import Grid
from yalis.parallel.weights import RowShard
from yalis.spec import ModelSpec


class MLP(nn.Module, ABC):
    @abstractmethod
    def __init__(self, spec: ModelSpec, grid: Grid, prefix: str, dtype: torch.dtype, device: torch.device) -> None:
        """`prefix`: the name of the MLP's tensors in the checkpoint, such as "model.layers.0.mlp"."""
        super().__init__()

    @abstractmethod
    def forward(self, x: Tensor) -> Tensor:
        """[T, hidden / c] to [T, hidden / c]."""


class GatedMLP(MLP):
    """down(activation(gate(x)) * up(x)). A rank holds the same rows of gate and up, so their product is local."""

    def __init__(self, spec: ModelSpec, grid: Grid, prefix: str, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(spec, grid, prefix, dtype, device)
        size, width = spec.intermediate_size, grid.width(spec.intermediate_size)
        if spec.fused_projections:  # one matrix with gate above up
            name, up = f"{prefix}.gate_up_proj", range(size + width.start, size + width.stop)
            shards = [RowShard(name, 2 * size, width), RowShard(name, 2 * size, up)]
        else:
            shards = [RowShard(f"{prefix}.{part}_proj", size, width) for part in ("gate", "up")]
        self.gate_up = column_parallel(grid, shards, spec.hidden_size, spec.mlp_bias, dtype, device)
        self.down = row_parallel(
            grid, f"{prefix}.down_proj", size, width, spec.hidden_size, spec.mlp_bias, dtype, device
        )
        self.activation = spec.activation

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.gate_up.gated(x, self.activation))
        return y


MLPS: dict[str, type[MLP]] = {"gated": GatedMLP}
