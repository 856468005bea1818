"""Explains out-of-memory errors to the user: how much was needed, how much was free, and which settings would fit."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import floor

import torch

from yalis.config import EngineConfig
from yalis.engine.device import CPU_KV_MEMORY, count_blocks, resolve_block_size, resolve_dtype, resolve_max_len
from yalis.errors import YalisFailure
from yalis.host_memory import read_host_memory
from yalis.launch.world import World
from yalis.parallel.memory import rank_memory, spell_bytes
from yalis.parallel.plan import Split
from yalis.spec import ModelSpec

# Substrings of out-of-memory messages that are raised as plain RuntimeError, and how they state the request.
_MESSAGES = ("can't allocate memory", "CUDA error: out of memory")
_REQUEST = re.compile(r"[Tt]ried to allocate ([\d.]+) (bytes|[KMG]iB)")
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the error is an allocation failure. The CUDA driver and the CPU allocator raise a plain RuntimeError."""
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or any(text in str(error) for text in _MESSAGES)


@dataclass(frozen=True)
class OutOfMemory:
    """A failed allocation. Sizes are in bytes, None if unknown."""

    requested: int | None  # by the allocation that failed
    free: int | None  # on the device at that time
    allocated: int = 0  # by the same work before the failure, according to the device's allocator

    @property
    def needed(self) -> int | None:
        """A lower bound of the memory that the work needs: it stopped at the failed allocation."""
        return None if self.requested is None else self.allocated + self.requested

    @property
    def available(self) -> int | None:
        """The memory that was free when the work started."""
        return None if self.free is None else self.allocated + self.free

    @property
    def shortfall(self) -> int | None:
        """The missing bytes. None also if enough was free, but fragmented."""
        if self.requested is None or self.free is None or self.requested <= self.free:
            return None
        return self.requested - self.free

    def fitting(self, count: int) -> int | None:
        """Return how many of `count` items fit, if the work needs the same memory for each; None if unknown."""
        if not (self.shortfall and self.needed and self.available):
            return None
        return count * self.available // self.needed

    def __str__(self) -> str:
        needed = "" if self.needed is None else f"at least {spell_bytes(self.needed)} needed, "
        return f"{needed}{_spell(self.available)} free"


@contextmanager
def explain_oom(
    device: torch.device, explain: Callable[[OutOfMemory], str], allocated: int | None = None
) -> Iterator[None]:
    """Turn an out-of-memory error within the block into a YalisFailure with the message of `explain`.

    `allocated`: bytes that were allocated on the device before, if the caller has measured them.
    """
    if allocated is None:
        allocated = allocated_bytes(device)
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        # An interrupted graph capture raises another error, with the out-of-memory error as its context.
        errors = [one for one in (error, error.__context__) if one is not None and is_out_of_memory(one)]
        if not errors:
            raise
        found = _REQUEST.search(str(errors[0]))
        requested = round(float(found[1]) * _UNITS[found[2]]) if found else None
        oom = OutOfMemory(requested, free_bytes(device), max(0, allocated_bytes(device) - allocated))
        raise YalisFailure(explain(oom)) from error


def allocated_bytes(device: torch.device) -> int:
    """Return the bytes that this process has allocated on a GPU; 0 for a CPU, whose allocator does not count them."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def free_bytes(device: torch.device) -> int | None:
    """Return the free memory of a device, or None if the system does not report it."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return read_host_memory().available


def check_host_memory(
    world: World, config: EngineConfig, spec: ModelSpec, split: Split, device: torch.device, label: str
) -> None:
    """Raise YalisFailure if the ranks of this host need more memory than it has. Every rank of the world calls this.

    Called before anything is loaded, because the kernel overcommits memory and would kill a rank later. Does nothing on
    a GPU, whose allocator raises an out-of-memory error.
    """
    if device.type != "cpu":
        return
    dtype, block_size = resolve_dtype(config.dtype, spec.dtype, device), resolve_block_size(config.block_size, device)
    max_len = resolve_max_len(config, spec, label)
    memory = rank_memory(spec, split, world.rank, dtype.itemsize, block_size, max_len)
    blocks = count_blocks(config, device, memory.kv_block_bytes, -(-max_len // block_size) * config.max_num_seqs)
    tables = 2 * memory.rotary.bytes  # computing the table needs a second copy
    by_rank = world.all_gather_object([memory.weight_bytes, tables, memory.kv_block_bytes, blocks, free_bytes(device)])
    node = world.members[world.rank].node
    local = [by_rank[rank] for rank, member in enumerate(world.members) if member.node == node]
    weights, tables, block_bytes = (sum(rank[index] for rank in local) for index in range(3))
    blocks = min(rank[3] for rank in by_rank)
    free = min((rank[4] for rank in local if rank[4] is not None), default=None)
    if free is None or weights + tables + blocks * block_bytes <= free:
        return
    if weights + tables > free:
        oom = OutOfMemory(weights + tables, free)
        message = weights_do_not_fit(oom, label, weights, split.per_replica, dtype, device)
    else:
        oom = OutOfMemory(blocks * block_bytes, free - weights - tables)
        message = cache_does_not_fit(oom, config, blocks, block_bytes, device)
    limit = "; a cgroup limits the memory of this job" if read_host_memory().limited else ""
    raise YalisFailure(f"{message}{limit}")


def weights_do_not_fit(
    oom: OutOfMemory, label: str, weight_bytes: int, ranks: int, dtype: torch.dtype, device: torch.device
) -> str:
    """Explain that a model did not fit. `ranks` share it; `weight_bytes`: of this one, on a CPU of all on this host."""
    options = ["a smaller model"]
    if dtype == torch.float32:
        options.insert(0, "dtype='bfloat16', which takes half")
    if oom.available is not None and weight_bytes <= oom.available:  # the weights fit, buffers next to them did not
        options = ["a smaller max_num_seqs= or max_model_len="]
    elif oom.available and device.type == "cuda":
        gpus = -(-ranks * weight_bytes // oom.available)
        options.insert(0, f"at least {gpus} GPUs with tp={gpus}")
    return (
        f"{label} in {str(dtype).removeprefix('torch.')} does not fit the memory of {device}: its weights take "
        f"{spell_bytes(weight_bytes)} there, {_spell(oom.available)} free; give {', or '.join(options)}"
    )


def cache_does_not_fit(
    oom: OutOfMemory, config: EngineConfig, blocks: int, block_bytes: int, device: torch.device
) -> str:
    """Explain that the KV cache did not fit, in terms of the argument that set its size."""
    needed = blocks * block_bytes
    available = oom.available if oom.available is not None and oom.available < needed else None
    if config.kv_memory is not None:
        given, fit = f" (kv_memory={config.kv_memory:g})", _limit("kv_memory", available and available / 2**30)
    else:
        given, fit = "", _limit("kv_blocks", available and available // block_bytes)
    return (
        f"a KV cache of {blocks} blocks{given} does not fit the memory of {device}: {spell_bytes(needed)} needed, "
        f"{_spell(oom.available)} free; give {fit}"
    )


def step_does_not_fit(
    oom: OutOfMemory, config: EngineConfig, device: torch.device, tokens: int, sequences: int, block_bytes: int
) -> str:
    """Explain that a step did not fit, by its sequences if each has one token, and otherwise by its tokens."""
    counts, work = (tokens, 0), f"{tokens} tokens"
    if tokens == sequences:
        counts, work = (0, sequences), f"{sequences} sequences"
    options = suggest_fit(oom, config, device, *counts, block_bytes)
    return f"{device} ran out of memory in a step of {work}: {oom}; give {', or '.join(options)}"


def suggest_fit(
    oom: OutOfMemory,
    config: EngineConfig,
    device: torch.device,
    tokens: int = 0,
    sequences: int = 0,
    block_bytes: int = 0,
) -> list[str]:
    """Return the arguments to reduce for a step of this many tokens or sequences, with values that fit if known.

    `block_bytes`: size of a KV block, if the KV cache is allocated and could be smaller; otherwise 0.
    """
    shortfall, options = oom.shortfall, []
    if tokens:
        options.append(_limit("max_batch_tokens", oom.fitting(tokens)))
    if sequences:
        options.append(_limit("max_num_seqs", oom.fitting(sequences)))
    if not block_bytes:
        return options
    if config.kv_blocks is not None:
        options.append(_limit("kv_blocks", shortfall and config.kv_blocks - -(-shortfall // block_bytes)))
    elif config.kv_memory is not None or device.type == "cpu":
        kv_memory = config.kv_memory or CPU_KV_MEMORY
        options.append(_limit("kv_memory", shortfall and kv_memory - shortfall / 2**30))
    else:
        fraction = shortfall and shortfall * config.ranks_per_gpu / torch.cuda.mem_get_info(device)[1]
        options.append(_limit("memory_fraction", fraction and config.memory_fraction - fraction))
    return options


def _limit(name: str, value: float | None) -> str:
    """Return "max_batch_tokens=812 or less", or advice without a number. Fractions are rounded down."""
    if isinstance(value, float):
        value = floor(value * 1000) / 1000
    return f"{name}={value} or less" if value and value > 0 else f"a smaller {name}="


def _spell(count: int | None) -> str:
    return "an unknown amount" if count is None else spell_bytes(count)
