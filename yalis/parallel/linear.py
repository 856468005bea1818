"""Linear layers on an r x c grid of ranks. With c = 1 they are Megatron's column- and row-parallel layers.

Column-parallel (qkv, gate + up): a rank holds out/r x in/c; partial sums are reduced over the grid's columns.
Row-parallel (attention output, MLP down): a rank holds out/c x in/r; partial sums are reduced over the grid's rows.
So the input and the output of a block have the same layout: the hidden size split over the c columns.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from yalis.comm.allreduce_op import AllReduceOp
from yalis.comm.base import Communicator, SingleRank
from yalis.kernels import ops
from yalis.parallel.plan import Grid
from yalis.parallel.weights import ParallelLayer, RowShard, TensorSource, make_weight


class GridLinear(ParallelLayer):
    """x @ weight.T + bias, for some rows and columns of the matrix; partial sums are all-reduced over `reduce`."""

    def __init__(
        self,
        shards: Sequence[RowShard],
        total_cols: int,
        cols: range,
        bias: bool,
        reduce: Communicator,
        dtype: torch.dtype,
        device: torch.device,
        bias_of_all_ranks: bool = False,
    ) -> None:
        """`bias_of_all_ranks`: each rank of `reduce` has a bias of its own to add."""
        super().__init__()
        self.reduce, self.all_reduce = reduce, AllReduceOp(reduce)
        self.weight = make_weight(shards, total_cols, cols, dtype, device)
        # Only the first rank of the group adds the bias, so that the sum contains it once, unless each has its own.
        rows = sum(len(shard.rows) for shard in shards)
        has_bias = bias and (reduce.rank == 0 or bias_of_all_ranks)
        self.bias = (
            nn.Parameter(torch.empty(rows, dtype=dtype, device=device), requires_grad=False) if has_bias else None
        )

    def load(self, source: TensorSource) -> None:
        self.weight.load(source)
        if self.bias is None:
            return
        start = 0
        for shard in self.weight.shards:
            out = self.bias[start : start + len(shard.rows)]
            shard.bias(source).read_into(out, slice(shard.rows.start, shard.rows.stop))
            start += len(shard.rows)

    def forward(self, x: Tensor) -> Tensor:
        return self.sum_partials(self.weight(x, self.bias))

    def sum_partials(self, y: Tensor) -> Tensor:
        """All-reduce this rank's product over the group."""
        return y if self.reduce.size == 1 else self.all_reduce(y)

    def gated(self, x: Tensor, activation: str) -> Tensor:
        """Return activation(gate) * up, where the shards are gate and up. Fused unless an all-reduce comes between."""
        if self.reduce.size > 1:
            return ops.gated(self(x), activation)
        return self.weight.gated(x, activation, self.bias)


class ExpertLinear(GridLinear):
    """The matrices of some experts, stacked: `shards` has equally many rows for each expert, in order.

    With `apart` the ranks of `reduce` have different experts, and each adds the biases of its own.
    """

    def __init__(
        self,
        num_experts: int,
        shards: Sequence[RowShard],
        total_cols: int,
        cols: range,
        reduce: Communicator,
        dtype: torch.dtype,
        device: torch.device,
        bias: bool = False,
        apart: bool = False,
    ) -> None:
        """`apart`: the ranks of `reduce` have different experts, so each adds the biases of its own."""
        super().__init__(shards, total_cols, cols, bias, reduce, dtype, device, bias_of_all_ranks=apart)
        self.num_experts = num_experts

    def routed(self, x: Tensor, experts: Tensor, plan: Tensor | None) -> Tensor:
        """Return the product of each pair [P, out], not yet summed over `reduce`; see ops.expert_linear."""
        return self.weight.routed(x, experts, self.num_experts, self.bias, "", plan)

    def routed_gated(
        self, x: Tensor, experts: Tensor, activation: str, clamp: tuple[float, float] | None, plan: Tensor | None
    ) -> Tensor:
        """Return activation(gate) * up of each pair, or ops.clamped_gate. Fused unless an all-reduce comes between."""
        if self.reduce.size == 1 and clamp is None:
            return self.weight.routed(x, experts, self.num_experts, self.bias, activation, plan)
        gate_up = self.sum_partials(self.routed(x, experts, plan))
        return ops.gated(gate_up, activation) if clamp is None else ops.clamped_gate(gate_up, *clamp)


class ReplicatedLinear(GridLinear):
    """A small layer whose output [T, out] has the same bits on every rank of the grid, such as a router.

    With one column every rank has the whole matrix and the same input. With more, the grid's ranks split its columns,
    and partial sums are reduced over all of them: a reduction in each grid row could round differently.
    """

    def __init__(
        self,
        grid: Grid,
        shards: Sequence[RowShard],
        hidden: int,
        dtype: torch.dtype,
        device: torch.device,
        bias: bool = False,
    ) -> None:
        held = grid.hidden(hidden)
        part = grid.router_columns(hidden)
        reduce = grid.tp_group if grid.cols > 1 else SingleRank()
        super().__init__(shards, hidden, part, bias, reduce, dtype, device)
        self.part, self.dtype = slice(part.start - held.start, part.stop - held.start), dtype

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x[:, self.part].to(self.dtype))


class ExpertCorrection(ParallelLayer):
    """A float32 number for each expert, which routing adds to its score; every rank has all of them."""

    def __init__(self, name: str, num_experts: int, device: torch.device) -> None:
        super().__init__()
        self.name = name
        self.data = nn.Parameter(torch.empty(num_experts, dtype=torch.float32, device=device), requires_grad=False)

    def load(self, source: TensorSource) -> None:
        source.tensor(self.name, tuple(self.data.shape)).read_into(self.data, slice(0, len(self.data)))


def column_parallel(
    grid: Grid, shards: Sequence[RowShard], hidden: int, bias: bool, dtype: torch.dtype, device: torch.device
) -> GridLinear:
    """Make a layer from the hidden size (split over columns) to heads or MLP width (split over rows)."""
    return GridLinear(shards, hidden, grid.hidden(hidden), bias, grid.col_group, dtype, device)


def row_parallel(
    grid: Grid,
    name: str,
    total_in: int,
    in_shard: range,
    hidden: int,
    bias: bool,
    dtype: torch.dtype,
    device: torch.device,
) -> GridLinear:
    """Make a layer from heads or MLP width (split over rows) back to the hidden size (split over columns)."""
    shard = RowShard(name, hidden, grid.hidden(hidden))
    return GridLinear([shard], total_in, in_shard, bias, grid.row_group, dtype, device)
