"""Which device and dtype a configuration means on this machine, and how much memory there is."""

from __future__ import annotations

import gc
from collections import Counter
from dataclasses import replace

import torch

from yalis.config import EngineConfig
from yalis.errors import YalisError
from yalis.launch.world import World
from yalis.parallel.memory import spell_bytes
from yalis.spec import ModelSpec

OLDEST_TORCH = (2, 11)
#: What CUDA and NCCL take for themselves on a GPU that several ranks share.
SHARED_GPU_CONTEXT = 2 << 30
#: GiB of KV cache on a CPU, unless told otherwise.
CPU_KV_MEMORY = 2.0


def torch_is_old() -> bool:
    return tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2]) < OLDEST_TORCH


def rank_device(config: EngineConfig, world: World) -> torch.device:
    """This rank's device; every rank of the world asks at the same time. Ranks of a machine take its GPUs in turn."""
    if world.size == 1:
        return resolve_device(config.device)
    here = [member.rank for member in world.members if member.node == world.members[world.rank].node]
    if config.device not in ("auto", "cpu", "cuda"):
        raise YalisError(f"device is {config.device!r}, but there are {world.size} ranks; give auto, cpu or cuda")
    # A launcher may show a rank all GPUs of its machine or only its own: they are told apart by their names.
    visible: list[list[str]] = world.all_gather_object(_visible_gpus() if config.device != "cpu" else [])
    blind = [rank for rank, names in enumerate(visible) if not names]
    if config.device == "cpu" or (config.device == "auto" and len(blind) == world.size):
        return resolve_device("cpu")
    if blind:
        raise YalisError(f"{world.name(blind[0])} sees no GPU; start ranks where there are GPUs, or give --device cpu")
    load: Counter[str] = Counter()
    index = 0
    for rank in here:
        free = [i for i, name in enumerate(visible[rank]) if load[name] < config.ranks_per_gpu]
        if not free:
            count = len({name for other in here for name in visible[other]})
            most, needed = count * config.ranks_per_gpu, -(-len(here) // count)
            raise YalisError(
                f"{len(here)} ranks run on {world.members[rank].host}, which shows them {count} GPU(s); start at most "
                f"{most} there, or let ranks share a GPU with --ranks-per-gpu {needed}"
            )
        load[visible[rank][free[0]]] += 1
        if rank == world.rank:
            index = free[0]
    return torch.device("cuda", index)


def _visible_gpus() -> list[str]:
    if not torch.cuda.is_available():
        return []
    return [str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())]


def share_threads(config: EngineConfig, world: World, device: torch.device) -> None:
    """As many CPU threads as were asked for; ranks that compute on one machine's CPU otherwise share its cores."""
    node = world.members[world.rank].node
    here = sum(member.node == node for member in world.members)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    elif device.type == "cpu" and here > 1:
        torch.set_num_threads(max(1, torch.get_num_threads() // here))


def resolve_device(name: str) -> torch.device:
    version = torch.__version__
    if torch_is_old():
        wanted = ".".join(map(str, OLDEST_TORCH))
        raise YalisError(f"torch {version} is installed, but {wanted} or newer is needed; pip install -U torch")
    if name == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise YalisError(f"device is {name!r}; give auto, cpu, cuda or cuda:N") from None
    if device.type == "cpu":
        return device
    if device.type != "cuda":
        raise YalisError(f"device is {name!r}; give auto, cpu, cuda or cuda:N")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0:
        raise YalisError(f"device {name!r} is not there: torch {version} sees no GPU; give --device cpu")
    if (device.index or 0) >= count:
        raise YalisError(f"device {name!r} is not there: this machine has cuda:0 to cuda:{count - 1}")
    return torch.device("cuda", device.index or 0)


def resolve_dtype(name: str, preferred: str, device: torch.device) -> torch.dtype:
    """`auto` is the checkpoint's own on a GPU and float32 on a CPU, where 16-bit matmuls are slow."""
    if name == "auto":
        name = preferred if device.type == "cuda" else "float32"
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def resolve_block_size(size: int | None, device: torch.device) -> int:
    """Unless told otherwise, what attention on a GPU brings at once; a CPU has no such need."""
    return size or (64 if device.type == "cuda" else 16)


def with_block_size(config: EngineConfig) -> tuple[EngineConfig, int]:
    """The configuration with the block size that its device gets, for whoever tells what ran; and that size."""
    size = resolve_block_size(config.block_size, resolve_device(config.device))
    return replace(config, block_size=size), size


def longest_context(config: EngineConfig, spec: ModelSpec, label: str) -> int:
    """Positions to make room for: those asked for, or all that the model knows."""
    wanted = config.max_model_len or spec.max_position
    if wanted > spec.max_position:
        raise YalisError(
            f"max_model_len is {wanted}, but {label} was made for {spec.max_position} positions; give at most that"
        )
    return wanted


def count_blocks(config: EngineConfig, device: torch.device, block_bytes: int, most_useful: int, taken: int = 0) -> int:
    """How many KV blocks fit the budget; never more than every sequence at full length could use.

    `taken`: bytes of a GPU that something else will need.
    """
    if config.kv_blocks is not None:
        return config.kv_blocks
    if config.kv_memory is not None:
        budget = int(config.kv_memory * 2**30)
    elif device.type == "cpu":
        budget = int(CPU_KV_MEMORY * 2**30)
    else:
        free, total = torch.cuda.mem_get_info(device)
        if config.ranks_per_gpu == 1:
            # What the allocator keeps cached for activations is already outside `free`.
            budget = int(free - (1 - config.memory_fraction) * total) - taken
        else:  # `free` changes while the others load: count down from an even part instead
            used = torch.cuda.memory_reserved(device) + SHARED_GPU_CONTEXT
            budget = int(config.memory_fraction * total / config.ranks_per_gpu - used) - taken
    blocks = min(budget // block_bytes, most_useful)
    if blocks < 1:
        size, has = resolve_block_size(config.block_size, device), spell_bytes(max(budget, 0))
        there, larger = f"{has} are free", "--memory-fraction"
        if config.kv_memory is not None or device.type == "cpu":
            there, larger = f"{has} are meant for it", "--kv-memory"
        raise YalisError(
            f"no memory is left for the KV cache: one block of {size} tokens needs {spell_bytes(block_bytes)} "
            f"and {there}; give a larger {larger}, or a smaller --block-size or model"
        )
    return blocks


def release_memory(device: torch.device) -> None:
    """Hand what was freed back to the device, where the next engine counts it as free."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
