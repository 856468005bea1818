"""Products with few rows, in Triton's interpreter, against their plain references.

The interpreter computes no bfloat16 products; tests/gpu has those.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys

os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton is first imported

from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from yalis.kernels import reference
from yalis.kernels.gpu_limits import GpuLimits

skinny = pytest.importorskip("yalis.kernels.skinny", reason="triton is not installed")
gated_product = pytest.importorskip("yalis.kernels.gated_product")
Shape = skinny.Shape

# A sum in another order may round a half-precision number to its other neighbour.
TOLERANCE = {torch.float32: 1e-6, torch.float16: 5e-4}


def draw(*size: int, dtype: torch.dtype, gap: int = 0) -> torch.Tensor:
    """Random rows that do not touch, where there is a gap."""
    return torch.randn(*size[:-1], size[-1] + gap).to(dtype)[..., gap:]


def check(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    error = (found.double() - expected.double()).norm() / expected.double().norm()
    assert error < TOLERANCE[found.dtype], error


@settings(max_examples=12, deadline=None)
@given(
    rows=st.sampled_from([1, 2, 8, 9, 33, 64]), outputs=st.integers(1, 90), inputs=st.integers(2, 200),
    dtype=st.sampled_from(list(TOLERANCE)), gap=st.sampled_from([0, 3]), biased=st.booleans(),
)  # fmt: skip
def test_linear(rows: int, outputs: int, inputs: int, dtype: torch.dtype, gap: int, biased: bool) -> None:
    torch.manual_seed(rows * outputs)
    x, weight = draw(rows, inputs, dtype=dtype, gap=gap), draw(outputs, inputs, dtype=dtype, gap=gap) / inputs**0.5
    bias = draw(outputs, dtype=dtype) if biased else None
    check(skinny.linear(x, weight, bias), reference.linear(x, weight, bias))


@settings(max_examples=12, deadline=None)
@given(
    outputs=st.integers(1, 90), eighths=st.integers(1, 25), dtype=st.sampled_from(list(TOLERANCE)),
    gap=st.sampled_from([0, 8]), gated=st.booleans(), splits=st.sampled_from([1, 3]),
)  # fmt: skip
def test_tiles_by_descriptor(
    outputs: int, eighths: int, dtype: torch.dtype, gap: int, gated: bool, splits: int
) -> None:
    """Tiles reach over every edge: of outputs, up's half, inputs."""
    torch.manual_seed(outputs)
    rows, inputs = skinny.TILED_ROWS, 8 * eighths
    x, weight = draw(rows, inputs, dtype=dtype, gap=gap), draw(2 * outputs, inputs, dtype=dtype, gap=gap) / inputs**0.5
    shape = Shape(32, 64, 4, 3, splits)
    if gated:
        check(skinny.gated_linear(x, weight, "silu", shape=shape), reference.gated_linear(x, weight, "silu"))
    else:
        check(skinny.linear(x, weight, shape=shape), reference.linear(x, weight))


def test_as_many_rows_as_a_tile_has_go_by_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    def taken(inputs: int = 4096, dtype: torch.dtype = torch.bfloat16) -> list[int]:
        weight = torch.zeros(6144, inputs, dtype=dtype)
        return [rows for rows in range(200) if skinny.suits(torch.zeros(rows, inputs, dtype=dtype), weight)]

    few = list(range(1, 65))
    assert taken() == few
    monkeypatch.setattr(skinny, "gpu_limits", lambda device: GpuLimits(132, 227 << 10, True))
    assert taken() == [*few, 128]
    assert taken(4092) == few
    assert taken(4096, torch.float32) == few
    assert taken(2048) == few  # nobody has tried it


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_gated_linear(activation: str, rows: int, dtype: torch.dtype) -> None:
    x, weight, bias = draw(rows, 100, dtype=dtype), draw(2 * 45, 100, dtype=dtype) / 5, draw(90, dtype=dtype)
    check(skinny.gated_linear(x, weight, activation, bias), reference.gated_linear(x, weight, activation, bias))
    check(skinny.gated_linear(x, weight, activation), reference.gated_linear(x, weight, activation))


SHAPES = {
    1: [Shape(1, 64, 4), Shape(4, 32, 2), Shape(2, 256, 4)],
    7: [Shape(16, 16, 4, 3, s) for s in (1, 2, 3, 8)]
    + [Shape(owned, 32, 4, 3, s) for owned in (9, 24) for s in (1, 2)],
}


@pytest.mark.parametrize(("rows", "shape"), [(rows, shape) for rows in SHAPES for shape in SHAPES[rows]], ids=str)
def test_every_launch_gives_the_same(rows: int, shape: Any) -> None:
    x, weight = draw(rows, 100, dtype=torch.float32), draw(38, 100, dtype=torch.float32)
    check(skinny.linear(x, weight, shape=shape), reference.linear(x, weight))
    check(skinny.gated_linear(x, weight, "silu", shape=shape), reference.gated_linear(x, weight, "silu"))


def test_parts_are_added_in_their_order_whoever_comes_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """Splits leave the counters at zero, so that launch after launch gives the same bits."""
    x, weight = draw(3, 128, dtype=torch.float32), draw(40, 128, dtype=torch.float32)
    shape = Shape(16, 16, 4, 2, 4)
    first = skinny.linear(x, weight, shape=shape)
    assert skinny._counters(x.device).count_nonzero() == 0
    monkeypatch.setattr(torch, "empty", lambda *size, **kind: torch.full(*size, torch.nan, **kind))
    assert torch.equal(skinny.linear(x, weight, shape=shape), first)
    parts = [x[:, i : i + 32] @ weight[:, i : i + 32].T for i in range(0, 128, 32)]
    check(first, sum(parts[1:], parts[0]))


MATRICES = ((6144, 4096), (4096, 4096), (4096, 14336), (128256, 4096), (960, 576), (49152, 576), (40, 64))
GPUS = (GpuLimits(132, 227 << 10), GpuLimits(108, 163 << 10), GpuLimits(142, 99 << 10), GpuLimits(4, 99 << 10))


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("rows", [1, 16, 32, 64, 128])
@pytest.mark.parametrize("gated", [False, True])
def test_launches_fit_their_device(itemsize: int, rows: int, gated: bool) -> None:
    hopper = GPUS[0]
    for outputs, inputs in ((14336, 4096), *MATRICES):
        problem = skinny.Problem(rows, outputs, inputs, itemsize, gated)
        launches = [(limits, skinny.choose(problem, limits)) for limits in GPUS]
        for limits, shape in [*launches, *((hopper, shape) for shape in skinny.candidates(problem, hopper))]:
            assert all(size & (size - 1) == 0 for size in shape[1 if 1 < rows < 128 else 0 : 3]), shape
            assert rows == 1 or shape.outputs % 8 == 0, shape
            assert skinny.shared_bytes(problem, shape) <= limits.max_shared_memory, (limits, shape)
            if rows == 1:
                # Each thread loads 16 bytes at a time at most, and its sums stay in registers.
                assert shape.outputs * (2 if gated else 1) * shape.inputs <= 64 * 32 * shape.warps, shape
            assert shape.splits == 1 or -(-outputs // shape.outputs) <= 4096, shape


@pytest.mark.parametrize("outputs", [64, 128])
@pytest.mark.parametrize("splits", [1, 3])
def test_programs_of_few_rounds_are_shared_out_evenly(outputs: int, splits: int) -> None:
    """A program owns what its tile has, or fewer and more than half, and there are no more rounds for it."""
    for limits, total in product(GPUS, (64, 1000, 5120, 6144, 9728, 14336, 27648, 128256)):
        even = skinny.evenly(total, outputs, splits, limits)
        rounds = [-(-total // size) * splits / limits.num_sms for size in (outputs, even)]
        assert outputs // 2 < even <= outputs
        assert math.ceil(rounds[1]) == math.ceil(rounds[0])
        assert rounds[1] >= rounds[0]


@pytest.mark.parametrize(
    ("problem", "shape"),
    [((16, 5120, 27648), (40, 256, 4, 4, 1)), ((16, 3584, 18944), (56, 256, 4, 4, 2)),
     ((16, 2048, 2048), (64, 128, 4, 5, 4)), ((16, 27648, 5120, True), (56, 128, 4, 5, 1)),
     ((16, 9728, 2560, True), (64, 128, 4, 5, 1)), ((64, 9728, 2560, True), (40, 64, 4, 5, 1)),
     ((32, 5120, 5120), (40, 128, 4, 5, 1))],
    ids=str,
)  # fmt: skip
def test_matrices_that_nobody_searched_are_shared_out_too(problem: tuple[Any, ...], shape: tuple[int, ...]) -> None:
    rows, outputs, inputs, *gated = problem
    assert skinny.choose(skinny.Problem(rows, outputs, inputs, 2, *gated), GPUS[0]) == shape


def test_a_program_writes_what_it_owns_and_no_more() -> None:
    """One alone: programs that run in turn, as they do here, hide what they write into each other's."""
    x, weight = draw(5, 64, dtype=torch.float32), draw(40, 64, dtype=torch.float32)
    y, none = torch.full((5, 40), torch.nan), torch.empty(0)
    skinny._few_rows[1, 1](
        y, x, x, weight, weight, none, none, none, 64, 64, 5, 40, 64, RP=16, OWN=24, BN=32, BK=32, EVEN=True, SPLITS=1,
        DESCRIBED=False, LINE=32, LINES=1, ACTIVATION="", BIAS=False, PDL=False,
    )  # fmt: skip
    check(y[:, :24], (x @ weight.T)[:, :24])
    assert y[:, 24:].isnan().all()


def test_launches_found_by_search_are_used_where_they_fit() -> None:
    for problem, shape in skinny.TUNED.items():
        assert skinny.choose(problem, GPUS[0]) == shape
        if skinny.shared_bytes(problem, shape) > GPUS[2].max_shared_memory:
            assert skinny.choose(problem, GPUS[2]) == skinny._guess(problem, GPUS[2])


@pytest.mark.parametrize("processors", [78, 108, 114, 142])
def test_launches_found_by_search_take_no_more_rounds_elsewhere_than_whole_tiles(processors: int) -> None:
    limits = GpuLimits(processors, 227 << 10, True)
    for problem, found in skinny.TUNED.items():
        shape = skinny.choose(problem, limits)
        tile = 1 << (found.outputs - 1).bit_length()
        rounds = [
            math.ceil(math.ceil(problem.outputs / size) * shape.splits / processors) for size in (tile, shape.outputs)
        ]
        assert shape[1:] == found[1:]
        assert rounds[0] == rounds[1], (problem, shape)


def test_compiled_for_hopper_nothing_but_weights_is_read_before_the_wait() -> None:
    """The interpreter knows no dependent launches; the compiler needs no GPU."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", "-m", "tests.hopper"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    kernels, waiting = json.loads(done.stdout)
    for name, kernel in kernels.items():
        order = kernel["order"]
        wait = order.index("wait")
        assert order[0] == "start next", name
        assert set(order[:wait]) <= {"start next", "prefetch", "weights"}, (name, order)
        assert "store" not in order[:wait], name
    assert kernels["one row"]["order"][:4] == ["start next", "weights", "wait", "load"]
    assert kernels["one row"]["loads"] == ["v4.b32"]  # 16 bytes at a time
    for name, rows, owned, brought in (("few rows", 16, 56, "copy"), ("128 rows", 128, 64, "tile")):
        problem = skinny.Problem(rows, 4096, 4096, 2, gated=True)
        order = kernels[name]["order"]
        assert order[:3] == ["start next", "prefetch", "wait"]
        assert order.index(brought) < order.index("product")  # on the tensor cores, from loads that run ahead
        assert 0 <= kernels[name]["shared"] - skinny.shared_bytes(problem, Shape(owned, 64, 4, 3)) < 2048
        counted = order.index("count")
        assert order[counted - 1] == "store"  # a part is written before it is counted
        assert "load" in order[counted:]
    assert "tile" in kernels["decode, TMA"]["order"]
    assert "copy" not in kernels["decode, TMA"]["order"]
    for kernel in waiting.values():  # for the launch before to end: those of prompts
        assert {"tile", "product"} <= set(kernel["order"])
        assert "copy" not in kernel["order"]
    assert waiting["gate and up"]["shared"] <= gated_product._SHARED
