"""What a GPU has room for, which launches are chosen by."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch

# Bytes of shared memory a program may have, by compute capability; 99 KiB on those of desktops and workstations.
_SHARED = {(8, 0): 163, (8, 7): 163, (9, 0): 227, (10, 0): 227, (10, 3): 227}
_LEAST_SHARED = 99


class Room(NamedTuple):
    processors: int
    shared: int  # bytes of shared memory that a program may have
    descriptors: bool = False  # whether one instruction brings a tile that a descriptor describes: from Hopper on


@cache
def room_of(device: torch.device) -> Room:
    if device.type != "cuda":
        return Room(4, _LEAST_SHARED << 10)
    capability = torch.cuda.get_device_capability(device)
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    return Room(processors, _SHARED.get(capability, _LEAST_SHARED) << 10, capability >= (9, 0))
