"""The GPU implementations of ops, in Triton's interpreter, compute the same as the CPU implementations."""

from __future__ import annotations

import os

os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton is first imported

from collections.abc import Callable
from typing import TypeVar
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from tests.families import CASES
from tests.unit.test_models_compile import BLOCK_SIZE, BLOCKS, make_batch, make_model
from yalis import env
from yalis.attention.base import AttentionNeeds, LayerCache
from yalis.attention.choose import choose_backend
from yalis.errors import YalisError
from yalis.kernels import native, ops, reference
from yalis.kernels.pdl import enable_pdl, pdl_enabled

pytest.importorskip("triton", reason="triton is not installed")
from yalis.kernels import fused, skinny

TOLERANCE = {torch.float32: 1e-6, torch.float16: 5e-4}
DTYPES = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
T = TypeVar("T")


def on_gpu(function: Callable[..., T], *args: object, **kwargs: object) -> T:
    """Call an op as if its tensors were on a GPU."""
    with patch.object(ops, "_triton", lambda x: True):
        return function(*args, **kwargs)


def in_torch(function: Callable[..., T], *args: object, **kwargs: object) -> T:
    with patch.object(native, "_loaded", native.Unavailable("disabled in this test")):
        return function(*args, **kwargs)


def check(found: Tensor, *expected: Tensor) -> None:
    for other in expected:
        assert (found.dtype, found.shape) == (other.dtype, other.shape)
        error = (found.double() - other.double()).norm() / other.double().norm()
        assert error < TOLERANCE[found.dtype], error


@DTYPES
@pytest.mark.parametrize("rows", [1, 7, 20, 65])
@pytest.mark.parametrize("biased", [False, True])
def test_linear(dtype: torch.dtype, rows: int, biased: bool) -> None:
    torch.manual_seed(rows)
    x, weight = torch.randn(rows, 72).to(dtype), (torch.randn(40, 72) / 8).to(dtype)
    bias = torch.randn(40).to(dtype) if biased else None
    given = (x, weight, bias)
    expected = reference.linear(x, weight, bias)
    check(on_gpu(ops.linear, *given), expected, ops.linear(*given), in_torch(ops.linear, *given))
    gated = (x, weight, "silu", bias)
    expected = reference.gated_linear(x, weight, "silu", bias)
    check(on_gpu(ops.gated_linear, *gated), expected, ops.gated_linear(*gated), in_torch(ops.gated_linear, *gated))


@DTYPES
@pytest.mark.parametrize("rows", [1, 65])
@pytest.mark.parametrize("wide", [False, True])
def test_add_rms_norm(dtype: torch.dtype, rows: int, wide: bool) -> None:
    x, residual = torch.randn(2, rows, 40).to(dtype)
    weight = torch.randn(40).to(torch.float32 if wide else dtype)  # as in Gemma
    for given in ((x, residual, weight, 1e-5), (x, None, weight, 1e-5)):
        expected = reference.add_rms_norm(*given)
        for found in (on_gpu(ops.add_rms_norm, *given), ops.add_rms_norm(*given), in_torch(ops.add_rms_norm, *given)):
            check(found[0], expected[0])
            assert torch.equal(found[1], expected[1])


@DTYPES
@pytest.mark.parametrize(("rotated", "norm"), [(32, False), (32, True), (16, False)])
def test_rope_write(dtype: torch.dtype, rotated: int, norm: bool) -> None:
    qkv, pool = torch.randn(5, 4 + 2 * 2, 32).to(dtype), torch.randn(2, 4, 8, 2, 32).to(dtype)
    cos, sin = torch.randn(5, 1, 2 * rotated).to(dtype).chunk(2, dim=-1)
    slots = torch.randperm(32)[:5]
    norms = (torch.randn(32).to(dtype), torch.randn(32).to(dtype), 1e-6) if norm else ()
    pools = [pool.clone() for _ in range(4)]
    found = on_gpu(ops.rope_write, qkv, cos, sin, *pools[0], slots, *norms)
    check(
        found,
        reference.rope_write(qkv, cos, sin, *pools[1], slots, *norms),
        ops.rope_write(qkv, cos, sin, *pools[2], slots, *norms),
        in_torch(ops.rope_write, qkv, cos, sin, *pools[3], slots, *norms),
    )
    check(*pools)
    assert not torch.equal(pools[0], pool)


def test_small_gemms_are_fused_with_their_epilogue(monkeypatch: pytest.MonkeyPatch) -> None:
    """With more than 64 rows, torch computes the GEMM and the gate is a launch of its own."""
    launched: list[str] = []

    def log_launches(module: object, name: str) -> None:
        function = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args, **kwargs: launched.append(name) or function(*args, **kwargs))

    for module, name in ((skinny, "linear"), (skinny, "gated_linear"), (fused, "add_rms_norm"), (fused, "gated")):
        log_launches(module, name)
    weight, norm = torch.randn(32, 16), torch.ones(16)
    for rows, expected in ((64, ["add_rms_norm", "gated_linear", "linear"]), (65, ["add_rms_norm", "gated"])):
        x = torch.randn(rows, 16)
        y, _ = on_gpu(ops.add_rms_norm, x, x, norm, 1e-5)
        on_gpu(ops.linear, on_gpu(ops.gated_linear, y, weight, "silu"), weight)
        assert launched == expected
        launched.clear()


@DTYPES
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("wide_weight", [False, True])  # offset + weight is stored in fp32
def test_layer_norm(dtype: torch.dtype, biased: bool, wide_weight: bool) -> None:
    stored = torch.float32 if wide_weight else dtype
    x, weight = torch.randn(5, 77).to(dtype) * 3 + 1, torch.randn(77).to(stored)
    bias = torch.randn(77).to(stored) if biased else None
    expected = reference.layer_norm(x, weight, bias, 1e-5)
    check(on_gpu(ops.layer_norm, x, weight, bias, 1e-5), ops.layer_norm(x, weight, bias, 1e-5), expected)


@DTYPES
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "relu2"])
def test_activation_without_a_gate(dtype: torch.dtype, activation: str) -> None:
    x = torch.randn(5, 77).to(dtype) * 3
    check(on_gpu(ops.activate, x, activation), ops.activate(x, activation), reference.activate(x, activation))


# The last two have norms after RoPE, layer norms, parallel blocks and layers without RoPE.
FEW = ["llama-bias-linear", "qwen3-gqa4", "phi3-partial-tied", "gemma2", "hunyuan", "cohere2"]


@pytest.mark.parametrize(
    "name", [*FEW, *(pytest.param(c.name, marks=pytest.mark.full) for c in CASES if c.name not in FEW)]
)
def test_a_model(name: str) -> None:
    """Compare logits and KV cache of a prompt next to decoding sequences, then of a single token."""
    model = make_model(next(case for case in CASES if case.name == name))
    spec = model.spec
    needs = AttentionNeeds(
        spec.num_heads, spec.num_kv_heads, spec.head_dim, torch.float32, torch.device("cpu"), BLOCK_SIZE
    )
    backend = choose_backend("sdpa", needs)(needs)
    pools = [torch.zeros(spec.num_layers, 2, BLOCKS, BLOCK_SIZE, spec.num_kv_heads, spec.head_dim) for _ in range(2)]
    for lengths, cached in (((3, 1, 1), 0), ((1,), 3)):
        batch = make_batch(lengths, cached)
        found, expected = (
            run(model, batch, [LayerCache(*layer) for layer in pool], backend)
            for run, pool in zip((on_gpu, in_torch), pools, strict=True)
        )
        assert torch.allclose(found, expected, 1e-4, 1e-4)
        assert torch.equal(found.argmax(-1), expected.argmax(-1))
    assert torch.allclose(*pools, 1e-4, 1e-4)


def test_pdl_is_used_only_where_it_is_enabled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert not pdl_enabled()
    with enable_pdl(torch.device("cuda")):
        assert pdl_enabled()
        monkeypatch.setenv("YALIS_PDL", "0")
        with enable_pdl(torch.device("cuda")):
            assert not pdl_enabled()
        with enable_pdl(torch.device("cpu")):
            assert not pdl_enabled()
    assert not pdl_enabled()
    monkeypatch.setenv("YALIS_PDL", "off")
    with pytest.raises(YalisError, match="YALIS_PDL is 'off'; accepted: 0, 1 or all"):
        env.pdl()
