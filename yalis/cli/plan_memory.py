"""The memory of each rank of a split, for `yalis plan`: weights, KV cache, and whether they fit a GPU."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from yalis.cli.flags import name_flags
from yalis.config import EngineConfig
from yalis.errors import YalisError, count_of
from yalis.log import get_logger

if TYPE_CHECKING:
    from yalis.parallel.memory import Part, RankMemory
    from yalis.parallel.plan import Split

_GIB = 2**30


@dataclass(frozen=True)
class GpuMemory:
    """The memory of a GPU that is planned for, in bytes."""

    total: int
    usable: int  # by one rank, for weights and KV cache


@dataclass(frozen=True)
class RankGroup:
    """Ranks with equal shares of the model."""

    ranks: list[int]
    memory: RankMemory  # of the first rank
    kv_blocks: int | None  # None: as many as fit in the memory of the GPU
    kv_left: int | None  # bytes of the GPU left for the KV cache, negative if the weights do not fit; None: unknown

    @property
    def kv_bytes(self) -> int | None:
        return None if self.kv_blocks is None else self.kv_blocks * self.memory.kv_block_bytes


@dataclass(frozen=True)
class SplitPlan:
    """The memory of all ranks of a split."""

    model: str
    device: str
    dtype: str
    max_model_len: int  # that the KV cache holds, if the user gave none
    notice: str | None  # the KV cache holds fewer tokens than the longest sequence
    split: Split
    experts: str  # why the experts are split like this; empty if there was nothing to choose
    whole: RankMemory  # the model on one rank
    ranks: list[RankGroup]  # one per rank
    seq_len: int  # tokens of each sequence that `sequences` counts
    max_num_seqs: int
    gpu: GpuMemory | None  # None: --gpu-memory was not given
    fitting_blocks: int | None  # KV blocks of a replica that the memory holds without --max-num-seqs; None: unknown
    assumed_cpu: bool  # no device was given, and this machine has no GPU

    @property
    def even_weight_bytes(self) -> float:
        return self.whole.weight_bytes / self.split.per_replica

    @property
    def even_kv_token_bytes(self) -> float:
        return self.whole.kv_token_bytes / (self.split.rows * self.split.stages)

    @property
    def kv_blocks(self) -> int | None:
        """KV blocks of a replica: a block spans all of its ranks, so the rank with the fewest sets the number."""
        counts = [one.kv_blocks for one in self.ranks if one.kv_blocks is not None]
        return min(counts, default=None)

    @property
    def sequences(self) -> int | None:
        """Sequences of `seq_len` tokens that a replica runs at a time."""
        held = self._count_sequences(self.kv_blocks)
        return None if held is None else min(held, self.max_num_seqs)

    @property
    def sequences_in_memory(self) -> int | None:
        """Sequences of `seq_len` tokens that the memory of a replica would hold without --max-num-seqs."""
        return self._count_sequences(self.kv_blocks if self.fitting_blocks is None else self.fitting_blocks)

    def _count_sequences(self, blocks: int | None) -> int | None:
        return None if blocks is None else blocks // -(-self.seq_len // self.whole.block_size)

    @property
    def fits(self) -> bool | None:
        """Whether every rank has memory for its weights; None if the memory of the GPUs is unknown."""
        return None if self.gpu is None else all(one.kv_left is not None and one.kv_left >= 0 for one in self.ranks)


def make_plan(config: EngineConfig, gpu_memory: float | None = None, seq_len: int | None = None) -> SplitPlan:
    """Return the plan of a configuration, for GPUs of `gpu_memory` GiB and sequences of `seq_len` tokens."""
    import torch

    from yalis.checkpoint.resolve import open_checkpoint
    from yalis.checkpoint.unsupported import ignored_parts
    from yalis.engine.device import (
        count_blocks,
        reduced_context,
        resolve_block_size,
        resolve_device,
        resolve_dtype,
        resolve_max_len,
    )
    from yalis.engine.expert_choice import choose_experts, list_splits
    from yalis.parallel.memory import rank_memory, whole_memory
    from yalis.spec import read_spec

    checkpoint = open_checkpoint(config.model, load="random")  # only its config is read
    spec = read_spec(checkpoint.config, checkpoint.label)
    for warning in ignored_parts(checkpoint, spec.num_layers):
        get_logger(__name__).warning("%s", warning)
    checkpoint.close()
    list_splits(config, spec, checkpoint.label)  # raises if there is none
    max_len = resolve_max_len(config, spec, checkpoint.label)
    if not 1 <= (max_len if seq_len is None else seq_len) <= max_len:
        raise YalisError(f"--seq-len is {seq_len}; give 1 to {max_len}, the tokens of the longest sequence")
    gpu = None if gpu_memory is None else _gpu_memory(gpu_memory, config)
    # A split for GPUs can be planned on a machine without GPUs.
    for_gpus = gpu is not None or config.device.startswith("cuda")
    device = torch.device("cuda") if for_gpus else resolve_device(config.device)
    dtype = resolve_dtype(config.dtype, spec.dtype, device)
    choice = choose_experts(config, spec, checkpoint.label, dtype.itemsize, device.type == "cuda")
    split = choice.split
    block_size = resolve_block_size(config.block_size, device)
    max_useful_blocks = -(-max_len // block_size) * config.max_num_seqs
    unknown_memory = device.type == "cuda" and config.kv_blocks is None and config.kv_memory is None

    ranks = range(split.size)
    memories = [rank_memory(spec, split, rank, dtype.itemsize, block_size, max_len) for rank in ranks]
    # The rank with the largest blocks limits its replica, and all replicas are equal.
    largest = max(memory.kv_block_bytes for memory in memories)
    blocks = None if unknown_memory else count_blocks(config, device, largest, max_useful_blocks)
    fitting: int | None = None
    kv_left: list[int | None] = [None] * split.size
    if gpu is not None:
        left = [gpu.usable - memory.weight_bytes - memory.rotary.bytes for memory in memories]
        fitting = max(0, min(rest // memory.kv_block_bytes for rest, memory in zip(left, memories, strict=True)))
        blocks, kv_left = min(fitting, max_useful_blocks), [*left]
    whole = whole_memory(spec, dtype.itemsize, block_size, max_len)
    capacity = max_len if blocks is None else blocks * block_size
    notice = None
    if config.max_model_len is None and capacity:
        max_len = min(max_len, capacity)
        notice = reduced_context(config, spec, device, max_len)
    elif 0 < capacity < max_len:
        notice = f"the KV cache holds {capacity} tokens, fewer than one sequence of --max-model-len {max_len}"
    groups = [RankGroup([rank], memories[rank], blocks, kv_left[rank]) for rank in ranks]
    name = str(dtype).removeprefix("torch.")
    assumed_cpu = config.device == "auto" and device.type == "cpu"
    return SplitPlan(
        checkpoint.label, device.type, name, max_len, notice, split, choice.reason, whole, groups,
        seq_len or max_len, config.max_num_seqs, gpu, fitting, assumed_cpu,
    )  # fmt: skip


def _gpu_memory(gib: float, config: EngineConfig) -> GpuMemory:
    """Return the memory of a GPU of `gib` GiB, of which a rank may use what memory_fraction and ranks_per_gpu say."""
    if not 0 < gib < math.inf:
        raise YalisError(f"--gpu-memory is {gib:g}; give a number of GiB above 0, such as 80")
    if config.device == "cpu" or config.kv_blocks is not None or config.kv_memory is not None:
        raise YalisError(
            "--gpu-memory gives the KV cache what the weights leave of a GPU; leave out --device cpu, --kv-blocks and "
            "--kv-memory"
        )
    return GpuMemory(int(gib * _GIB), int(gib * _GIB * config.memory_fraction / config.ranks_per_gpu))


def group_equal(groups: Iterable[RankGroup]) -> list[RankGroup]:
    """Join ranks that have the same sizes, to show them on one line."""
    by_size: dict[Any, RankGroup] = {}
    for rank in groups:
        memory = rank.memory
        spans = (memory.layers, memory.heads, memory.kv_heads, memory.experts, memory.width, memory.vocabulary)
        sizes = tuple(map(len, spans))
        group = by_size.setdefault((sizes, memory.parts()), RankGroup([], memory, rank.kv_blocks, rank.kv_left))
        group.ranks.extend(rank.ranks)
    return list(by_size.values())


def as_json(plan: SplitPlan) -> dict[str, Any]:
    return {
        "model": plan.model,
        "split": {**asdict(plan.split), "ranks": plan.split.size},
        "experts": plan.experts or None,
        "device": plan.device,
        "dtype": plan.dtype,
        "max_model_len": plan.max_model_len,
        "block_size": plan.whole.block_size,
        "kv_blocks": plan.kv_blocks,
        "seq_len": plan.seq_len,
        "sequences": plan.sequences,
        "sequences_in_memory": plan.sequences_in_memory,
        "gpu_memory_bytes": None if plan.gpu is None else plan.gpu.total,
        "usable_bytes": None if plan.gpu is None else plan.gpu.usable,
        "weights_fit": plan.fits,
        "weight_bytes": plan.whole.weight_bytes,
        "even_weight_bytes": plan.even_weight_bytes,
        "kv_bytes_per_token": plan.whole.kv_token_bytes,
        "even_kv_bytes_per_token": plan.even_kv_token_bytes,
        "ranks": [_rank_json(one) for one in plan.ranks],
    }


def _rank_json(group: RankGroup) -> dict[str, Any]:
    memory = group.memory
    names = ("layers", "heads", "kv_heads", "experts", "width", "vocabulary")
    spans = {name: getattr(memory, name) for name in names}
    return {
        "rank": group.ranks[0],
        **asdict(memory.coords),
        **{name: [span.start, span.stop] for name, span in spans.items()},
        "weight_bytes": memory.weight_bytes,
        "weights": [_part_json(part) for part in memory.weights],
        "rotary": _part_json(memory.rotary),
        "kv_bytes_per_token": memory.kv_token_bytes,
        "kv_per_block": [_part_json(part) for part in memory.kv_block],
        "kv_blocks": group.kv_blocks,
        "kv_bytes": group.kv_bytes,
        "kv_left_bytes": group.kv_left,
    }


def _part_json(part: Part) -> dict[str, Any]:
    return {**asdict(part), "repeated_bytes": part.repeated}


def print_table(plan: SplitPlan) -> None:
    ranks = "1 rank" if plan.split.size == 1 else f"{plan.split.size} ranks"
    print(f"{plan.model} · {plan.split} · {ranks} · {plan.dtype} · {plan.device}")
    if plan.assumed_cpu:
        print(
            f"this machine has no GPU, so this is the plan for a CPU in {plan.dtype}; for GPUs add --gpu-memory 80 "
            "(GiB of one GPU), for another dtype --dtype bfloat16"
        )
    if plan.experts:
        print(f"experts: {name_flags(plan.experts)}")
    experts = ["experts"] if plan.whole.experts else []
    heads = ["ranks", "layers", "heads", "kv heads", *experts, "MLP width", "vocabulary", "weights GiB", "KV B/token"]
    heads.append("KV GiB")
    lines: list[list[str]] = []
    notes: dict[tuple[str, str], None] = {}  # ordered, without duplicates
    for group in group_equal(plan.ranks):
        memory = group.memory
        parts = [memory.experts] if experts else []
        counts = (memory.layers, memory.heads, memory.kv_heads, *parts, memory.width, memory.vocabulary)
        kv_bytes = group.kv_bytes
        kv = "rest of GPU" if kv_bytes is None else f"{kv_bytes / _GIB:.3f}" if kv_bytes else "none"
        cells = [spell_ranks(group.ranks), *(str(len(part)) for part in counts), f"{memory.weight_bytes / _GIB:.3f}"]
        repeated = [part for part in memory.parts() if part.copies > 1]
        notes.update({(part.name, part.held): None for part in repeated})
        replicated = ", ".join(_spell_part(part, part in memory.kv_block) for part in repeated) or "nothing"
        lines.append([*cells, str(memory.kv_token_bytes), kv, replicated])
    widths = [max(map(len, column)) for column in zip(heads, *(line[:-1] for line in lines), strict=True)]
    for line in ([*heads, "replicated"], *lines):
        right = [cell.rjust(width) for cell, width in zip(line[1:-1], widths[1:], strict=True)]
        print("  ".join([line[0].ljust(widths[0]), *right, line[-1]]))
    if notes:
        print("replicated: held by several ranks, of which each has these bytes")
    for name, held in notes:
        print(f"  {name}: {held}")
    split, whole = plan.split, plan.whole
    weights, even = whole.weight_bytes / _GIB, plan.even_weight_bytes / _GIB
    print(
        "even shares, if nothing were replicated: "
        f"weights {weights:.3f} / (tp {split.per_stage} x pp {split.stages}) = {even:.3f} GiB, "
        f"KV {whole.kv_token_bytes} / (rows {split.rows} x pp {split.stages}) = {plan.even_kv_token_bytes:.0f} B/token"
    )
    if plan.gpu is not None and plan.fits:
        print(describe_fit(plan, plan.gpu))
    if plan.kv_blocks:
        size, sequences, in_memory = whole.block_size, plan.sequences or 0, plan.sequences_in_memory or 0
        limit = f"; limited by --max-num-seqs, memory would hold {in_memory}" if in_memory > sequences else ""
        print(
            f"KV cache of a replica: {plan.kv_blocks} blocks of {size} tokens, {plan.kv_blocks * size} tokens in all: "
            f"{count_of(sequences, 'sequence')} of {plan.seq_len} tokens{limit}"
        )
    if plan.notice is not None:
        print(name_flags(plan.notice))


def describe_fit(plan: SplitPlan, gpu: GpuMemory) -> str:
    needed = [one.memory.weight_bytes + one.memory.rotary.bytes for one in plan.ranks]
    rank = max(range(len(needed)), key=needed.__getitem__)
    answer = "fit" if plan.fits else "do not fit"
    more = "" if plan.fits else "; give a larger --tp or --pp, or GPUs with more memory"
    return (
        f"the weights {answer} GPUs of {gpu.total / _GIB:g} GiB: rank {rank} needs {needed[rank] / _GIB:.3f} of the "
        f"{gpu.usable / _GIB:.3f} GiB that --memory-fraction allows, not counting activations and CUDA graphs{more}"
    )


def _spell_part(part: Part, is_kv: bool) -> str:
    """Return the name of a part with its bytes, or for the KV cache, whose size varies, with its copies."""
    from yalis.parallel.memory import spell_bytes

    return f"{part.name} ({part.copies} copies)" if is_kv else f"{part.name} {spell_bytes(part.bytes)}"


def spell_ranks(ranks: Sequence[int], max_spans: int = 6) -> str:
    """Return ranks as spans such as "0-3, 8", shortened if there are many."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    texts = [str(first) if first == last else f"{first}-{last}" for first, last in spans]
    return ", ".join(texts) if len(texts) <= max_spans else ", ".join(texts[:max_spans]) + f", ... ({len(ranks)})"
