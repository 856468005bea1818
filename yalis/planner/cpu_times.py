"""Times of a step on the CPU cores of one rank, in float32 with the native kernels (kernels/native.c)."""

from __future__ import annotations

from dataclasses import dataclass

from yalis.kernels.ops import NATIVE_MAX_ROWS
from yalis.perfmodel.floors import ModelDims
from yalis.planner.efficiency import Efficiencies
from yalis.planner.expert_times import ExpertLoad
from yalis.planner.step import StepShape


@dataclass(frozen=True)
class CpuTimes:
    """Rooflines with measured shares of the read and matmul rates of the rank's cores."""

    table: Efficiencies
    read: float  # bytes/s
    matmul: float  # FLOP/s
    itemsize: int

    max_recorded = NATIVE_MAX_ROWS  # sequences of a recorded step

    def step(self, dims: ModelDims, shape: StepShape, load: ExpertLoad | None = None) -> tuple[float, float, float]:
        """Return seconds of matmuls, attention and other operations. `load`: of the experts of a layer, if any."""
        table = self.table
        tokens, sampled = shape.tokens, shape.sampled
        # Parameters that a step reads and that a token multiplies; they differ only if there are experts.
        read: float = dims.matrix_params
        active: float = dims.matrix_params
        width: float = dims.intermediate
        if load is not None:
            chosen = load.pairs / tokens
            read, active = dims.params_with(load.reached), dims.params_with(chosen)
            width = max(width, chosen * dims.expert_width + dims.shared_width)
        after_attention = active / dims.layers - dims.hidden_shard * (dims.heads + 2 * dims.kv_heads) * dims.head_dim
        skipped = tokens - sampled if dims.head and sampled < tokens else 0
        matmul = self._linear(tokens, read, active)
        matmul -= 2 * after_attention * skipped / (self.matmul * table["gemm_eff"])
        matmul += self._linear(sampled, dims.head_params, dims.head_params) if sampled else 0.0
        prompt_pairs = sum(count * (first + (count + 1) / 2) for first, count in shape.chunks)
        pairs = shape.decode_context / table["attention_eff"] + prompt_pairs / table["prefill_attention_eff"]
        attention = 4 * dims.heads * dims.head_dim * dims.layers * pairs / self.matmul
        moved = tokens * dims.layers * self.itemsize * (8 * dims.hidden_shard + 3 * width)
        other = dims.layers * table["layer_s"] + moved / (self.read * table["elementwise_eff"])
        if shape.chunks:
            other += dims.layers * table["eager_layer_s"]
        return matmul, attention, other

    def _linear(self, rows: int, params: float, active: float) -> float:
        read = params * self.itemsize / (self.read * self.table["linear_eff"])
        if rows <= NATIVE_MAX_ROWS:
            return read + 2 * active * (rows - 1) / (self.matmul * self.table["native_eff"])
        return max(read, 2 * active * rows / (self.matmul * self.table["gemm_eff"]))
