"""What the device can do at best, measured here and now: bytes read a second, and matmul operations a second.

A decode step cannot be faster than reading its weights, nor a prefill faster than its multiplications, so these two are
the ground under every latency.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

_READ_BYTES = {"cpu": 2**28, "cuda": 2**32}  # far larger than any cache
_MATMUL_SIZE = {"cpu": 1536, "cuda": 8192}
_REPEATS = 5


@dataclass(frozen=True)
class DeviceRates:
    read_bytes_per_s: float
    matmul_flops_per_s: float

    def best(self, other: DeviceRates) -> DeviceRates:
        return DeviceRates(
            max(self.read_bytes_per_s, other.read_bytes_per_s), max(self.matmul_flops_per_s, other.matmul_flops_per_s)
        )


def measure(device: torch.device, dtype: torch.dtype) -> DeviceRates:
    return DeviceRates(read_bandwidth(device), matmul_rate(device, dtype))


def read_bandwidth(device: torch.device) -> float:
    """Bytes a second of the best of several kernels that only read; which one wins depends on the machine."""
    columns = 4096
    rows = _READ_BYTES[device.type] // (4 * columns)
    table = torch.ones(rows, columns, device=device)
    vector = torch.ones(columns, device=device)
    flat = table.view(-1)
    kernels: list[Callable[[], object]] = [flat.sum, flat.max, lambda: table.mv(vector), lambda: torch.dot(flat, flat)]
    return table.numel() * table.element_size() / min(_best_seconds(kernel, device) for kernel in kernels)


def matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Operations a second (a multiply and an add are two) of a large square product."""
    size = _MATMUL_SIZE[device.type]
    left = torch.ones(size, size, device=device, dtype=dtype)
    right = torch.ones(size, size, device=device, dtype=dtype)
    return 2 * size**3 / _best_seconds(lambda: left @ right, device)


def _best_seconds(kernel: Callable[[], object], device: torch.device) -> float:
    best = float("inf")
    for _ in range(_REPEATS + 1):  # the first is the warm-up, and never the best
        synchronize(device)
        start = time.perf_counter()
        kernel()
        synchronize(device)
        best = min(best, time.perf_counter() - start)
    return best


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def describe(device: torch.device) -> dict[str, Any]:
    """The device as a result file tells it."""
    if device.type != "cuda":
        return {
            "type": "cpu",
            "name": f"CPU, {torch.backends.cpu.get_cpu_capability()}",
            "threads": torch.get_num_threads(),
        }
    facts = torch.cuda.get_device_properties(device)
    return {
        "type": "cuda",
        "name": facts.name,
        "memory_gib": round(facts.total_memory / 2**30, 1),
        "capability": f"{facts.major}.{facts.minor}",
        "cuda": torch.version.cuda,
    }
