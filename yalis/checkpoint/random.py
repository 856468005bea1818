"""Random weights (--load random), generated on the device and identical however the model is split.

An element is a hash of the seed, the tensor name and its index in the full tensor: 64-bit integer arithmetic and one
fp32 multiplication, so CPU and GPU produce the same bits.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from yalis.checkpoint.base import Checkpoint, LazyTensor
from yalis.families import match_family

STD = 0.02
#: Elements generated at a time, with 16 bytes of temporaries each. On a CPU they stay in the cache of one thread:
#: distributing such short work over threads costs more than it gains, above all when ranks share the cores.
_CHUNK = {"cpu": 1 << 14, "cuda": 1 << 22}
_MIX = (-0x61C8864680B583EB, -0x4B47D0C5E5E1B4A7)  # odd 64-bit constants, as signed integers


class RandomTensor(LazyTensor):
    """Uniform random numbers with standard deviation STD, or the constant `fill` if it is given."""

    def __init__(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, seed: int, fill: float | None) -> None:
        self.name = name
        self.shape = tuple(shape)
        self.dtype = dtype
        self._fill = fill
        digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
        self._key = int.from_bytes(digest[:8], "little") >> 2  # 62 bits: adding an index cannot overflow

    def read_into(self, out: Tensor, *index: slice) -> None:
        rows, *columns = self.ranges(out, index)
        if self._fill is not None:
            out.fill_(self._fill)
            return
        strides = [math.prod(self.shape[axis + 1 :]) for axis in range(len(self.shape))]
        inner = torch.zeros((1,) * len(columns), dtype=torch.int64, device=out.device)
        for axis, part in enumerate(columns):
            offsets = _arange(part, out.device) * strides[axis + 1]
            inner = inner + offsets.view([-1 if axis == other else 1 for other in range(len(columns))])
        step = max(1, _CHUNK["cpu" if out.device.type == "cpu" else "cuda"] // max(1, inner.numel()))
        for start in range(rows.start, rows.stop, step):
            chunk = range(start, min(start + step, rows.stop))
            first = (_arange(chunk, out.device) * strides[0] + self._key).view(-1, *(1,) * len(columns))
            out[chunk.start - rows.start : chunk.stop - rows.start].copy_(_uniform(first + inner))


class RandomCheckpoint(Checkpoint):
    """Has every tensor that is requested, in the requested shape, and therefore no list of names."""

    def __init__(
        self, config: dict[str, Any], seed: int = 0, label: str = "random", source: Path | None = None
    ) -> None:
        self.config = config
        self.label = label
        self.source = source or Path(label)
        self._seed = seed
        stored = getattr(torch, str(config.get("dtype") or config.get("torch_dtype")).removeprefix("torch."), None)
        self._dtype = stored if isinstance(stored, torch.dtype) else torch.bfloat16
        # Norms start as the identity: offset + weight is 1.
        family = match_family(config)
        self._norm = 1.0 if family is None else 1.0 - family.norm_offset

    def names(self) -> Iterator[str]:
        return iter(())

    def find(self, name: str) -> None:
        """Return None: a tensor exists only once tensor() requests it with a shape."""
        return None

    def tensor(self, name: str, shape: tuple[int, ...]) -> RandomTensor:
        fill = None
        if name.endswith(("norm.weight", "norm.bias")) or "layernorm" in name:
            fill = 0.0 if name.endswith(".bias") else self._norm
        return RandomTensor(name, shape, self._dtype, self._seed, fill)


def _arange(part: range, device: torch.device) -> Tensor:
    return torch.arange(part.start, part.stop, dtype=torch.int64, device=device)


def _uniform(x: Tensor) -> Tensor:
    """Hash int64 indices to uniform floats, in place: two wrapping multiply-xor rounds, whose top 24 bits fit fp32."""
    x.mul_(_MIX[0])
    x.bitwise_xor_(x >> 32)
    x.mul_(_MIX[1])
    x.bitwise_right_shift_(40)
    return x.to(torch.float32).mul_(STD * math.sqrt(3.0) / (1 << 23))
