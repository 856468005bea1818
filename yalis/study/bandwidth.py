"""Measures the device's peak read bandwidth and matmul rate.

A decode step cannot be faster than reading its weights, nor prefill faster than its matmuls, so these two rates give
the floor (the roofline lower bound) of every latency.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

_READ_BYTES = {"cpu": 2**28, "cuda": 2**32}  # much larger than any cache
_MATMUL_SIZE = {"cpu": 1536, "cuda": 8192}
_LM_HEAD = (128256, 4096)  # of Llama-3.1-8B: the GEMV with the highest bandwidth in a decode step
_CALLS_PER_TIMING = {"cpu": 1, "cuda": 8}  # several, to hide the start-up delay of an idle GPU
_REPEATS = 5


@dataclass(frozen=True)
class DeviceRates:
    """Peak rates of a device. The fields are written to results."""

    read_bytes_per_s: float
    matmul_flops_per_s: float
    read_by: str = ""  # the kernel that reached this bandwidth

    def best(self, other: DeviceRates) -> DeviceRates:
        """Return the higher of each rate."""
        reader = max(self, other, key=lambda rates: rates.read_bytes_per_s)
        matmul = max(self.matmul_flops_per_s, other.matmul_flops_per_s)
        return DeviceRates(reader.read_bytes_per_s, matmul, reader.read_by)


def measure_rates(device: torch.device, dtype: torch.dtype) -> DeviceRates:
    """Measure both rates; the read bandwidth is that of the fastest kernel tried."""
    read = torch_bandwidths(device)
    if device.type == "cuda":
        read |= gemv_bandwidth(device)
    fastest = max(read, key=lambda name: read[name])
    return DeviceRates(read[fastest], matmul_rate(device, dtype), fastest)


def torch_bandwidths(device: torch.device) -> dict[str, float]:
    """Return bytes per second of torch kernels that only read. Which one is fastest depends on the machine."""
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


def gemv_bandwidth(device: torch.device) -> dict[str, float]:
    """Return bytes per second of our GEMV, launched as in a decode step, which may be the fastest reader on a GPU.

    It alternates between several matrices, so that none is still in the cache when it is read again.
    """
    from yalis.kernels import ops
    from yalis.kernels.pdl import enable_pdl

    outputs, inputs = _LM_HEAD
    count = max(1, _READ_BYTES[device.type] // (2 * outputs * inputs))
    weights = torch.randn(count, outputs, inputs, device=device, dtype=torch.float16)
    x = torch.randn(1, inputs, device=device, dtype=torch.float16)

    def kernel() -> None:
        for weight in weights:
            ops.linear(x, weight)

    with enable_pdl(device):
        return {"linear, one row": weights.nbytes / _best_seconds(kernel, device)}


def matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Return FLOP/s of a large square matmul; a multiply-add counts as two.

    The matrices are random: constant ones draw less power, so a GPU would run at a higher clock than with a model.
    """
    size = _MATMUL_SIZE[device.type]
    left, right = torch.randn(2, size, size, device=device, dtype=dtype)
    return 2 * size**3 / _best_seconds(lambda: left @ right, device)


def _best_seconds(kernel: Callable[[], object], device: torch.device) -> float:
    calls = _CALLS_PER_TIMING[device.type]

    def work() -> None:
        for _ in range(calls):
            kernel()

    work()  # warm-up
    return min(time_work(work, device) for _ in range(_REPEATS)) / calls


def time_work(work: Callable[[], object], device: torch.device) -> float:
    """Return the seconds that `work` takes: by CUDA events on a GPU, by the host's clock on a CPU."""
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


def describe_device(device: torch.device) -> dict[str, Any]:
    """Return the device as result files store it."""
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
        "card": str(facts.uuid),  # two GPUs of the same model may differ by a few percent
    }
