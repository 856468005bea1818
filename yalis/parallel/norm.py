"""RMSNorm over a hidden size that may be split over the grid's columns, and the norm of query and key heads."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from yalis.comm.allreduce_op import AllReduceOp
from yalis.kernels import ops
from yalis.parallel.plan import Grid
from yalis.parallel.weights import ParallelLayer, TensorSource


class RMSNorm(ParallelLayer):
    """x / rms(x) * (offset + weight), computed in fp32; the mean square is all-reduced over the grid's columns."""

    def __init__(
        self, grid: Grid, name: str, size: int, eps: float, offset: float, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.grid, self.name, self.size, self.eps, self.offset = grid, name, size, eps, offset
        self.shard = grid.hidden(size)
        self.all_reduce = AllReduceOp(grid.col_group)
        # offset + weight would lose precision in a 16-bit float.
        stored = torch.float32 if offset else dtype
        self.weight = nn.Parameter(torch.empty(len(self.shard), dtype=stored, device=device), requires_grad=False)

    def load(self, source: TensorSource) -> None:
        source.tensor(f"{self.name}.weight", (self.size,)).read_into(
            self.weight, slice(self.shard.start, self.shard.stop)
        )
        if self.offset:
            self.weight.add_(self.offset)

    def forward(self, x: Tensor) -> Tensor:
        return self.add_norm(x, None)[0]

    def add_norm(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return (the norm of x + residual, x + residual); without a residual, (the norm of x, x)."""
        if self.grid.cols == 1:
            return ops.add_rms_norm(x, residual, self.weight, self.eps)
        if residual is not None:
            x = ops.add(residual, x)
        x_fp32 = x.float()
        squares = self.all_reduce(x_fp32.pow(2).sum(-1, keepdim=True))
        return (x_fp32 * torch.rsqrt(squares / self.size + self.eps) * self.weight).to(x.dtype), x


class HeadNorm(ParallelLayer):
    """The weight of an RMSNorm over each query or key head (Qwen3); every rank holds a copy."""

    def __init__(self, name: str, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.name, self.head_dim = name, head_dim
        self.weight = nn.Parameter(torch.empty(head_dim, dtype=dtype, device=device), requires_grad=False)

    def load(self, source: TensorSource) -> None:
        source.tensor(f"{self.name}.weight", (self.head_dim,)).read_into(self.weight, slice(0, self.head_dim))
