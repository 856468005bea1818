"""The MLP of a decoder layer. `ModelSpec.mlp_of` chooses the class from MLPS."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from yalis.kernels import ops
from yalis.parallel.linear import ExpertCorrection, ExpertLinear, ReplicatedLinear, column_parallel, row_parallel
from yalis.parallel.norm import norm_reduces
from yalis.parallel.plan import Grid
from yalis.parallel.weights import AliasedShard, ExpertShard, RowShard, TransposedExpertShard
from yalis.spec import ModelSpec


class MLP(nn.Module, ABC):
    @abstractmethod
    def __init__(self, spec: ModelSpec, grid: Grid, prefix: str, dtype: torch.dtype, device: torch.device) -> None:
        """`prefix`: the name of the MLP's tensors in the checkpoint, such as "model.layers.0.mlp"."""
        super().__init__()

    @abstractmethod
    def forward(self, x: Tensor, kv_slots: Tensor | None = None, rows: Tensor | None = None) -> Tensor:
        """[T, hidden / c] to [T, hidden / c]: this rank's summand if the next norm sums them (`norm_reduces`).

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
        if spec.fused_gate_up:  # one matrix with gate above up
            name, up = f"{prefix}.gate_up_proj", range(size + width.start, size + width.stop)
            shards = [RowShard(name, 2 * size, width), RowShard(name, 2 * size, up)]
        else:
            shards = [RowShard(f"{prefix}.{part}_proj", size, width) for part in ("gate", "up")]
        self.gate_up = column_parallel(grid, shards, spec.hidden_size, spec.mlp_bias, dtype, device)
        self.down = row_parallel(
            grid, f"{prefix}.down_proj", size, width, spec.hidden_size, spec.mlp_bias, dtype, device,
            norm_reduces(spec, grid),
        )  # fmt: skip
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

    def __init__(self, spec: ModelSpec, grid: Grid, prefix: str, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(spec, grid, prefix, dtype, device)
        assert spec.moe is not None
        self.moe, self.activation = spec.moe, spec.activation
        moe, hidden = spec.moe, spec.hidden_size
        stored = f"{prefix.removesuffix('mlp')}{moe.module}"
        router, experts = f"{stored}.{moe.router}", f"{prefix}.experts"
        outputs: list[RowShard] = [
            AliasedShard(router, moe.num_experts, range(moe.num_experts), f"{prefix}.{moe.router}")
        ]
        if moe.shared_gate:
            outputs.append(RowShard(f"{prefix}.{moe.shared}_gate", 1, range(1)))
        router_dtype = torch.float32 if moe.router_fp32 else dtype
        self.router = ReplicatedLinear(grid, outputs, hidden, router_dtype, device, moe.router_bias)
        self.correction: ExpertCorrection | None = None
        if moe.correction_bias:
            self.correction = ExpertCorrection(f"{router}.e_score_correction_bias", moe.num_experts, device)
        columns = grid.hidden(hidden)
        self.held, width = grid.experts(moe.num_experts), grid.expert_width(moe.width)
        #: Scores [tokens, experts] that replace the router's in measurements of random weights; see route_uniformly().
        self.uniform_scores: Tensor | None = None
        #: how many tokens chose each expert, and padding tokens any; only with expert parallelism
        self.counts: Tensor | None = None
        if grid.expert_parallel:
            self.counts = torch.zeros(moe.num_experts + 1, dtype=torch.int64, device=device)

        def shards(expert: int, down: bool) -> list[RowShard]:
            """Return the rows of gate and up, or those of down."""
            matrices = moe.matrices[2:] if down else moe.matrices[:2]
            names = tuple(f"{stored}.experts.{expert}.{matrix}" for matrix in matrices)
            fused = f"{experts}.down_proj" if down else f"{experts}.gate_up_proj"
            rows, size = (columns, hidden) if down else (width, moe.width)
            if moe.transposed:
                count = len(names)
                part = range(count * rows.start, count * rows.stop)
                name = f"{fused}.{expert}"
                return [TransposedExpertShard(name, count * size, part, fused, expert, moe.num_experts, names)]
            return [
                ExpertShard(name, size, rows, fused, expert, moe.num_experts, len(names), matrix)
                for matrix, name in enumerate(names)
            ]

        self.gate_up = ExpertLinear(
            len(self.held), [shard for expert in self.held for shard in shards(expert, down=False)],
            hidden, columns, grid.col_group, dtype, device, moe.expert_bias,
        )  # fmt: skip
        self.down = ExpertLinear(
            len(self.held), [shard for expert in self.held for shard in shards(expert, down=True)],
            moe.width, width, grid.row_group, dtype, device, moe.expert_bias, grid.expert_parallel,
            norm_reduces(spec, grid),
        )  # fmt: skip
        self.shared = (
            GatedMLP(spec, grid, f"{prefix}.{moe.shared}", dtype, device, moe.shared_width)
            if moe.shared_width
            else None
        )

    def forward(self, x: Tensor, kv_slots: Tensor | None = None, rows: Tensor | None = None) -> Tensor:
        moe = self.moe
        logits = self.router(x)
        correction = None if self.correction is None else self.correction.data
        scores = logits[:, : moe.num_experts] if self.uniform_scores is None else self.uniform_scores[: x.shape[0]]
        weights, experts = ops.route(scores, moe, correction)
        chosen = self._own_pairs(experts, kv_slots, rows)
        plan = ops.group_experts(x, chosen, self.gate_up.num_experts)
        gated = self.gate_up.routed_gated(x, chosen, self.activation, moe.clamp, plan)
        y = self.down.routed(gated, chosen, plan)
        shared = None if self.shared is None else self.shared.partial(x)
        gate = logits[:, moe.num_experts :] if moe.shared_gate else None
        return self.down.sum_partials(ops.combine_experts(y, weights, shared, gate))

    def _own_pairs(self, experts: Tensor, kv_slots: Tensor | None, rows: Tensor | None) -> Tensor:
        """Return the index of each chosen expert [T, top_k] among this rank's, [T * top_k]; -1 for those of others."""
        if self.counts is None:
            return experts.flatten()
        if kv_slots is not None and rows is not None:
            kv_slots = kv_slots.index_select(0, rows)
        return ops.own_experts(experts, kv_slots, self.counts, self.held.start, len(self.held))


#: The scores of a layer start so many rows after those of the layer before: decode steps share no row between layers.
_ROWS_BETWEEN_LAYERS = 64


def route_uniformly(blocks: Mapping[int, nn.Module], max_tokens: int) -> None:
    """Make the routers of these layers, by their number in the model, choose every set of experts equally often.

    The router is computed, and its scores are replaced by random numbers that depend on the layer and on the row of the
    token in its step: the same in every step and on every rank, whatever the split. A step only reads a slice of a
    table that all layers share, so it costs nothing and can be recorded. `max_tokens`: of the largest step.
    """
    layers = {number: block.mlp for number, block in blocks.items() if isinstance(block.mlp, MoE)}
    if not layers:
        return
    first = next(iter(layers.values()))
    rows = max_tokens + _ROWS_BETWEEN_LAYERS * max(layers)
    shape = (rows, first.moe.num_experts)
    # float32 has no ties. From the CPU, so that ranks on different devices have the same numbers.
    table = torch.rand(shape, generator=torch.Generator().manual_seed(0)).mul_(2).sub_(1)
    table = table.to(next(first.parameters()).device)
    for number, layer in layers.items():
        start = _ROWS_BETWEEN_LAYERS * number
        layer.uniform_scores = table[start : start + max_tokens]
        if layer.correction is not None:
            layer.correction.data.zero_()


class PlainMLP(MLP):
    """down(activation(up(x))), without a gate. The activation is plain torch on every device."""

    def __init__(self, spec: ModelSpec, grid: Grid, prefix: str, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(spec, grid, prefix, dtype, device)
        size, hidden = spec.intermediate_size, spec.hidden_size
        width = grid.width(size)
        up, down = (f"{prefix}.{name}" for name in spec.plain_mlp)
        self.up = column_parallel(grid, [RowShard(up, size, width)], hidden, spec.mlp_bias, dtype, device)
        self.down = row_parallel(
            grid, down, size, width, hidden, spec.mlp_bias, dtype, device, norm_reduces(spec, grid)
        )
        self.activation = spec.activation

    def forward(self, x: Tensor, kv_slots: Tensor | None = None, rows: Tensor | None = None) -> Tensor:
        y: Tensor = self.down(ops.activate(self.up(x), self.activation))
        return y


MLPS: dict[str, type[MLP]] = {"gated": GatedMLP, "moe": MoE, "plain": PlainMLP}
