"""Resolves the device, dtype, block size and number of KV blocks of a configuration on this machine."""

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

MIN_TORCH = (2, 11)
#: Bytes that CUDA and NCCL use themselves on a GPU that several ranks share.
SHARED_GPU_CONTEXT = 2 << 30
#: Default size of the KV cache on a CPU, in GiB.
CPU_KV_MEMORY = 2.0


def torch_is_too_old() -> bool:
    return tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2]) < MIN_TORCH


def rank_device(config: EngineConfig, world: World) -> torch.device:
    """Return the device of this rank. Collective: every rank of the world must call it.

    Ranks of the same machine are assigned to its GPUs in order, up to ranks_per_gpu on each.
    """
    if world.size == 1:
        return resolve_device(config.device)
    local_ranks = [member.rank for member in world.members if member.node == world.members[world.rank].node]
    if config.device not in ("auto", "cpu", "cuda"):
        raise YalisError(f"device is {config.device!r}, but there are {world.size} ranks; give auto, cpu or cuda")
    # A launcher may make all GPUs of a machine visible to a rank, or only its own. UUIDs identify them in both cases.
    visible: list[list[str]] = world.all_gather_object(_visible_gpus() if config.device != "cpu" else [])
    without_gpu = [rank for rank, uuids in enumerate(visible) if not uuids]
    if config.device == "cpu" or (config.device == "auto" and len(without_gpu) == world.size):
        return resolve_device("cpu")
    if without_gpu:
        name = world.name(without_gpu[0])
        raise YalisError(f"{name} sees no GPU; start ranks on machines with GPUs, or give device='cpu'")
    load: Counter[str] = Counter()
    index = 0
    for rank in local_ranks:
        free = [i for i, uuid in enumerate(visible[rank]) if load[uuid] < config.ranks_per_gpu]
        if not free:
            count = len({uuid for other in local_ranks for uuid in visible[other]})
            max_ranks, needed = count * config.ranks_per_gpu, -(-len(local_ranks) // count)
            raise YalisError(
                f"{len(local_ranks)} ranks run on {world.members[rank].host}, which has {count} visible GPU(s); start "
                f"at most {max_ranks} there, or let ranks share a GPU with ranks_per_gpu={needed}"
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
    """Set the number of CPU threads. By default, ranks that compute on the CPU of one machine share its cores."""
    node = world.members[world.rank].node
    local_ranks = sum(member.node == node for member in world.members)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    elif device.type == "cpu" and local_ranks > 1:
        torch.set_num_threads(max(1, torch.get_num_threads() // local_ranks))


def resolve_device(name: str) -> torch.device:
    """Return the device for auto, cpu, cuda or cuda:N, after checking that torch supports it here."""
    version = torch.__version__
    if torch_is_too_old():
        needed = ".".join(map(str, MIN_TORCH))
        raise YalisError(f"torch {version} is installed, but {needed} or newer is needed; pip install -U torch")
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
        raise YalisError(f"device {name!r} is not available: torch {version} sees no GPU; give device='cpu'")
    if (device.index or 0) >= count:
        raise YalisError(f"device {name!r} is not available: this machine has cuda:0 to cuda:{count - 1}")
    return torch.device("cuda", device.index or 0)


def resolve_dtype(name: str, preferred: str, device: torch.device) -> torch.dtype:
    """Return the dtype. `auto` is the checkpoint's on a GPU and float32 on a CPU, where 16-bit matmuls are slow."""
    if name == "auto":
        name = preferred if device.type == "cuda" else "float32"
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def resolve_block_size(size: int | None, device: torch.device) -> int:
    """Return the tokens in a KV block. The default on a GPU is the tile of keys that the attention kernels load."""
    return size or (64 if device.type == "cuda" else 16)


def with_block_size(config: EngineConfig) -> tuple[EngineConfig, int]:
    """Return the configuration with its block size resolved, to be stored with results, and that block size."""
    size = resolve_block_size(config.block_size, resolve_device(config.device))
    return replace(config, block_size=size), size


def resolve_max_len(config: EngineConfig, spec: ModelSpec, label: str) -> int:
    """Return the maximum tokens of a sequence: max_model_len, or by default the model's maximum."""
    max_len = config.max_model_len or spec.max_position
    if max_len > spec.max_position:
        raise YalisError(
            f"max_model_len is {max_len}, but {label} supports {spec.max_position} positions; give at most that"
        )
    return max_len


def reduced_context(config: EngineConfig, spec: ModelSpec, device: torch.device, max_len: int) -> str | None:
    """Return a notice if the KV cache reduces the maximum tokens of a sequence to `max_len`; None if it does not."""
    if config.max_model_len is not None or max_len >= spec.max_position:
        return None
    more = "kv_memory=" if config.kv_memory is not None or device.type == "cpu" else "memory_fraction=, tp= or pp="
    more = "kv_blocks=" if config.kv_blocks is not None else more
    return (
        f"the model supports {spec.max_position} tokens in a sequence, but the KV cache holds {max_len}, so prompt and "
        f"completion end there; give a larger {more}, or max_model_len={max_len} to accept this"
    )


def count_blocks(
    config: EngineConfig, device: torch.device, block_bytes: int, max_blocks: int, reserved: int = 0
) -> int:
    """Return how many KV blocks fit the memory budget, at most max_blocks.

    `reserved`: bytes of GPU memory to leave free, for CUDA graphs that are captured later.
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
            # `free` does not include what the caching allocator holds for activations.
            budget = int(free - (1 - config.memory_fraction) * total) - reserved
        else:  # `free` changes while the other ranks load, so start from an equal share of the total instead
            used = torch.cuda.memory_reserved(device) + SHARED_GPU_CONTEXT
            budget = int(config.memory_fraction * total / config.ranks_per_gpu - used) - reserved
    blocks = min(budget // block_bytes, max_blocks)
    if blocks < 1:
        size, budget_text = resolve_block_size(config.block_size, device), spell_bytes(max(budget, 0))
        available, name = f"{budget_text} are free", "memory_fraction="
        if config.kv_memory is not None or device.type == "cpu":
            available, name = f"{budget_text} are set aside for it", "kv_memory="
        raise YalisError(
            f"no memory is left for the KV cache: one block of {size} tokens needs {spell_bytes(block_bytes)} "
            f"and {available}; give a larger {name}, or a smaller block_size= or model"
        )
    return blocks


def release_memory(device: torch.device) -> None:
    """Collect garbage and return cached memory to the device, where the next engine counts it as free."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
