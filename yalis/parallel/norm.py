"""RMSNorm over a hidden size that may be split over the grid's columns, and parameters of query and key heads."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from yalis.comm.allreduce_op import AllReduceOp
from yalis.kernels import ops
from yalis.parallel.plan import Grid
from yalis.parallel.weights import ParallelLayer, TensorSource
from yalis.spec import ModelSpec


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


class HeadSinks(ParallelLayer):
    """Attention sinks (gpt-oss): a logit of each query head of this rank."""

    def __init__(self, name: str, num_heads: int, heads: range, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.name, self.num_heads, self.heads = name, num_heads, heads
        self.weight = nn.Parameter(torch.empty(len(heads), dtype=dtype, device=device), requires_grad=False)

    def load(self, source: TensorSource) -> None:
        source.tensor(self.name, (self.num_heads,)).read_into(self.weight, slice(self.heads.start, self.heads.stop))


class JointHeadNorm(ParallelLayer):
    """RMSNorm over all query heads together, and one over all key heads (OLMoE). Mean squares are summed over the rows.

    A key head that several rows hold counts on the row with its first query head.
    """

    def __init__(self, grid: Grid, prefix: str, spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.names, self.head_dim, self.eps = (f"{prefix}.q_norm", f"{prefix}.k_norm"), spec.head_dim, spec.norm_eps
        self.totals = (spec.num_heads, spec.num_kv_heads)
        self.held = grid.heads(spec.num_heads, spec.num_kv_heads)
        heads, kv_heads = self.held
        group = spec.num_heads // spec.num_kv_heads
        self.first_key = sum(head * group < heads.start for head in kv_heads)
        self.rows, self.all_reduce = grid.rows, AllReduceOp(grid.row_group)
        size = (len(heads) + len(kv_heads)) * spec.head_dim
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype, device=device), requires_grad=False)

    def load(self, source: TensorSource) -> None:
        start = 0
        for name, total, held in zip(self.names, self.totals, self.held, strict=True):
            stop = start + len(held) * self.head_dim
            part = slice(held.start * self.head_dim, held.stop * self.head_dim)
            source.tensor(f"{name}.weight", (total * self.head_dim,)).read_into(self.weight[start:stop], part)
            start = stop

    def forward(self, qkv: Tensor) -> Tensor:
        """Return qkv [T, H + 2K, D] with normed queries and keys."""
        H, K = map(len, self.held)
        if self.rows == 1:
            return ops.joint_head_norm(qkv, self.weight, K, self.eps)
        q, k, v = qkv.split((H, K, K), dim=1)
        squares = qkv[:, : H + K].float().pow(2).sum(-1)  # [T, H + K]
        sums = torch.stack((squares[:, :H].sum(1), squares[:, H + self.first_key :].sum(1)), dim=1)  # [T, 2]
        sums = self.all_reduce(sums)
        queries, keys = (
            torch.rsqrt(sums[:, part] / (total * self.head_dim) + self.eps)[:, None, None]
            for part, total in enumerate(self.totals)
        )
        weight = self.weight.view(1, H + K, self.head_dim)
        q = (q.float() * queries).to(qkv.dtype) * weight[:, :H]
        k = (k.float() * keys).to(qkv.dtype) * weight[:, H:]
        return torch.cat((q, k, v), dim=1)
