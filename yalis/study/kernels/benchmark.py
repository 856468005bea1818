"""The kernel benchmark: the operations of a decode step and attention of prompts, ours beside torch's and the floor.

An operation is checked against its plain reference first, on outputs filled with NaN. It is then timed over several
copies of what it reads, so that a matrix comes from memory, as in a decode step. On a GPU the calls are one captured
graph, so the host's part does not count; on a CPU ours are the native kernels.
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

from yalis import result_rows, results
from yalis.engine.device import resolve_device
from yalis.errors import YalisFailure
from yalis.perfmodel.floors import ModelDims, floor_s
from yalis.study import bandwidth
from yalis.study.kernels.backends import Kernels, Kit, Reference, Torch, our_kits
from yalis.study.kernels.cases import DTYPES, KernelsPlan, Trial, list_trials, make_product
from yalis.study.spread import spread

if TYPE_CHECKING:
    from yalis.kernels.skinny import Problem, Shape

LLAMA_8B = ModelDims(
    hidden=4096, layers=32, heads=32, kv_heads=8, head_dim=128, intermediate=14336, vocab=128256, tied=False
)
SMOLLM2_135M = ModelDims(
    hidden=576, layers=30, heads=9, kv_heads=3, head_dim=64, intermediate=1536, vocab=49152, tied=True
)
DIMS = {"cuda": LLAMA_8B, "cpu": SMOLLM2_135M}
#: Relative to the reference's norm, for a single operation.
_TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
_ENOUGH_S = 0.01  # of calls, for one reading of the clock


def measure(plan: KernelsPlan, command: str, report: Callable[[str], None] = lambda text: None) -> results.Result:
    """Run the whole benchmark; `report` hears what it is doing."""
    device = resolve_device(plan.device)
    dtype = DTYPES[plan.dtype] if plan.dtype != "auto" else torch.bfloat16 if device.type == "cuda" else torch.float32
    dims = plan.dims or DIMS[device.type]
    torch.manual_seed(plan.seed)
    report("measuring the device")
    rates = bandwidth.measure(device, dtype)
    rows, work = [], []
    with torch.inference_mode():
        for trial in list_trials(plan, dims, device, dtype):
            for suffix, kit in our_kits(device):
                if suffix and trial.kernel != "step":
                    continue  # a launch that depends on the one before shows in a chain
                report(f"{trial.kernel}{suffix} {trial.shape}, {trial.rows} rows")
                timed = time_both(trial, kit, device, dtype, plan.repeats)
                if trial.streams(device) and not isinstance(timed, str):  # no kernel reads faster than the device can
                    read = trial.bytes / min(timed.ours, timed.theirs)
                    rates = rates.best(bandwidth.DeviceRates(read, 0.0, f"{trial.kernel}{suffix}, {trial.rows} rows"))
                rows.append(_row(trial, suffix, timed))
                work.append((trial.bytes, trial.flops))
    for row, (moved, flops) in zip(rows, work, strict=True):
        row["floor_us"] = 1e6 * floor_s(moved, flops, rates.read_bytes_per_s, rates.matmul_flops_per_s)
        if row["us"] is not None:
            row["share_of_floor"] = row["floor_us"] / row["us"]
    given = {"dims": asdict(dims), "dtype": str(dtype).removeprefix("torch."), **asdict(rates)}
    return results.new("kernels", {**asdict(plan), **given}, rows, command, [bandwidth.describe(device)])


def check_right(result: results.Result) -> None:
    """Fail, in one sentence, if any kernel was wrong."""
    if wrong := [row for row in result.rows if row["status"] != "ok"]:
        first = wrong[0]
        raise YalisFailure(
            f"{len(wrong)} of {len(result.rows)} kernels did not give what their reference gives, the first "
            f"{first['kernel']} ({first['shape']}, {first['rows']} rows): {first['status'].removeprefix('wrong: ')}"
        )


@dataclass(frozen=True)
class Timed:
    """Seconds of an operation, by ours and by torch's, and how far ours was from the reference."""

    ours: float
    theirs: float
    error: float
    span: tuple[float, float]  # of ours


def time_both(trial: Trial, kit: Kit, device: torch.device, dtype: torch.dtype, repeats: int) -> Timed | str:
    """What a row tells; or what was wrong."""
    error = find_error(trial, kit)
    if not error <= _TOLERANCE[dtype] * trial.looseness:
        return f"wrong: off by {error:.1e}"
    ours, theirs = (times(partial(trial.run, one), len(trial.copies), device, repeats) for one in (kit, Torch()))
    return Timed(median(ours), median(theirs), error, spread(ours))


def _row(trial: Trial, suffix: str, timed: Timed | str) -> dict[str, Any]:
    row: dict[str, Any] = dict.fromkeys(result_rows.columns("kernels"))
    row.update(kernel=trial.kernel + suffix, shape=trial.shape, rows=trial.rows, status="ok")
    if isinstance(timed, str):
        row["status"] = timed
        return row
    row.update(
        error=timed.error,
        us=1e6 * timed.ours,
        us_low=1e6 * timed.span[0],
        us_high=1e6 * timed.span[1],
        torch_us=1e6 * timed.theirs,
        ratio=timed.theirs / timed.ours,
        gb_per_s=trial.bytes / timed.ours / 1e9,
        gflop_per_s=trial.flops / timed.ours / 1e9,
    )
    return row


def find_error(trial: Trial, kit: Kit, expected: tuple[Tensor, ...] | None = None) -> float:
    """|found - expected| / |expected|, on new outputs filled with NaN, the worst of them; of places, the share that
    differs."""
    if expected is None:
        expected = trial.run(Reference())
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)  # torch then fills what it allocates
    try:
        found = trial.run(kit)
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
    return float(torch.stack([_off(*pair) for pair in zip(found, expected, strict=True)]).max())  # NaN, if any is


def _off(found: Tensor, expected: Tensor) -> Tensor:
    if not expected.is_floating_point():
        return (found != expected).double().mean()
    return (found.double() - expected.double()).norm() / expected.double().norm()


def times(run: Callable[[int], object], copies: int, device: torch.device, repeats: int) -> list[float]:
    """Seconds of one call, over calls that take turns with the copies; of each repeat."""

    def turns(calls: int) -> None:
        for i in range(calls):
            run(i % copies)

    turns(copies)  # kernels are compiled
    one_turn = bandwidth.clock(partial(turns, copies), device)
    calls = copies * max(1, math.ceil(_ENOUGH_S / one_turn))
    work: Callable[[], None] = partial(turns, calls)
    if device.type == "cuda":
        work = captured(work)
    return [bandwidth.clock(work, device) / calls for _ in range(repeats)]


def captured(work: Callable[[], None]) -> Callable[[], None]:
    """The launches of `work` as a graph."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def tune(
    problems: Iterable[Problem], dtype: torch.dtype, report: Callable[[str], None] = lambda text: None
) -> dict[Problem, Shape]:
    """The fastest launch of each product on this GPU, of those whose result is right: what skinny.TUNED holds."""
    from yalis.kernels.gpu_limits import gpu_limits
    from yalis.kernels.skinny import candidates

    found: dict[Problem, Shape] = {}
    device = torch.device("cuda")
    with torch.inference_mode():
        for problem in problems:
            trial = make_product(problem, dtype, device)
            expected = trial.run(Reference())
            tried: list[tuple[float, Shape]] = []
            for shape in candidates(problem, gpu_limits(device)):
                kit = Kernels(pdl=True, shape=shape)  # as a decode step launches them
                if fits(trial, kit) and find_error(trial, kit, expected) <= _TOLERANCE[dtype]:
                    taken = times(partial(trial.run, kit), len(trial.copies), device, 5)
                    tried.append((median(taken), shape))
            if tried:
                best, found[problem] = min(tried)
                report(f"{problem}: {found[problem]}, {1e6 * best:.2f} us, {trial.bytes / best / 1e12:.2f} TB/s")
    return found


def fits(trial: Trial, kit: Kit) -> bool:
    """Run it once: whether the device has the registers and the shared memory that it asks for."""
    from triton.runtime.errors import OutOfResources

    try:
        trial.run(kit)
    except OutOfResources:
        return False
    return True


def build(problem: Problem, shape: Shape, dtype: torch.dtype) -> None:
    """Leave a launch's compiled kernel in Triton's cache: for many processes, before a search."""
    small = problem._replace(outputs=min(problem.outputs, 1024))
    with torch.inference_mode():
        fits(make_product(small, dtype, torch.device("cuda"), most=1), Kernels(pdl=True, shape=shape))
