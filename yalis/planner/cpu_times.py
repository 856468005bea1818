"""Times of a step on the CPU cores of one rank, in float32 with the native kernels (kernels/native.c)."""

from __future__ import annotations

from dataclasses import dataclass

from yalis.kernels.ops import NATIVE_MAX_ROWS
from yalis.perfmodel.floors import ModelDims
from yalis.planner.efficiency import Efficiencies
from yalis.planner.step import StepShape


@dataclass(frozen=True)
class CpuTimes:
    """Rooflines with measured shares of the read and matmul rates of the rank's cores."""

    table: Efficiencies
    read: float  # bytes/s
    matmul: float  # FLOP/s
    itemsize: int

    max_recorded = NATIVE_MAX_ROWS  # sequences of a recorded step

    def step(self, dims: ModelDims, shape: StepShape) -> tuple[float, float, float]:
        """Return seconds of matmuls, attention and other operations."""
        table = self.table
        tokens, sampled = shape.tokens, shape.sampled
        layer = dims.matrix_params / dims.layers
        after_attention = layer - dims.hidden_shard * (dims.heads + 2 * dims.kv_heads) * dims.head_dim
        skipped = tokens - sampled if dims.head and sampled < tokens else 0
        matmul = self._linear(tokens, dims.matrix_params)
        matmul -= 2 * after_attention * skipped / (self.matmul * table["gemm_eff"])
        matmul += self._linear(sampled, dims.head_params) if sampled else 0.0
        prompt_pairs = sum(count * (first + (count + 1) / 2) for first, count in shape.chunks)
        pairs = shape.decode_context / table["attention_eff"] + prompt_pairs / table["prefill_attention_eff"]
        attention = 4 * dims.heads * dims.head_dim * dims.layers * pairs / self.matmul
        moved = tokens * dims.layers * self.itemsize * (8 * dims.hidden_shard + 3 * dims.intermediate)
        other = dims.layers * table["layer_s"] + moved / (self.read * table["elementwise_eff"])
        if shape.chunks:
            other += dims.layers * table["eager_layer_s"]
        return matmul, attention, other

    def _linear(self, rows: int, params: int) -> float:
        read = params * self.itemsize / (self.read * self.table["linear_eff"])
        if rows <= NATIVE_MAX_ROWS:
            return max(read, 0.0) + 2 * params * (rows - 1) / (self.matmul * self.table["native_eff"])
        return max(read, 2 * params * rows / (self.matmul * self.table["gemm_eff"]))
