"""NCCL's all-reduce of registered buffers, as a baseline: within a node it is much faster than without registration.

torch allocates them from a memory pool of NCCL, and all ranks of the group register the pool as symmetric memory. The
engine does not use it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from yalis.comm.custom_allreduce import CustomAllReduceGroup
from yalis.comm.torch_dist import TorchGroup
from yalis.launch.world import World

MIN_TORCH, MIN_NCCL = (2, 9), (2, 27)


def find_obstacle(world: World, device: torch.device) -> str | None:
    """Return why buffers cannot be registered on some rank, or None. Every rank calls this."""
    reasons = world.all_gather_object(_find_own_obstacle(device))
    if found := next(filter(None, reasons), None):
        return str(found)
    gpus = world.all_gather_object(str(torch.cuda.get_device_properties(device).uuid))
    return None if len(set(gpus)) == len(gpus) else "NCCL cannot register buffers of ranks that share a GPU"


def _find_own_obstacle(device: torch.device) -> str | None:
    if device.type != "cuda":
        return f"it is NCCL, and these ranks use {device.type}"
    torch_version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if torch_version < MIN_TORCH:
        return f"registered buffers need torch 2.9 or newer, and this is {torch.__version__}"
    nccl: Any = torch.cuda.nccl
    if nccl.version() < MIN_NCCL:
        return f"registered buffers need NCCL 2.27 or newer, and this is {'.'.join(map(str, nccl.version()))}"
    return None


class RegisteredNcclGroup(CustomAllReduceGroup):
    """NCCL's all-reduce. Tensors of `workspace` are registered; others are reduced too, without that advantage."""

    def __init__(self, torch_group: TorchGroup, device: torch.device) -> None:
        super().__init__(torch_group)
        self._device, self._pools = device, list[Any]()

    def all_reduce(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        return self.torch_group.all_reduce(x, out)

    def workspace(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate a tensor and register it with all ranks. Every rank calls this with the same shape."""
        nccl = self.torch_group._group
        pool: Any = torch.cuda.MemPool(nccl.mem_allocator)
        with torch.cuda.use_mem_pool(pool, device):
            tensor = torch.empty(shape, dtype=dtype, device=device)
        nccl.register_mem_pool(pool, symm=True)
        self._pools.append(pool)
        return tensor

    def close(self) -> None:
        """Deregister all buffers, which NCCL requires before the group is closed."""
        torch.cuda.synchronize(self._device)
        for pool in self._pools:
            self.torch_group._group.deregister_mem_pool(pool)
        self._pools.clear()
