"""The MLP of a decoder layer. `ModelSpec.mlp_of` chooses the class from MLPS."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from yalis.kernels import ops, routed
from yalis.parallel.linear import ExpertLinear, ReplicatedLinear, column_parallel, row_parallel
from yalis.parallel.plan import Grid
from yalis.parallel.weights import AliasedShard, ExpertShard, RowShard
from yalis.spec import ModelSpec


class MLP(nn.Module, ABC):
    #: Whether a step on a CPU can be recorded: the same native calls compute it for any tokens. CUDA graphs need more
    #: of every MLP: shapes that do not depend on the tokens, and no wait for the device.
    recordable_on_cpu = True

    @abstractmethod
    def __init__(self, spec: ModelSpec, grid: Grid, prefix: str, dtype: torch.dtype, device: torch.device) -> None:
        """`prefix`: the name of the MLP's tensors in the checkpoint, such as "model.layers.0.mlp"."""
        super().__init__()

    @abstractmethod
    def forward(self, x: Tensor, kv_slots: Tensor | None = None, rows: Tensor | None = None) -> Tensor:
        """[T, hidden / c] to [T, hidden / c].

        `kv_slots`: negative for tokens that are padding; None if none are. `rows` [T]: the elements of `kv_slots` that
        belong to x; by default all.
        """


class GatedMLP(MLP):
    """down(activation(gate(x)) * up(x)). A rank holds the same rows of gate and up, so their product is local."""

    def __init__(
        self,
        spec: ModelSpec,
        grid: Grid,
        prefix: str,
        dtype: torch.dtype,
        device: torch.device,
        size: int | None = None,
    ) -> None:
        """`size`: the width, by default that of the model's dense layers."""
        super().__init__(spec, grid, prefix, dtype, device)
        size = size or spec.intermediate_size
        width = grid.width(size)
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

    def forward(self, x: Tensor, kv_slots: Tensor | None = None, rows: Tensor | None = None) -> Tensor:
        y: Tensor = self.down(self.gate_up.gated(x, self.activation))
        return y

    def partial(self, x: Tensor) -> Tensor:
        """Return this rank's summand of forward(x), without the all-reduce."""
        y: Tensor = self.down.weight(self.gate_up.gated(x, self.activation), self.down.bias)
        return y


class MoE(MLP):
    """The weighted sum of the chosen experts, and of a shared expert if the model has one.

    Every rank has a slice of every expert, split as a dense MLP is. With expert parallelism each row of the grid has
    whole experts instead; the shared expert, which serves every token, is still sliced. All ranks of a grid choose the
    same experts: the router's output has the same bits on each of them. One all-reduce sums the outputs of all experts.
    """

    recordable_on_cpu = False  # which matrices a step multiplies depends on its tokens

    def __init__(self, spec: ModelSpec, grid: Grid, prefix: str, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(spec, grid, prefix, dtype, device)
        assert spec.moe is not None
        self.moe, self.activation = spec.moe, spec.activation
        moe, hidden = spec.moe, spec.hidden_size
        stored = f"{prefix.removesuffix('mlp')}{moe.module}"
        outputs: list[RowShard] = [
            AliasedShard(f"{stored}.gate", moe.num_experts, range(moe.num_experts), f"{prefix}.gate")
        ]
        if moe.shared_width:
            outputs.append(RowShard(f"{prefix}.shared_expert_gate", 1, range(1)))
        self.router = ReplicatedLinear(grid, outputs, hidden, dtype, device)
        self.held, width = grid.experts(moe.num_experts), grid.expert_width(moe.width)
        #: how many tokens chose each expert, and padding tokens any; only with expert parallelism
        self.counts: Tensor | None = None
        if grid.expert_parallel:
            self.counts = torch.zeros(moe.num_experts + 1, dtype=torch.int64, device=device)

        def shard(expert: int, matrix: int) -> ExpertShard:
            """Return rows of gate (0), up (1) or down (2)."""
            name = f"{stored}.experts.{expert}.{moe.matrices[matrix]}"
            if matrix == 2:
                fused = f"{prefix}.experts.down_proj"
                return ExpertShard(name, hidden, grid.hidden(hidden), fused, expert, moe.num_experts)
            return ExpertShard(
                name, moe.width, width, f"{prefix}.experts.gate_up_proj", expert, moe.num_experts, 2, matrix
            )

        self.gate_up = ExpertLinear(
            len(self.held), [shard(expert, matrix) for expert in self.held for matrix in (0, 1)],
            hidden, grid.hidden(hidden), grid.col_group, dtype, device,
        )  # fmt: skip
        self.down = ExpertLinear(
            len(self.held), [shard(expert, 2) for expert in self.held],
            moe.width, width, grid.row_group, dtype, device,
        )  # fmt: skip
        self.shared = (
            GatedMLP(spec, grid, f"{prefix}.shared_expert", dtype, device, moe.shared_width)
            if moe.shared_width
            else None
        )

    def forward(self, x: Tensor, kv_slots: Tensor | None = None, rows: Tensor | None = None) -> Tensor:
        moe = self.moe
        logits = self.router(x)
        weights, experts = routed.route(logits[:, : moe.num_experts], moe.top_k, moe.renormalize)
        chosen = self._own_pairs(experts, kv_slots, rows)
        gate_up = self.gate_up.sum_partials(self.gate_up.routed(x, chosen))
        y = routed.combine(self.down.routed(ops.gated(gate_up, self.activation), chosen), weights)
        if self.shared is not None:
            y = y + self.shared.partial(x) * torch.sigmoid(logits[:, moe.num_experts :])
        return self.down.sum_partials(y)

    def _own_pairs(self, experts: Tensor, kv_slots: Tensor | None, rows: Tensor | None) -> Tensor:
        """Return the index of each chosen expert [T, top_k] among this rank's, [T * top_k]; -1 for those of others."""
        if self.counts is None:
            return experts.flatten()
        if kv_slots is not None and rows is not None:
            kv_slots = kv_slots.index_select(0, rows)
        return ops.own_experts(experts, kv_slots, self.counts, self.held.start, len(self.held))


MLPS: dict[str, type[MLP]] = {"gated": GatedMLP, "moe": MoE}
