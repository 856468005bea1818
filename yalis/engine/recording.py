"""Recorders: record the steps of a device once, and replay each with one call instead of one launch per operation.

- CudaGraphRecorder captures CUDA graphs before the first request, for the bucket sizes of each layout
  (engine/step_layouts.py). A step is padded to the next size.
- CpuRecorder records the native calls of a decode step (kernels/replay.py) when its exact size occurs the second time.
- StepRecorder, the interface, records nothing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from yalis.attention.base import ForwardBatch
from yalis.config import EngineConfig
from yalis.engine.forward import ModelForward, StepResult
from yalis.engine.oom import OutOfMemory, explain_oom, suggest_fit
from yalis.engine.packing import PackedStep, StepKind
from yalis.engine.step_layouts import (
    LAYOUTS,
    InputBuffer,
    StepInputs,
    StepLayout,
    StepLimits,
    fill_random,
)
from yalis.kernels import ops
from yalis.kernels.replay import ReplayBuffer, record
from yalis.log import get_logger
from yalis.sampling.batch import RANDOM_COLUMNS

log = get_logger(__name__)

# Recorded CPU steps kept: each holds its own activations.
MAX_CPU_RECORDINGS = 16
# Upper bound of the memory that the driver takes for one CUDA graph.
DRIVER_BYTES = 64 << 20


class RecordedStep(ABC):
    """A step that can be computed again from other inputs."""

    @property
    @abstractmethod
    def num_tokens(self) -> int:
        """Tokens that a replay computes, padding included."""

    @abstractmethod
    def replay(self, step: PackedStep, hidden: Tensor | None) -> StepResult:
        """Write the step into the recorded input tensors and replay. The next replay overwrites the result."""


class StepRecorder:
    """The interface of recorders. This class itself records nothing, so every step runs eagerly."""

    #: whether steps are recorded by capture_all() before the first request
    captures_ahead = False
    #: GPU memory held by recordings
    nbytes = 0

    def __init__(self, forward: ModelForward) -> None:
        self._forward = forward

    def find(self, step: PackedStep) -> RecordedStep | None:
        """Return a recording that can compute the step, or None."""
        return None

    def run(self, step: PackedStep, batch: ForwardBatch) -> Tensor:
        """Run a step that has no recording, and return its output. CpuRecorder records it while it runs."""
        return self._forward.run(batch)

    def measure(self) -> int:
        """Return the bytes of GPU memory that capture_all() will need."""
        return 0

    def capture_all(self, block_bytes: int) -> None:
        """Record all steps. `block_bytes`: size of a KV block, for the advice when memory runs out."""

    def clear(self) -> None:
        """Drop all CUDA graphs and the references they hold to communicators. Does nothing in other recorders."""


@dataclass(frozen=True)
class RecordedCpuStep(RecordedStep):
    """The native calls of a decode step of a fixed number of sequences."""

    calls: ReplayBuffer
    batch: ForwardBatch  # the tensors that the calls read
    last_tokens: Tensor

    @property
    def num_tokens(self) -> int:
        return len(self.batch.token_ids)

    def replay(self, step: PackedStep, hidden: Tensor | None) -> StepResult:
        batch, token_ids = self.batch, step.token_ids
        request_slots = torch.from_numpy(step.request_slots)
        if step.uses_last_tokens:  # only with SchedulerConfig.feed_on_device, which the engine sets on a GPU
            token_ids = ops.use_last_tokens(torch.from_numpy(token_ids), self.last_tokens, request_slots).numpy()
        for tensor, values in (
            (batch.token_ids, token_ids),
            (batch.positions, step.positions),
            (batch.rope_rows, step.rope_rows),
            (batch.kv_slots, step.kv_slots),
            (batch.context_len, step.context_lens),
            (batch.block_tables[:, : step.block_tables.shape[1]], step.block_tables),
        ):
            tensor.numpy()[...] = values
        if batch.hidden is not None and hidden is not None:
            batch.hidden.copy_(hidden)
        return StepResult(self.calls.replay(), request_slots)


class CpuRecorder(StepRecorder):
    """Records decode steps of each exact size: recording costs little more than running, so nothing is padded."""

    def __init__(self, forward: ModelForward, max_blocks: int) -> None:
        """`max_blocks`: KV blocks of the longest sequence."""
        super().__init__(forward)
        self._max_blocks = max_blocks
        self._recorded: OrderedDict[tuple[int, int], RecordedCpuStep] = OrderedDict()  # by sequences and threads
        self._seen: set[tuple[int, int]] = set()
        self._usable = True

    def find(self, step: PackedStep) -> RecordedStep | None:
        if not self._recordable(step):
            return None
        key = self._key(step)
        found = self._recorded.get(key)
        if found is not None:
            self._recorded.move_to_end(key)
        return found

    def run(self, step: PackedStep, batch: ForwardBatch) -> Tensor:
        if not self._recordable(step):
            return self._forward.run(batch)
        key = self._key(step)
        if key not in self._seen:
            self._seen.add(key)  # a size that occurred once may not occur again
            return self._forward.run(batch)
        return self._record(key, batch)

    def _recordable(self, step: PackedStep) -> bool:
        return self._usable and step.kind is StepKind.DECODE and step.num_sequences <= ops.NATIVE_MAX_ROWS

    def _key(self, step: PackedStep) -> tuple[int, int]:
        return step.num_sequences, torch.get_num_threads()

    def _record(self, key: tuple[int, int], batch: ForwardBatch) -> Tensor:
        static = self._copy_inputs(batch)
        out, calls = record(lambda: self._forward.run(static))
        if calls is None:  # the model uses more than native calls
            self._usable = False
            return out
        self._recorded[key] = RecordedCpuStep(calls, static, self._forward.last_tokens)
        if len(self._recorded) > MAX_CPU_RECORDINGS:
            self._recorded.popitem(last=False)
        return out

    def _copy_inputs(self, batch: ForwardBatch) -> ForwardBatch:
        """Copy the tensors of a batch, with block tables wide enough for the longest sequence."""
        sequences, width = batch.block_tables.shape
        tables = batch.block_tables.new_zeros(sequences, self._max_blocks)
        tables[:, :width] = batch.block_tables
        copies: dict[str, Any] = {name: x.clone() for name, x in vars(batch).items() if isinstance(x, Tensor)}
        return replace(batch, **{**copies, "block_tables": tables})


class CudaGraph:
    """The kernels that a function launched, captured as a CUDA graph."""

    def __init__(self, function: Callable[[], Any], pool: Any) -> None:
        self._graph = torch.cuda.CUDAGraph()
        # Other threads, such as NCCL's, may call the driver during the capture.
        with torch.cuda.graph(self._graph, pool=pool, capture_error_mode="thread_local"):
            self.result = function()

    def replay(self) -> None:
        self._graph.replay()


@dataclass(frozen=True)
class RecordedSampling:
    """The random sampling after a recorded step: a CUDA graph of its own, so that greedy steps do without."""

    graph: CudaGraph
    buffer: InputBuffer
    rows: int
    tokens: Tensor  # [rows]

    def replay(self, step: PackedStep) -> Tensor:
        self.buffer.send(fill_random, self.rows, step)
        self.graph.replay()
        return self.tokens


@dataclass(frozen=True)
class RecordedCudaStep(RecordedStep):
    """A CUDA graph of one bucket size, and the tensors that it reads and writes."""

    graph: CudaGraph
    layout: StepLayout
    size: int
    buffer: InputBuffer
    inputs: StepInputs
    out: Tensor
    tokens: Tensor | None  # [R], the argmax of each row if the graph picks it
    sampling: RecordedSampling | None  # samples from `out` if some row is random; None if forward.samples is false

    @property
    def num_tokens(self) -> int:
        return self.size

    def replay(self, step: PackedStep, hidden: Tensor | None) -> StepResult:
        count = step.num_tokens
        self.buffer.send(self.layout.fill, self.size, step)
        if self.inputs.batch.hidden is not None and hidden is not None:
            with torch.inference_mode():  # the buffer was created in this mode
                self.inputs.batch.hidden[:count].copy_(hidden)
        self.graph.replay()
        tokens = self.tokens if step.picks else None
        if tokens is not None and step.random is not None:
            tokens = self.sampling.replay(step) if self.sampling is not None else None
        return StepResult(
            self.out[:count], self.inputs.sampling_slots[:count], None if tokens is None else tokens[:count]
        )


class CudaGraphRecorder(StepRecorder):
    """One CUDA graph for each bucket size. All share a memory pool, since they never run at the same time."""

    captures_ahead = True
    graph_type = CudaGraph

    def __init__(self, forward: ModelForward, config: EngineConfig, limits: StepLimits) -> None:
        super().__init__(forward)
        self._config = config
        self.layouts = {layout.kind: layout(limits) for layout in LAYOUTS}
        lengths = [layout.buffer_len(layout.sizes[-1]) for layout in self.layouts.values() if layout.sizes]
        self._buffer = InputBuffer(max(lengths), forward.device)
        largest = max([1, *self.layouts[StepKind.DECODE].sizes])
        self._random = InputBuffer(len(RANDOM_COLUMNS) * largest, forward.device)
        self._graphs_per_step = 2 if forward.picks else 1  # with that of the sampling
        self._recorded: dict[tuple[StepKind, int], RecordedCudaStep] = {}
        self._pool: Any = None

    def find(self, step: PackedStep) -> RecordedStep | None:
        layout = self.layouts.get(step.kind)
        size = layout.find_size(step) if layout is not None else None
        return self._recorded.get((step.kind, size)) if size is not None else None

    def measure(self) -> int:
        """Capture the two largest graphs of each layout, estimate the memory of all from them, and drop them again."""
        device, total = self._forward.device, 0
        torch.cuda.empty_cache()
        for layout in self._largest_first():
            sizes = layout.sizes[::-1]
            taken = []
            for size in sizes[:2]:
                before = DeviceMemory.now(device)
                self._capture(layout, size)
                taken.append(before.bytes_taken(device, self._graphs_per_step))
            total += sum(taken[:1]) + sum(taken[1:]) * (len(sizes) - 1)
        self.clear()
        torch.cuda.empty_cache()
        return total

    def capture_all(self, block_bytes: int) -> None:
        """Capture all graphs, the largest first, so that the others reuse its memory in the pool."""
        device = self._forward.device
        # Capturing empties the cache too. Without this, memory cached by earlier steps would be counted as the graphs'.
        torch.cuda.empty_cache()
        before = DeviceMemory.now(device)
        layouts = self._largest_first()
        for layout in layouts:
            for size in reversed(layout.sizes):
                self._capture(layout, size, block_bytes)
        self.nbytes = before.bytes_taken(device, self._graphs_per_step * len(self._recorded))
        sizes = "; ".join(f"{layout.kind.value} {', '.join(map(str, layout.sizes))}" for layout in layouts)
        log.info("captured CUDA graphs of these sizes in %.0f MiB: %s", self.nbytes / 2**20, sizes)

    def clear(self) -> None:
        self._recorded.clear()
        self._pool = None

    def _largest_first(self) -> list[StepLayout]:
        """Return the layouts that have sizes, ordered by their largest."""
        layouts = [layout for layout in self.layouts.values() if layout.sizes]
        return sorted(layouts, key=lambda layout: layout.sizes[-1], reverse=True)

    def _capture(self, layout: StepLayout, size: int, block_bytes: int = 0) -> None:
        forward, device = self._forward, self._forward.device
        inputs = layout.make_inputs(self._buffer.packed, size, forward.make_hidden(size))

        def step() -> tuple[Tensor, Tensor | None]:
            return forward.run_recorded(inputs, layout.may_use_last_tokens)

        def explain(oom: OutOfMemory) -> str:
            fits = [*suggest_fit(oom, self._config, device, *layout.count_work(size), block_bytes), "eager=True"]
            return (
                f"{device} ran out of memory capturing the CUDA graph of {layout.describe(size)}: {oom}; "
                f"give {', or '.join(fits)}"
            )

        with explain_oom(device, explain):
            if self._pool is None and device.type == "cuda":
                self._pool = torch.cuda.graph_pool_handle()
            step()  # compiles kernels and reserves their workspaces, which a capture must not do
            graph = self.graph_type(step, self._pool)
            out, tokens = graph.result
            sampling = self._capture_sampling(inputs, out, tokens) if tokens is not None and forward.samples else None
        self._recorded[layout.kind, size] = RecordedCudaStep(
            graph, layout, size, self._buffer, inputs, out, tokens, sampling
        )

    def _capture_sampling(self, inputs: StepInputs, out: Tensor, best_ids: Tensor) -> RecordedSampling:
        rows = len(out)
        random = self._random.packed[: len(RANDOM_COLUMNS) * rows].view(-1, rows)

        def sample() -> tuple[Tensor]:
            return self._forward.sample_recorded(out, best_ids, random, inputs.sampling_slots)

        sample()
        graph = self.graph_type(sample, self._pool)
        return RecordedSampling(graph, self._random, rows, graph.result[0])


@dataclass(frozen=True)
class DeviceMemory:
    """Memory of a device at one moment, in bytes. All zero on a CPU."""

    free: int
    reserved: int  # by the caching allocator of this process

    @classmethod
    def now(cls, device: torch.device) -> DeviceMemory:
        if device.type != "cuda":
            return cls(0, 0)
        torch.cuda.synchronize(device)
        return cls(torch.cuda.mem_get_info(device)[0], torch.cuda.memory_reserved(device))

    def bytes_taken(self, device: torch.device, graphs: int) -> int:
        """Return the bytes that this number of graphs took since then.

        Free memory also shrinks when other processes allocate. The growth of this process and the driver's share of a
        graph are therefore an upper bound.
        """
        now = DeviceMemory.now(device)
        return max(0, min(self.free - now.free, now.reserved - self.reserved + graphs * DRIVER_BYTES))
