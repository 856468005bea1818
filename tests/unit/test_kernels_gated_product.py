"""The fused gate and up projection for many rows, in Triton's interpreter; tests/gpu covers bfloat16."""

from __future__ import annotations

import os

os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton is first imported

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from yalis.kernels import ops, reference
from yalis.kernels.gpu_limits import GpuLimits

kernels = pytest.importorskip("yalis.kernels.gated_product", reason="triton is not installed")

# A sum in another order may round a half-precision number to its other neighbour.
TOLERANCE = {torch.float32: 1e-6, torch.float16: 5e-4}


@settings(max_examples=12, deadline=None)
@given(
    rows=st.sampled_from([1, 127, 128, 129, 300, 1500]), eighths=st.integers(1, 40),
    inputs=st.sampled_from([8, 64, 72, 200]),
    dtype=st.sampled_from(list(TOLERANCE)), activation=st.sampled_from(["silu", "gelu", "gelu_tanh"]),
    bias=st.booleans(), gap=st.sampled_from([0, 8]), processors=st.sampled_from([1, 3, 132]),
)  # fmt: skip
def test_gated_product(
    rows: int, eighths: int, inputs: int, dtype: torch.dtype, activation: str, bias: bool, gap: int, processors: int
) -> None:
    """Partial tiles, several tiles for one program, rows with a gap between them."""
    torch.manual_seed(rows + eighths)
    width = 8 * eighths
    x = torch.randn(rows, inputs + gap).to(dtype)[:, gap:]
    weight = (torch.randn(2 * width, inputs + gap) / inputs**0.5).to(dtype)[:, gap:]
    added = torch.randn(2 * width).to(dtype) if bias else None
    found = kernels.gated_product(x, weight, activation, added, GpuLimits(processors, 227 << 10))
    expected = reference.gated_linear(x, weight, activation, added)
    assert found.shape == expected.shape
    error = (found.double() - expected.double()).norm() / expected.double().norm()
    assert error < TOLERANCE[dtype]


def test_matrices_without_tma_descriptors_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def supports(width: int, inputs: int, gap: int = 0, across: bool = False) -> bool:
        x, weight = (torch.zeros(n, inputs + gap, dtype=torch.bfloat16)[:, gap:] for n in (8, 2 * width))
        return bool(kernels.supports(x.t().contiguous().t() if across else x, weight))

    assert not supports(32, 64)  # no descriptors on a CPU
    monkeypatch.setattr(kernels, "gpu_limits", lambda device: GpuLimits(132, 227 << 10, True))
    assert supports(32, 64)
    assert supports(32, 64, gap=8)
    assert not supports(36, 64)  # rows of the output would not be aligned
    assert not supports(32, 60)
    assert not supports(32, 64, gap=4)
    assert not supports(32, 64, across=True)
    monkeypatch.setattr(kernels, "gpu_limits", lambda device: GpuLimits(170, 99 << 10, True))
    assert not supports(32, 64)


def test_ops_use_it_from_a_number_of_rows_on(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[int] = []
    monkeypatch.setattr(ops, "FUSED_GATE_MIN_ROWS", 66)
    monkeypatch.setattr(ops, "_triton", lambda x: True)
    monkeypatch.setattr(kernels, "supports", lambda x, weight: used.append(x.shape[0]) or False)
    weight = torch.randn(16, 8)
    for rows in (65, 66, 67):
        ops.gated_linear(torch.randn(rows, 8), weight, "silu")
    assert used == [66, 67]
