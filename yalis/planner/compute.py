"""The time that one rank computes in a step, without communication: a roofline of each operation on its slice."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass

from yalis.engine.step_layouts import MAX_GRAPH_SEQUENCES, PROMPT_SIZES, DecodeLayout, StepLimits
from yalis.kernels.gpu_limits import GpuLimits
from yalis.kernels.skinny_config import MAX_ROWS, TMA_ROWS
from yalis.parallel.dims import rank_dims
from yalis.parallel.plan import Split
from yalis.perfmodel.floors import ModelDims
from yalis.planner.cpu_times import CpuTimes
from yalis.planner.efficiency import Efficiencies, load_efficiencies
from yalis.planner.expert_times import ASSUMPTIONS, Assumptions, expert_load, grouped_product
from yalis.planner.kernel_times import KernelTimes
from yalis.planner.machine import Machine
from yalis.planner.step import StepShape
from yalis.spec import ModelSpec


@dataclass(frozen=True)
class ComputeTime:
    """Seconds of one rank's slice of a step."""

    matmul: float
    attention: float
    other: float
    host: float  # to schedule, pack and launch the step
    replayed: bool  # whether the engine replays a recorded step (CUDA graph)
    host_ahead: float = 0.0  # the part of `host` that passes before the device gets the first kernel
    overlapped: bool = True  # whether the host prepares a step while the device runs the one before; not on a CPU
    #: Further host time of a step with both prompts and decodes. `alone` and `back_to_back` leave it out: in a batch
    #: that starts together, such a step follows one that runs longer than the host needs. The virtual clock adds it.
    host_mixed: float = 0.0

    @property
    def device(self) -> float:
        return self.matmul + self.attention + self.other

    @property
    def alone(self) -> float:
        """Seconds from the start of the host's work to the end of the device's, if the device was idle."""
        return self.host_ahead + max(self.device, self.host - self.host_ahead)

    @property
    def back_to_back(self) -> float:
        """Seconds of the step among equal steps, where the host prepares each while the one before it runs."""
        return max(self.device, self.host) if self.overlapped else self.device + self.host


@dataclass
class _Sum:
    """Seconds of the kernels of a step by category, and their number."""

    matmul: float = 0.0
    attention: float = 0.0
    other: float = 0.0
    kernels: int = 0

    def add(self, part: str, seconds: float, times: int = 1) -> None:
        setattr(self, part, getattr(self, part) + times * seconds)
        self.kernels += times


class ComputeModel:
    """Predicts the time of one rank's slice of steps on a machine."""

    def __init__(
        self,
        machine: Machine,
        spec: ModelSpec,
        split: Split,
        itemsize: int,
        rank: int = 0,
        max_num_seqs: int = MAX_GRAPH_SEQUENCES,
        efficiencies: Efficiencies | None = None,
        assumptions: Assumptions = ASSUMPTIONS,
    ) -> None:
        """`itemsize`: bytes of a weight and of a KV element. `max_num_seqs`: the engine's, which sets the size of the
        largest recorded decode step. `assumptions`: about the experts of a mixture of experts."""
        gpu = machine.gpu
        self.table = efficiencies or load_efficiencies(gpu.efficiencies)
        self.spec, self.split, self.itemsize, self.assumptions = spec, split, itemsize, assumptions
        self.dims: ModelDims = rank_dims(spec, split, rank, itemsize, itemsize)
        self._read, self._matmul = gpu.read_bytes_per_s.value, gpu.matmul_flops_per_s.value
        limits = GpuLimits(gpu.num_sms, gpu.shared_memory_kib << 10, has_tma=gpu.has_tma)
        self._kernels = KernelTimes(self.table, self._read, self._matmul, limits, itemsize)
        self._cpu = CpuTimes(self.table, self._read, self._matmul, itemsize) if self.table.device == "cpu" else None
        self._sizes = DecodeLayout.choose_sizes(StepLimits(max_num_seqs, 1, 1, 1))
        self._windows = Counter(self.dims.layer_windows()).items()
        self._pdl = split.per_replica == 1  # programmatic dependent launch: a kernel starts while the last one drains

    def step(self, shape: StepShape) -> ComputeTime:
        """Return the time of this rank's slice of a step."""
        if self._cpu is not None:
            return self._cpu_step(self._cpu, shape)
        size = self._recorded_size(shape)
        total = self._device_times(shape, shape.tokens if size is None else size)
        host, ahead = self._host_times(shape, size is not None)
        mixed = self._host_mixed(shape)
        return ComputeTime(total.matmul, total.attention, total.other, host, size is not None, ahead, host_mixed=mixed)

    def _recorded_size(self, shape: StepShape) -> int | None:
        """Return the tokens of the CUDA graph that the engine replays; None if it runs the step eagerly."""
        sizes: list[int] | tuple[int, ...]
        if not shape.chunks and shape.sampled == shape.decodes:
            sizes = self._sizes
        elif not shape.decodes and len(shape.chunks) == 1 and shape.sampled == 1:
            sizes = PROMPT_SIZES
        else:
            return None
        index = bisect_left(sizes, shape.tokens)
        return sizes[index] if index < len(sizes) else None

    def _device_times(self, shape: StepShape, tokens: int) -> _Sum:
        """Return the kernels of a step. `tokens`: those of the step, with the padding of a recorded one."""
        dims, kernels = self.dims, self._kernels
        total = _Sum()
        hidden, heads, kv_heads, dim = dims.hidden_shard, dims.heads, dims.kv_heads, dims.head_dim
        width = (heads + 2 * kv_heads) * dim
        # Rows of logits: a pure decode step computes them for its padding too.
        rows = tokens if shape.decodes == shape.tokens == shape.sampled else shape.sampled
        # After the attention of the last layer only these rows continue.
        last_rows = rows if dims.head and rows < tokens else tokens
        for window, count in self._windows:
            attention, launches = self._attention(shape, window)
            total.attention += count * attention
            total.kernels += count * launches
        total.add("other", kernels.elementwise(tokens, 2 * width), dims.layers)  # rotary embedding, KV cache write
        total.add("matmul", kernels.linear(tokens, width, hidden), dims.layers)
        tail_norms = dims.norms // 2  # between attention and the end of the layer
        self._add_norms(total, tokens, dims.layers * (dims.norms - tail_norms))
        # Where some layers have experts, the last one is among them.
        last = min(dims.expert_layers, 1)
        parts = ((tokens, dims.layers - 1, dims.expert_layers - last), (last_rows, 1, last))
        for tail_rows, layers, with_experts in parts:
            if tail_rows == 0 or layers == 0:
                continue
            total.add("matmul", kernels.linear(tail_rows, hidden, heads * dim), layers)
            self._add_norms(total, tail_rows, layers * tail_norms)
            self._add_mlp(total, tail_rows, dims.intermediate, layers - with_experts, dims.gated)
            self._add_experts(total, tail_rows, with_experts)
        if dims.embedding:
            total.add("other", kernels.elementwise(tokens, 2 * dims.hidden))
        if dims.head and rows:
            self._add_norms(total, rows, 1)
            total.add("matmul", kernels.linear(rows, dims.vocab, dims.hidden))
            self._add_sampling(total, rows)
        total.matmul *= self._throttling(total.matmul, shape)
        total.other += self.table["step_s"]
        if self._pdl and (tokens <= MAX_ROWS or (tokens == TMA_ROWS and self._kernels.uses_tma(self.dims))):
            total.other -= total.kernels * self.table["pdl_s"]
        return total

    def _add_mlp(self, total: _Sum, rows: int, width: int, layers: int, gated: bool = True) -> None:
        """Add the MLP of `layers` layers."""
        if not (layers and width):
            return
        kernels, hidden = self._kernels, self.dims.hidden_shard
        # With columns an all-reduce separates the matmul from the activation.
        fused = gated and self.dims.columns == 1
        total.add("matmul", kernels.linear(rows, (1 + gated) * width, hidden, fused), layers)
        if not fused:
            total.add("other", kernels.elementwise(rows, (2 + gated) * width), layers)
        total.add("matmul", kernels.linear(rows, hidden, width), layers)

    def _add_experts(self, total: _Sum, rows: int, layers: int) -> None:
        """Add the mixture of experts of `layers` layers: router, grouped products, weighted sum, shared expert."""
        if not layers:
            return
        dims, kernels, assumptions = self.dims, self._kernels, self.assumptions
        hidden, width = dims.hidden_shard, dims.expert_width
        load = expert_load(dims, self.split.rows, rows, assumptions)
        # With columns, all ranks of the grid split the columns of the router.
        router = hidden if dims.columns == 1 else max(1, hidden // self.split.rows)
        total.add("matmul", kernels.linear(rows, dims.router_rows, router), layers)
        total.add("other", assumptions["route_s"].value, layers)
        gated = dims.columns == 1
        total.add("matmul", grouped_product(kernels, load, 2 * width, hidden, gated, assumptions), layers)
        if not gated:
            total.add("other", kernels.elementwise(math.ceil(load.pairs), 3 * width), layers)
        total.add("matmul", grouped_product(kernels, load, hidden, width, False, assumptions), layers)
        total.add("other", kernels.elementwise(rows, (dims.top_k + 1) * hidden), layers)
        if dims.shared_width:
            self._add_mlp(total, rows, dims.shared_width, layers)
            total.add("other", kernels.elementwise(rows, 3 * hidden), layers)

    def _throttling(self, matmul: float, shape: StepShape) -> float:
        """Return the factor by which the power limit lengthens matmuls: the clock falls in long compute-bound steps."""
        if not shape.chunks:
            return 1.0
        return 1 + self.table["throttle"] * matmul / (matmul + self.table["throttle_after_s"])

    def _attention(self, shape: StepShape, window: int | None) -> tuple[float, int]:
        """Return seconds and launches of one layer's attention."""
        dims, seconds, launches = self.dims, 0.0, 0
        if shape.chunks:
            chunks = [(min(first, window or first), count) for first, count in shape.chunks]
            seconds += self._kernels.prefill_attention(chunks, dims.heads, dims.kv_heads, dims.head_dim)
            launches += 1
        if shape.decodes:
            mean = shape.decode_context / shape.decodes
            keys = min(mean, window or mean)
            seconds += self._kernels.decode_attention([(shape.decodes, keys)], dims.heads, dims.kv_heads, dims.head_dim)
            launches += 1
        return seconds, launches

    def _add_norms(self, total: _Sum, rows: int, count: int) -> None:
        """Add `count` fused residual additions and norms; with columns, they are separate torch operations."""
        hidden = self.dims.hidden_shard
        total.add("other", self._kernels.norm(rows, hidden), count)
        if self.dims.columns > 1:
            total.add("other", self._kernels.elementwise(rows, 4 * hidden), 4 * count)

    def _add_sampling(self, total: _Sum, rows: int) -> None:
        """Add the choice of greedy tokens: inside the recorded step with one rank, else by separate kernels."""
        name = "greedy_s" if self.split.per_stage == 1 else "sampler_s"
        logits = rows * self.dims.vocab * self.itemsize
        total.add("other", self.table[name] + logits / (self._read * self.table["elementwise_eff"]))

    def _host_times(self, shape: StepShape, replayed: bool) -> tuple[float, float]:
        """Return the host's seconds, and those before the device gets its first kernel."""
        table = self.table
        sequences = shape.decodes + len(shape.chunks)
        ahead = table["host_step_s"] + table["host_sequence_s"] * sequences + table["host_token_s"] * shape.tokens
        sampler = table["host_sampler_s"] if self.split.per_stage > 1 or not replayed else 0.0
        if replayed:
            return ahead + sampler, ahead
        launch = table["host_eager_s"] + self.dims.layers * table["host_layer_s"]
        if self.split.per_stage > 1:
            launch *= table["host_tp"]
        return ahead + sampler + launch, ahead

    def _host_mixed(self, shape: StepShape) -> float:
        """Return the host's further seconds in a step with prompts and decodes, which is never replayed.

        Each layer launches two attention kernels, and the sampler prepares a row for each sequence.
        """
        if not (shape.chunks and shape.decodes):
            return 0.0
        sequences = shape.decodes + len(shape.chunks)
        return self.dims.layers * self.table["host_mixed_layer_s"] + sequences * self.table["host_mixed_sequence_s"]

    def _cpu_step(self, cpu: CpuTimes, shape: StepShape) -> ComputeTime:
        load = (
            expert_load(self.dims, self.split.rows, shape.tokens, self.assumptions) if self.dims.expert_layers else None
        )
        matmul, attention, other = cpu.step(self.dims, shape, load)
        sequences = shape.decodes + len(shape.chunks)
        host = self.table["host_step_s"] + self.table["host_sequence_s"] * sequences
        replayed = not shape.chunks and shape.decodes <= cpu.max_recorded and self.split.per_replica == 1
        return ComputeTime(matmul, attention, other, host, replayed, host, overlapped=False)
