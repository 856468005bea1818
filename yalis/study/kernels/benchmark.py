"""The kernel benchmark: operations of a decode step and prefill attention, compared with torch and with the floor.

Each operation is first checked against its reference, with outputs filled with NaN. It is then timed over several
copies of its inputs, so that matrices come from memory as in a decode step, not from the cache. On a GPU the calls are
captured in one CUDA graph, so that host time does not count. On a CPU our kernels are the native ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from yalis.engine.device import resolve_device
from yalis.errors import YalisFailure, count_of
from yalis.perfmodel.floors import ModelDims, floor_s
from yalis.study import bandwidth, results
from yalis.study.kernels.backends import Backend, ReferenceBackend, TorchBackend, TritonBackend, yalis_backends
from yalis.study.kernels.cases import DTYPES, KernelCase, KernelsPlan, list_cases, make_experts, make_linear
from yalis.study.spread import spread

if TYPE_CHECKING:
    from yalis.kernels.experts_config import ExpertShape, GemmLaunch
    from yalis.kernels.skinny_config import GemmConfig, GemmShape

LLAMA_8B = ModelDims(
    hidden=4096, layers=32, heads=32, kv_heads=8, head_dim=128, intermediate=14336, vocab=128256, tied=False
)
SMOLLM2_135M = ModelDims(
    hidden=576, layers=30, heads=9, kv_heads=3, head_dim=64, intermediate=1536, vocab=49152, tied=True
)
DIMS = {"cuda": LLAMA_8B, "cpu": SMOLLM2_135M}
#: Largest error of a single operation, relative to the norm of the reference.
_TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
_MIN_TIMING_S = 0.01  # calls are repeated until one timing takes this long


def measure(plan: KernelsPlan, command: str, report: Callable[[str], None] = lambda text: None) -> results.Result:
    """Run the benchmark; `report` is called with progress messages."""
    device = resolve_device(plan.device)
    dtype = DTYPES[plan.dtype] if plan.dtype != "auto" else torch.bfloat16 if device.type == "cuda" else torch.float32
    dims = plan.dims or DIMS[device.type]
    torch.manual_seed(plan.seed)
    report("measuring the device's bandwidth")
    rates = bandwidth.measure_rates(device, dtype)
    rows, work = [], []
    with torch.inference_mode():
        for case in list_cases(plan, dims, device, dtype):
            for suffix, backend in yalis_backends(device):
                if suffix and case.kernel != "step":
                    continue  # programmatic dependent launch only matters in a chain of kernels
                report(f"{case.kernel}{suffix} {case.shape}, {count_of(case.rows, 'row')}")
                timing = time_case(case, backend, device, dtype, plan.repeats)
                if case.streams(device) and not isinstance(timing, str):  # it may beat the measured bandwidth
                    read = case.bytes / min(timing.ours, timing.torch)
                    read_by = f"{case.kernel}{suffix}, {count_of(case.rows, 'row')}"
                    rates = rates.best(bandwidth.DeviceRates(read, 0.0, read_by))
                rows.append(_row(case, suffix, timing))
                work.append((case.bytes, case.flops))
    for row, (moved, flops) in zip(rows, work, strict=True):
        row["floor_us"] = 1e6 * floor_s(moved, flops, rates.read_bytes_per_s, rates.matmul_flops_per_s)
        if row["us"] is not None:
            row["share_of_floor"] = row["floor_us"] / row["us"]
    facts = {"dims": asdict(dims), "dtype": str(dtype).removeprefix("torch."), **asdict(rates)}
    return results.new("kernels", {**asdict(plan), **facts}, rows, command, [bandwidth.describe_device(device)])


def check_correct(result: results.Result) -> None:
    """Raise YalisFailure if any kernel differed from its reference."""
    if wrong := [row for row in result.rows if row["status"] != "ok"]:
        first = wrong[0]
        raise YalisFailure(
            f"{len(wrong)} of {count_of(len(result.rows), 'kernel')} differ from their reference, the first is "
            f"{first['kernel']} ({first['shape']}, {count_of(first['rows'], 'row')}): "
            f"{first['status'].removeprefix('wrong: ')}"
        )


@dataclass(frozen=True)
class CaseTiming:
    """Median seconds of one operation by our kernel and by torch, and our relative error."""

    ours: float
    torch: float
    error: float
    spread: tuple[float, float]  # 10th and 90th percentile of our seconds


def time_case(
    case: KernelCase, backend: Backend, device: torch.device, dtype: torch.dtype, repeats: int
) -> CaseTiming | str:
    """Check and time one operation. Returns a sentence instead of times if the check fails."""
    error = find_error(case, backend)
    if not error <= _TOLERANCE[dtype] * case.tolerance_scale:
        return f"wrong: off by {error:.1e}"
    ours, by_torch = (
        time_calls(partial(case.run, one), len(case.copies), device, repeats) for one in (backend, TorchBackend())
    )
    return CaseTiming(median(ours), median(by_torch), error, spread(ours))


def _row(case: KernelCase, suffix: str, timing: CaseTiming | str) -> dict[str, Any]:
    row: dict[str, Any] = results.empty_row("kernels")
    row.update(kernel=case.kernel + suffix, shape=case.shape, rows=case.rows, status="ok")
    if isinstance(timing, str):
        row["status"] = timing
        return row
    row.update(
        error=timing.error,
        us=1e6 * timing.ours,
        us_low=1e6 * timing.spread[0],
        us_high=1e6 * timing.spread[1],
        torch_us=1e6 * timing.torch,
        ratio=timing.torch / timing.ours,
        gb_per_s=case.bytes / timing.ours / 1e9,
        gflop_per_s=case.flops / timing.ours / 1e9,
    )
    return row


def find_error(case: KernelCase, backend: Backend, expected: tuple[Tensor, ...] | None = None) -> float:
    """Return |actual - expected| / |expected| of the worst output; for integer outputs, the share that differs.

    Outputs are allocated filled with NaN, so that elements the kernel does not write count as wrong."""
    if expected is None:
        expected = case.run(ReferenceBackend())
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)  # torch then fills new tensors with NaN
    try:
        actual = case.run(backend)
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
    return float(
        torch.stack([_relative_error(*pair) for pair in zip(actual, expected, strict=True)]).max()
    )  # NaN if any is NaN


def _relative_error(actual: Tensor, expected: Tensor) -> Tensor:
    if not expected.is_floating_point():
        return (actual != expected).double().mean()
    return (actual.double() - expected.double()).norm() / expected.double().norm()


def time_calls(run: Callable[[int], object], copies: int, device: torch.device, repeats: int) -> list[float]:
    """Return the mean seconds of one call, for each repeat. Calls cycle through the copies of the inputs."""

    def run_calls(calls: int) -> None:
        for i in range(calls):
            run(i % copies)

    run_calls(copies)  # compiles the kernels
    one_cycle = bandwidth.time_work(partial(run_calls, copies), device)
    calls = copies * max(1, math.ceil(_MIN_TIMING_S / one_cycle))
    work: Callable[[], None] = partial(run_calls, calls)
    if device.type == "cuda":
        work = capture_graph(work)
    return [bandwidth.time_work(work, device) / calls for _ in range(repeats)]


def capture_graph(work: Callable[[], None]) -> Callable[[], None]:
    """Capture the launches of `work` in a CUDA graph; returns the function that replays it."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def tune(
    shapes: Iterable[GemmShape], dtype: torch.dtype, report: Callable[[str], None] = lambda text: None
) -> dict[GemmShape, GemmConfig]:
    """Return the fastest correct configuration of each GEMM on this GPU, for the table skinny_config.TUNED."""
    from yalis.kernels.gpu_limits import gpu_limits
    from yalis.kernels.skinny_config import candidates

    fastest: dict[GemmShape, GemmConfig] = {}
    device = torch.device("cuda")
    with torch.inference_mode():
        for shape in shapes:
            case = make_linear(shape, dtype, device)
            expected = case.run(ReferenceBackend())
            tried: list[tuple[float, GemmConfig]] = []
            for config in candidates(shape, gpu_limits(device)):
                backend = TritonBackend(pdl=True, config=config)  # as in a decode step
                if fits(case, backend) and find_error(case, backend, expected) <= _TOLERANCE[dtype]:
                    seconds = time_calls(partial(case.run, backend), len(case.copies), device, 5)
                    tried.append((median(seconds), config))
            if tried:
                best, fastest[shape] = min(tried)
                report(f"{shape}: {fastest[shape]}, {1e6 * best:.2f} us, {case.bytes / best / 1e12:.2f} TB/s")
    return fastest


def tune_experts(
    shapes: Iterable[ExpertShape], top_k: int, dtype: torch.dtype, report: Callable[[str], None] = lambda text: None
) -> dict[ExpertShape, GemmLaunch]:
    """Return the fastest correct launch of each grouped product on this GPU, to compare with choose_gemm()."""
    from yalis.kernels.experts_config import candidates, choose_gemm
    from yalis.kernels.gpu_limits import gpu_limits

    fastest: dict[ExpertShape, GemmLaunch] = {}
    device = torch.device("cuda")
    limits = gpu_limits(device)
    with torch.inference_mode():
        for shape in shapes:
            case = make_experts(shape, dtype, device, top_k)
            expected = case.run(TritonBackend(config=choose_gemm(shape, limits)))  # the reference is slow
            tried: list[tuple[float, GemmLaunch]] = []
            for launch in (choose_gemm(shape, limits), *candidates(shape, limits)):
                backend = TritonBackend(pdl=True, config=launch)
                if fits(case, backend) and find_error(case, backend, expected) <= _TOLERANCE[dtype]:
                    seconds = time_calls(partial(case.run, backend), len(case.copies), device, 5)
                    tried.append((median(seconds), launch))
            best, fastest[shape] = min(tried)
            report(
                f"{shape}: {fastest[shape]}, {1e6 * best:.2f} us, {case.bytes / best / 1e12:.2f} TB/s, "
                f"{case.flops / best / 1e12:.0f} TFLOP/s; by the model {1e6 * tried[0][0]:.2f} us"
            )
    return fastest


def fits(case: KernelCase, backend: Backend) -> bool:
    """Run `case` once and return whether the GPU has enough registers and shared memory for its kernel."""
    from triton.runtime.errors import OutOfResources

    try:
        case.run(backend)
    except OutOfResources:
        return False
    return True


def build(shape: GemmShape, config: GemmConfig, dtype: torch.dtype) -> None:
    """Compile a kernel into Triton's cache. Many processes do this in parallel before a search."""
    small = shape._replace(n=min(shape.n, 1024))
    with torch.inference_mode():
        fits(make_linear(small, dtype, torch.device("cuda"), max_copies=1), TritonBackend(pdl=True, config=config))
