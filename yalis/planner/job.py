"""What is to be run: a model, requests and the limits of the engine, and the memory they need on a split."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from yalis.config import EngineConfig
from yalis.parallel.memory import rank_memory
from yalis.parallel.plan import Grid, Split
from yalis.planner.machine import Machine
from yalis.planner.step import SimRequest
from yalis.planner.step_time import largest_slices
from yalis.scheduling.scheduler import SchedulerConfig
from yalis.scheduling.settings import scheduler_settings
from yalis.spec import ModelSpec

#: Tokens of a KV block, as engine/device.py resolves them.
GPU_BLOCK_SIZE, CPU_BLOCK_SIZE = 64, 16
#: Bytes of a GPU that CUDA, NCCL and the kernels hold themselves: about what engine/device.py sets aside.
_CONTEXT_BYTES = 2 << 30
#: Copies of the hidden states that are alive at the peak of a layer: residual, normed input, output, and one in a norm.
_HIDDEN_COPIES = 4
#: Copies of the logits while sampling, in float32: logits, sorted values and ids.
_LOGIT_COPIES = 3
_FLOAT32 = 4
#: Bytes that CUDA graphs of about twenty sizes hold.
_GRAPH_BYTES = 1 << 30


@dataclass(frozen=True)
class Job:
    """A workload for a model. `config` has the limits of the engine; its split and its model are not used."""

    model: str  # its name in messages
    spec: ModelSpec
    itemsize: int
    requests: Sequence[SimRequest]
    config: EngineConfig = field(default_factory=EngineConfig)
    on_gpu: bool = True

    @cached_property
    def model_len(self) -> int:
        """Tokens of the longest sequence: max_model_len, or prompt and output of the longest request."""
        longest = max(request.prompt_len + request.output_len for request in self.requests)
        return self.config.max_model_len or longest

    @cached_property
    def output_tokens(self) -> int:
        return sum(request.output_len for request in self.requests)

    @cached_property
    def prompt_tokens(self) -> int:
        return sum(request.prompt_len for request in self.requests)

    @property
    def block_size(self) -> int:
        return self.config.block_size or (GPU_BLOCK_SIZE if self.on_gpu else CPU_BLOCK_SIZE)

    def scheduler(self, split: Split) -> SchedulerConfig:
        """Return the configuration of a replica's scheduler."""
        config = replace(self.config, pp=split.stages)
        return scheduler_settings(config, self.spec, self.on_gpu, self.model_len, self.block_size)


@dataclass(frozen=True)
class Capacity:
    """The memory of the rank that has the least left for the KV cache, in bytes."""

    usable: float
    weights: int
    activations: int  # an estimate: activations of the largest step, CUDA graphs, CUDA and NCCL themselves
    kv_blocks: int  # of a replica
    sequences: int  # of the longest request, that a replica holds at a time

    @property
    def fits(self) -> bool:
        return self.sequences > 0


def capacity(job: Job, machine: Machine, split: Split) -> Capacity:
    """Return what a GPU of the machine holds of the job. Ranks with the largest slices of each stage are compared."""
    usable = machine.gpu.memory_bytes.value * job.config.memory_fraction
    tightest: Capacity | None = None
    for stage in sorted({0, min(1, split.stages - 1), split.stages - 1}):
        for rank in largest_slices(job.spec, replace(split, replicas=1), stage):
            memory = rank_memory(job.spec, split, rank, job.itemsize, job.block_size, job.model_len)
            weights = memory.weight_bytes + memory.rotary.bytes
            last = stage == split.stages - 1
            activations = activation_bytes(job, split, len(memory.vocabulary) if last else 0)
            blocks = max(0, int(usable - weights - activations) // memory.kv_block_bytes)
            sequences = blocks // -(-job.model_len // job.block_size)
            if tightest is None or blocks < tightest.kv_blocks:
                tightest = Capacity(usable, weights, activations, blocks, sequences)
    assert tightest is not None
    return tightest


def activation_bytes(job: Job, split: Split, vocabulary: int) -> int:
    """Return an estimate of the memory of the largest step. `vocabulary`: this rank's shard; 0 without head.

    The embedding is reduced over the whole hidden size. The MLP holds gate, up and their product, of each expert that a
    token chooses, and then also the rows that the experts read and write.
    """
    spec, config = job.spec, job.config
    grid = Grid(split.rows, split.cols, expert_parallel=split.expert_parallel)
    hidden = spec.hidden_size * (1 + _HIDDEN_COPIES / split.cols)
    tokens = min(config.max_batch_tokens, job.model_len * config.max_num_seqs)
    rows = min(config.max_num_seqs, tokens)
    width = 3 * len(grid.width(spec.intermediate_size))
    if spec.moe is not None:
        of_expert = 3 * len(grid.expert_width(spec.moe.width)) + 2 * len(grid.hidden(spec.hidden_size))
        width = spec.moe.top_k * of_expert + 3 * len(grid.width(spec.moe.shared_width))
    layer = tokens * (hidden + width) * job.itemsize
    device = _CONTEXT_BYTES + _GRAPH_BYTES if job.on_gpu else 0
    return int(device + layer + _LOGIT_COPIES * rows * vocabulary * _FLOAT32)
