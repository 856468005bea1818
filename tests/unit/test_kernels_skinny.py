"""Skinny GEMMs in Triton's interpreter against the plain references, and the choice of their configurations.

The interpreter cannot multiply bfloat16; tests/gpu does.
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

from yalis.kernels import reference, skinny_config
from yalis.kernels.gpu_limits import GpuLimits
from yalis.kernels.skinny_config import TUNED, GemmConfig, GemmShape, choose_config, shared_bytes

skinny = pytest.importorskip("yalis.kernels.skinny", reason="triton is not installed")
gated_product = pytest.importorskip("yalis.kernels.gated_product")

# Another summation order may round a half-precision value up instead of down.
TOLERANCE = {torch.float32: 1e-6, torch.float16: 5e-4}


def draw(*size: int, dtype: torch.dtype, gap: int = 0) -> torch.Tensor:
    """Return random rows, `gap` elements apart."""
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
def test_tiles_loaded_by_tma(
    outputs: int, eighths: int, dtype: torch.dtype, gap: int, gated: bool, splits: int
) -> None:
    """Tiles extend past every edge: of N, of the half of up, and of K."""
    torch.manual_seed(outputs)
    rows, inputs = skinny.TMA_ROWS, 8 * eighths
    x, weight = draw(rows, inputs, dtype=dtype, gap=gap), draw(2 * outputs, inputs, dtype=dtype, gap=gap) / inputs**0.5
    config = GemmConfig(32, 64, 4, 3, splits)
    if gated:
        check(skinny.gated_linear(x, weight, "silu", config=config), reference.gated_linear(x, weight, "silu"))
    else:
        check(skinny.linear(x, weight, config=config), reference.linear(x, weight))


def test_numbers_of_rows_that_suit(monkeypatch: pytest.MonkeyPatch) -> None:
    """1 to 64 rows everywhere; 128 only where TMA can load the tiles and a configuration was tuned."""

    def suitable(inputs: int = 4096, dtype: torch.dtype = torch.bfloat16) -> list[int]:
        weight = torch.zeros(6144, inputs, dtype=dtype)
        return [rows for rows in range(200) if skinny.supports(torch.zeros(rows, inputs, dtype=dtype), weight)]

    by_address = list(range(1, 65))
    assert suitable() == by_address
    monkeypatch.setattr(skinny, "gpu_limits", lambda device: GpuLimits(132, 227 << 10, True))
    assert suitable() == [*by_address, 128]
    assert suitable(4092) == by_address
    assert suitable(4096, torch.float32) == by_address
    assert suitable(2048) == by_address  # not tuned


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_gated_linear(activation: str, rows: int, dtype: torch.dtype) -> None:
    x, weight, bias = draw(rows, 100, dtype=dtype), draw(2 * 45, 100, dtype=dtype) / 5, draw(90, dtype=dtype)
    check(skinny.gated_linear(x, weight, activation, bias), reference.gated_linear(x, weight, activation, bias))
    check(skinny.gated_linear(x, weight, activation), reference.gated_linear(x, weight, activation))


CONFIGS = {
    1: [GemmConfig(1, 64, 4), GemmConfig(4, 32, 2), GemmConfig(2, 256, 4)],
    7: [GemmConfig(16, 16, 4, 3, s) for s in (1, 2, 3, 8)]
    + [GemmConfig(owned, 32, 4, 3, s) for owned in (9, 24) for s in (1, 2)],
}


@pytest.mark.parametrize(("rows", "config"), [(rows, config) for rows in CONFIGS for config in CONFIGS[rows]], ids=str)
def test_configurations(rows: int, config: GemmConfig) -> None:
    x, weight = draw(rows, 100, dtype=torch.float32), draw(38, 100, dtype=torch.float32)
    check(skinny.linear(x, weight, config=config), reference.linear(x, weight))
    check(skinny.gated_linear(x, weight, "silu", config=config), reference.gated_linear(x, weight, "silu"))


def test_split_k_is_deterministic(monkeypatch: pytest.MonkeyPatch) -> None:
    """Partial sums are added in order, and the counters are back at zero after a launch."""
    x, weight = draw(3, 128, dtype=torch.float32), draw(40, 128, dtype=torch.float32)
    config = GemmConfig(16, 16, 4, 2, 4)
    first = skinny.linear(x, weight, config=config)
    assert skinny._counters(x.device).count_nonzero() == 0
    monkeypatch.setattr(torch, "empty", lambda *size, **options: torch.full(*size, torch.nan, **options))
    assert torch.equal(skinny.linear(x, weight, config=config), first)
    partial = [x[:, i : i + 32] @ weight[:, i : i + 32].T for i in range(0, 128, 32)]
    check(first, sum(partial[1:], partial[0]))


MATRICES = ((6144, 4096), (4096, 4096), (4096, 14336), (128256, 4096), (960, 576), (49152, 576), (40, 64))
GPUS = (GpuLimits(132, 227 << 10), GpuLimits(108, 163 << 10), GpuLimits(142, 99 << 10), GpuLimits(4, 99 << 10))


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("rows", [1, 16, 32, 64, 128])
@pytest.mark.parametrize("gated", [False, True])
def test_configurations_fit_the_gpu(itemsize: int, rows: int, gated: bool) -> None:
    hopper = GPUS[0]
    for n, k in ((14336, 4096), *MATRICES):
        shape = GemmShape(rows, n, k, itemsize, gated)
        chosen = [(limits, choose_config(shape, limits)) for limits in GPUS]
        for limits, config in [*chosen, *((hopper, config) for config in skinny_config.candidates(shape, hopper))]:
            assert all(size & (size - 1) == 0 for size in config[1 if 1 < rows < 128 else 0 : 3]), config
            assert rows == 1 or config.n_per_program % 8 == 0, config
            assert shared_bytes(shape, config) <= limits.max_shared_memory, (limits, config)
            if rows == 1:
                # A thread loads at most 16 bytes at a time, and its sums stay in registers.
                assert config.n_per_program * (2 if gated else 1) * config.block_k <= 64 * 32 * config.num_warps, config
            assert config.split_k == 1 or -(-n // config.n_per_program) <= 4096, config


@pytest.mark.parametrize("block_n", [64, 128])
@pytest.mark.parametrize("split_k", [1, 3])
def test_balanced_n_needs_no_more_waves_than_full_tiles(block_n: int, split_k: int) -> None:
    """A program owns its whole tile, or more than half of it, and the number of waves stays the same."""
    for limits, n in product(GPUS, (64, 1000, 5120, 6144, 9728, 14336, 27648, 128256)):
        balanced = skinny_config.balanced_n(n, block_n, split_k, limits)
        waves = [-(-n // size) * split_k / limits.num_sms for size in (block_n, balanced)]
        assert block_n // 2 < balanced <= block_n
        assert math.ceil(waves[1]) == math.ceil(waves[0])
        assert waves[1] >= waves[0]


@pytest.mark.parametrize(
    ("shape", "config"),
    [((16, 5120, 27648), (40, 256, 4, 4, 1)), ((16, 3584, 18944), (56, 256, 4, 4, 2)),
     ((16, 2048, 2048), (64, 128, 4, 5, 4)), ((16, 27648, 5120, True), (56, 128, 4, 5, 1)),
     ((16, 9728, 2560, True), (64, 128, 4, 5, 1)), ((64, 9728, 2560, True), (40, 64, 4, 5, 1)),
     ((32, 5120, 5120), (40, 128, 4, 5, 1))],
    ids=str,
)  # fmt: skip
def test_default_configurations(shape: tuple[Any, ...], config: tuple[int, ...]) -> None:
    m, n, k, *gated = shape
    assert choose_config(GemmShape(m, n, k, 2, *gated), GPUS[0]) == config


def test_a_program_writes_only_the_outputs_it_owns() -> None:
    """Launch a single program: with several, the next one would overwrite what the first wrote too much."""
    x, weight = draw(5, 64, dtype=torch.float32), draw(40, 64, dtype=torch.float32)
    y, none = torch.full((5, 40), torch.nan), torch.empty(0)
    skinny._skinny_gemm_kernel[1, 1](
        y, x, x, weight, weight, none, none, none, 64, 64, 5, 40, 64, BLOCK_M=16, OWNED_N=24, BLOCK_N=32, BLOCK_K=32,
        EVEN_K=True, SPLIT_K=1, USE_TMA=False, LINE_ELEMENTS=32, LINES=1, ACTIVATION="", BIAS=False, PDL=False,
    )  # fmt: skip
    check(y[:, :24], (x @ weight.T)[:, :24])
    assert y[:, 24:].isnan().all()


def test_tuned_configurations_are_used_where_they_fit() -> None:
    for shape, config in TUNED.items():
        assert choose_config(shape, GPUS[0]) == config
        if shared_bytes(shape, config) > GPUS[2].max_shared_memory:
            assert choose_config(shape, GPUS[2]) == skinny_config._default_config(shape, GPUS[2])


@pytest.mark.parametrize("num_sms", [78, 108, 114, 142])
def test_tuned_configurations_need_no_more_waves_than_full_tiles_on_other_gpus(num_sms: int) -> None:
    limits = GpuLimits(num_sms, 227 << 10, True)
    for shape, tuned in TUNED.items():
        config = choose_config(shape, limits)
        block_n = 1 << (tuned.n_per_program - 1).bit_length()
        waves = [
            math.ceil(math.ceil(shape.n / size) * config.split_k / num_sms) for size in (block_n, config.n_per_program)
        ]
        assert config[1:] == tuned[1:]
        assert waves[0] == waves[1], (shape, config)


def test_compiled_for_hopper_only_weights_are_read_before_the_pdl_wait() -> None:
    """The interpreter does not support PDL. The compiler needs no GPU."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", "-m", "tests.hopper"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    with_pdl, without_pdl = json.loads(done.stdout)
    for name, kernel in with_pdl.items():
        order = kernel["order"]
        wait = order.index("wait")
        assert order[0] == "launch dependents", name
        assert set(order[:wait]) <= {"launch dependents", "prefetch", "weights"}, (name, order)
        assert "store" not in order[:wait], name
    assert with_pdl["gemv"]["order"][:4] == ["launch dependents", "weights", "wait", "load"]
    assert with_pdl["gemv"]["loads"] == ["v4.b32"]  # 16 bytes at a time
    for name, rows, owned, load in (("gemm", 16, 56, "async copy"), ("gemm, TMA", 128, 64, "tma load")):
        shape = GemmShape(rows, 4096, 4096, 2, gated=True)
        order = with_pdl[name]["order"]
        assert order[:3] == ["launch dependents", "prefetch", "wait"]
        assert order.index(load) < order.index("mma")  # tensor cores, fed by pipelined loads
        assert 0 <= with_pdl[name]["shared"] - shared_bytes(shape, GemmConfig(owned, 64, 4, 3)) < 2048
        counted = order.index("atomic add")
        assert order[counted - 1] == "store"  # partial sums are stored before they are counted
        assert "load" in order[counted:]
    assert "tma load" in with_pdl["decode, TMA"]["order"]
    assert "async copy" not in with_pdl["decode, TMA"]["order"]
    for kernel in without_pdl.values():  # prefill kernels
        assert {"tma load", "mma"} <= set(kernel["order"])
        assert "async copy" not in kernel["order"]
    assert without_pdl["gate and up"]["shared"] <= gated_product._SHARED
