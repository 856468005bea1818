"""What is to be run: a model, requests and the limits of the engine, and the memory they need on a split."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from yalis.parallel.memory import rank_memory
from yalis.parallel.plan import Split
from yalis.planner.machine import Machine
from yalis.planner.step import SimRequest
from yalis.planner.step_time import largest_slices
from yalis.scheduling.scheduler import SchedulerConfig
from yalis.spec import ModelSpec

#: Bytes of a GPU that CUDA, NCCL and the kernels hold themselves: about what engine/device.py sets aside.
_CONTEXT_BYTES = 2 << 30
#: Copies of the hidden states that are alive at the peak of a layer: residual, normed input, output, and one in a norm.
_HIDDEN_COPIES = 4
#: Copies of the logits while sampling, in float32: logits, sorted values and ids.
_LOGIT_COPIES = 3
_FLOAT32 = 4
#: Share of the weights that CUDA graphs hold for about twenty sizes; on the H200 0.6 GiB beside 15 GiB.
_GRAPH_BYTES = 1 << 30


@dataclass(frozen=True)
class Job:
    """A workload for a model, with the settings of the engine that runs it."""

    model: str
    spec: ModelSpec
    itemsize: int
    requests: Sequence[SimRequest]
    max_num_seqs: int = 64
    max_batch_tokens: int = 2048
    block_size: int = 64
    memory_fraction: float = 0.9
    max_model_len: int | None = None  # None: the longest request

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest request, prompt and output."""
        return max(request.prompt_len + request.output_len for request in self.requests)

    @property
    def model_len(self) -> int:
        return self.max_model_len or self.longest

    @cached_property
    def output_tokens(self) -> int:
        return sum(request.output_len for request in self.requests)

    @cached_property
    def prompt_tokens(self) -> int:
        return sum(request.prompt_len for request in self.requests)

    def scheduler(self, split: Split) -> SchedulerConfig:
        """Return the configuration that engine/engine.py gives the scheduler on GPUs."""
        pipelined = split.stages > 1
        return SchedulerConfig(
            max_num_seqs=self.max_num_seqs,
            max_batch_tokens=self.max_batch_tokens,
            max_model_len=self.model_len,
            block_size=self.block_size,
            max_in_flight=split.stages if pipelined else 2,
            feed_on_device=not pipelined,
            recompute_at=self.spec.rope.switch_at,
            prefix_reuse=False,
            pipelined=pipelined,
        )


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
    usable = machine.gpu.memory_bytes.value * job.memory_fraction
    tightest: Capacity | None = None
    for stage in sorted({0, min(1, split.stages - 1), split.stages - 1}):
        for rank in largest_slices(job.spec, split, stage):
            memory = rank_memory(job.spec, split, rank, job.itemsize, job.block_size, job.model_len)
            weights = memory.weight_bytes + memory.rotary.bytes
            last = stage == split.stages - 1
            activations = activation_bytes(job, split, len(memory.width), len(memory.vocabulary) if last else 0)
            blocks = max(0, int(usable - weights - activations) // memory.kv_block_bytes)
            sequences = blocks // -(-job.model_len // job.block_size)
            if tightest is None or blocks < tightest.kv_blocks:
                tightest = Capacity(usable, weights, activations, blocks, sequences)
    assert tightest is not None
    return tightest


def activation_bytes(job: Job, split: Split, width: int, vocabulary: int) -> int:
    """Return an estimate of the memory of the largest step. `width`, `vocabulary`: this rank's shards; 0 without head.

    The embedding is reduced over the whole hidden size, and the MLP holds gate, up and their product.
    """
    spec = job.spec
    hidden = spec.hidden_size * (1 + _HIDDEN_COPIES / split.cols)
    tokens = min(job.max_batch_tokens, job.model_len * job.max_num_seqs)
    rows = min(job.max_num_seqs, tokens)
    layer = tokens * (hidden + 3 * width) * job.itemsize
    return int(_CONTEXT_BYTES + _GRAPH_BYTES + layer + _LOGIT_COPIES * rows * vocabulary * _FLOAT32)
