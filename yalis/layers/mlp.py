"""The gated MLP. Gate and up rows stay paired on a rank, so the product between them is local."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from yalis.parallel.linear import down_linear, up_linear
from yalis.parallel.plan import Grid
from yalis.parallel.weights import Piece
from yalis.spec import ModelSpec


class GatedMLP(nn.Module):
    def __init__(self, spec: ModelSpec, grid: Grid, prefix: str, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        size, kept = spec.intermediate_size, grid.width(spec.intermediate_size)
        if spec.fused_projections:
            name = f"{prefix}.gate_up_proj"
            pieces = [Piece(name, 2 * size, kept), Piece(name, 2 * size, range(size + kept.start, size + kept.stop))]
        else:
            pieces = [Piece(f"{prefix}.{part}_proj", size, kept) for part in ("gate", "up")]
        self.gate_up = up_linear(grid, pieces, spec.hidden_size, spec.mlp_bias, dtype, device)
        self.down = down_linear(grid, f"{prefix}.down_proj", size, kept, spec.hidden_size, spec.mlp_bias, dtype, device)
        self.activation = spec.activation

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.gate_up.gated(x, self.activation))
        return y
