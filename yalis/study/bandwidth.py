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
_HEAD = (128256, 4096)  # of Llama-3.1-8B: where a decode step reads the fastest
_IN_A_ROW = {"cpu": 1, "cuda": 8}  # calls for one reading of the clock: a GPU begins late where it stood idle
_REPEATS = 5


@dataclass(frozen=True)
class DeviceRates:
    read_bytes_per_s: float
    matmul_flops_per_s: float
    read_by: str = ""  # the kernel that read so fast

    def best(self, other: DeviceRates) -> DeviceRates:
        reader = max(self, other, key=lambda rates: rates.read_bytes_per_s)
        matmul = max(self.matmul_flops_per_s, other.matmul_flops_per_s)
        return DeviceRates(reader.read_bytes_per_s, matmul, reader.read_by)


def measure(device: torch.device, dtype: torch.dtype) -> DeviceRates:
    read = torch_reads(device)
    if device.type == "cuda":
        read |= product_reads(device)
    fastest = max(read, key=lambda name: read[name])
    return DeviceRates(read[fastest], matmul_rate(device, dtype), fastest)


def torch_reads(device: torch.device) -> dict[str, float]:
    """Bytes a second of torch's kernels that only read; which one wins depends on the machine."""
    columns = 4096
    rows = _READ_BYTES[device.type] // (4 * columns)
    table = torch.ones(rows, columns, device=device)
    vector = torch.ones(columns, device=device)
    flat = table.view(-1)
    kernels: dict[str, Callable[[], object]] = {
        "torch.sum": flat.sum,
        "torch.max": flat.max,
        "torch.mv": lambda: table.mv(vector),
        "torch.dot": lambda: torch.dot(flat, flat),
    }
    return {name: table.nbytes / _best_seconds(kernel, device) for name, kernel in kernels.items()}


def product_reads(device: torch.device) -> dict[str, float]:
    """Bytes a second of our product of one row, launched as in a decode step: on a GPU it may read the fastest.

    Over several matrices in turn, so that none is still in the cache when its turn comes.
    """
    from yalis.kernels import ops
    from yalis.kernels.pdl import enable_pdl

    outputs, inputs = _HEAD
    count = max(1, _READ_BYTES[device.type] // (2 * outputs * inputs))
    weights = torch.randn(count, outputs, inputs, device=device, dtype=torch.float16)
    x = torch.randn(1, inputs, device=device, dtype=torch.float16)

    def kernel() -> None:
        for weight in weights:
            ops.linear(x, weight)

    with enable_pdl(device):
        return {"linear, one row": weights.nbytes / _best_seconds(kernel, device)}


def matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Operations a second (a multiply and an add are two) of a large square product.

    Of random numbers: equal ones take less power, so a GPU keeps a higher clock than any model lets it.
    """
    size = _MATMUL_SIZE[device.type]
    left, right = torch.randn(2, size, size, device=device, dtype=dtype)
    return 2 * size**3 / _best_seconds(lambda: left @ right, device)


def _best_seconds(kernel: Callable[[], object], device: torch.device) -> float:
    calls = _IN_A_ROW[device.type]

    def work() -> None:
        for _ in range(calls):
            kernel()

    work()  # warms up
    return min(clock(work, device) for _ in range(_REPEATS)) / calls


def clock(work: Callable[[], object], device: torch.device) -> float:
    """Seconds that the device takes."""
    if device.type != "cuda":
        start = time.perf_counter()
        work()
        return time.perf_counter() - start
    with torch.cuda.device(device):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        end.synchronize()
    return begin.elapsed_time(end) / 1e3


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
        "card": str(facts.uuid),  # two of the same name may differ by a few percent
    }
