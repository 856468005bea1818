"""Hardware limits of a GPU that kernel launch configurations depend on."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch

# Maximum opt-in shared memory per thread block in KiB, by compute capability (CUDA programming guide, table of
# technical specifications). Capabilities not listed (desktop and workstation GPUs) have 99 KiB.
_SHARED_MEMORY_KIB = {(8, 0): 163, (8, 7): 163, (9, 0): 227, (10, 0): 227, (10, 3): 227}
_MIN_SHARED_MEMORY_KIB = 99


class GpuLimits(NamedTuple):
    num_sms: int
    max_shared_memory: int  # bytes of shared memory that one thread block may use
    has_tma: bool = False  # tensor memory accelerator: loads of whole tiles by tensor descriptor, from Hopper on


@cache
def gpu_limits(device: torch.device) -> GpuLimits:
    """Return the limits of `device`; for a CPU (Triton's interpreter), those of a small GPU without TMA."""
    if device.type != "cuda":
        return GpuLimits(4, _MIN_SHARED_MEMORY_KIB << 10)
    capability = torch.cuda.get_device_capability(device)
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    return GpuLimits(num_sms, _SHARED_MEMORY_KIB.get(capability, _MIN_SHARED_MEMORY_KIB) << 10, capability >= (9, 0))
