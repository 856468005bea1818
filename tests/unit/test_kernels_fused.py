"""Fused kernels in Triton's interpreter, against the plain references and the separate operations of the layers."""

from __future__ import annotations

import os

os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton is first imported

import math

import pytest
import torch
from torch import Tensor

from yalis.kernels import ops, reference
from yalis.layers.rotary import Rotary
from yalis.rope import NO_ROPE
from yalis.sampling.vocab_shards import row_max

fused = pytest.importorskip("yalis.kernels.fused", reason="triton is not installed")

TOLERANCE = {torch.float32: 1e-6, torch.float16: 5e-4}
DTYPES = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)


def close(found: Tensor, expected: Tensor) -> bool:
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    error = (found.double() - expected.double()).norm() / expected.double().norm()
    return bool(error < TOLERANCE[found.dtype])


@DTYPES
@pytest.mark.parametrize(("rows", "cols"), [(1, 64), (3, 100), (5, 1030)])
@pytest.mark.parametrize("wide_weight", [False, True])
def test_add_rms_norm(dtype: torch.dtype, rows: int, cols: int, wide_weight: bool) -> None:
    x, residual = torch.randn(rows, cols + 3).to(dtype)[:, 3:], torch.randn(cols, rows).to(dtype).T
    weight = torch.randn(cols, dtype=torch.float32 if wide_weight else dtype)
    for addend in (residual, None):
        normed, summed = fused.add_rms_norm(x, addend, weight, 1e-5)
        expected, expected_sum = reference.add_rms_norm(x, addend, weight, 1e-5)
        assert close(normed, expected)
        assert torch.equal(summed, expected_sum)
        assert close(normed, ops.rms_norm(expected_sum, weight, 1e-5))
        # The norm is that of the rounded sum.
        assert torch.equal(normed, fused.add_rms_norm(summed, None, weight, 1e-5)[0])


@DTYPES
@pytest.mark.parametrize("activation", fused.ACTIVATIONS)
def test_gated(dtype: torch.dtype, activation: str) -> None:
    x = 5 * torch.randn(3, 2 * 1050 + 1).to(dtype)[:, 1:]
    assert close(fused.gated(x, activation), reference.gated(x, activation))
    assert close(fused.gated(x, activation), ops.gated(x, activation))


@DTYPES
@pytest.mark.parametrize("width", [1, 576, 5000])
def test_gather_rows(dtype: torch.dtype, width: int) -> None:
    table = torch.randn(7, width + 2).to(dtype)[:, 2:]
    rows = torch.tensor([6, 0, 3, 3, 5])
    assert torch.equal(fused.gather_rows(table, rows), table.index_select(0, rows))


def test_activations_of_large_inputs() -> None:
    far = torch.tensor([[-1e4, -90.0, -20.0, -1e-8, 0.0, 1e-8, 20.0, 88.0, 1e4]])
    for activation in fused.ACTIVATIONS:
        found = fused.gated(torch.cat((far, torch.ones_like(far)), 1), activation)
        assert torch.allclose(found, ops.gated(torch.cat((far, torch.ones_like(far)), 1), activation), 1e-6, 1e-7)


@DTYPES
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "rotary_dim", "norm"),
    [
        (4, 2, 64, 64, ""),
        (3, 1, 80, 80, "first"),
        (9, 9, 16, 16, ""),
        (2, 2, 100, 50, ""),
        (5, 5, 96, 96, "first, float32"),
        (4, 2, 24, 24, "last"),
        (3, 1, 40, 20, "last"),
    ],
)
def test_rope_write(dtype: torch.dtype, heads: int, kv_heads: int, dim: int, rotary_dim: int, norm: str) -> None:
    tokens, blocks, block_size = 5, 4, 8
    qkv = torch.randn(tokens, heads + 2 * kv_heads, dim).to(dtype)
    angles = torch.randn(tokens, 1, rotary_dim // 2)
    cos, sin = angles.cos().repeat(1, 1, 2), torch.cat((-angles.sin(), angles.sin()), -1)
    cos, sin = torch.cat((cos, sin), -1).to(dtype).chunk(2, dim=-1)  # views of one table, as the layers pass them
    slots = torch.randperm(blocks * block_size)[:tokens]
    pool = torch.randn(2, blocks, block_size, kv_heads, dim).to(dtype)
    stored, last = torch.float32 if "float32" in norm else dtype, norm == "last"
    norms = (torch.randn(dim).to(stored), torch.randn(dim).to(stored)) if norm else (None, None)

    found, expected, layers = pool.clone(), pool.clone(), pool.clone()
    q = fused.rope_write(qkv, cos, sin, *found, slots, *norms, 1e-6, norm_last=last)
    expected_q = reference.rope_write(qkv, cos, sin, *expected, slots, *norms, 1e-6, last)
    assert close(q, expected_q)
    assert close(found, expected)
    untouched = torch.ones(blocks * block_size, dtype=torch.bool)
    untouched[slots] = False
    assert torch.equal(found.flatten(1, 2)[:, untouched], pool.flatten(1, 2)[:, untouched])
    assert torch.equal(found[1].flatten(0, 1)[slots], qkv[:, heads + kv_heads :])

    # The same with separate operations.
    assert close(q, ops.rope_write(qkv, cos, sin, *layers, slots, *norms, 1e-6, last))
    assert close(found, layers)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_layers_without_rope_keep_every_bit(dtype: torch.dtype) -> None:
    rope = Rotary(NO_ROPE, 9, dtype, torch.device("cpu"))(torch.tensor([8, 0, 3]))
    qkv = torch.randn(3, 4, 24).to(dtype)
    pools = torch.zeros(2, 2, 1, 8, 1, 24, dtype=dtype)
    for write, pool in zip((fused.rope_write, ops.rope_write), pools, strict=True):
        q = write(qkv, rope.cos, rope.sin, *pool, torch.tensor([2, 5, 1]))
        assert torch.equal(q, qkv[:, :2])
        assert torch.equal(pool[:, 0, [2, 5, 1], 0].transpose(0, 1), qkv[:, 2:])


def test_rope_write_skips_negative_slots() -> None:
    qkv, angles = torch.randn(3, 6, 16), torch.randn(3, 1, 16)
    pool = torch.zeros(2, 2, 4, 2, 16)
    fused.rope_write(qkv, angles, angles, *pool, torch.tensor([-1, 5, -1]))
    written = pool.flatten(1, 2).abs().sum((-1, -2)).nonzero().tolist()
    assert written == [[0, 5], [1, 5]]


@pytest.mark.parametrize("vocab", [1, 7, 2048, 5000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_argmax(vocab: int, dtype: torch.dtype) -> None:
    logits = torch.randint(-3, 4, (6, vocab + 2)).to(dtype)[:, 2:]  # many ties
    logits[0] = -math.inf
    logits[1] = -torch.arange(vocab) - 1.0
    logits[2, vocab // 2 :] = math.nan
    logits[3, vocab // 3] = math.inf
    logits[4] = torch.tensor([-0.0, 0.0]).repeat(vocab)[:vocab]
    found = fused.argmax(logits)
    assert found.dtype == torch.int64
    assert found.tolist() == row_max(logits)[1].flatten().tolist()
    assert found.tolist() == logits.argmax(1).tolist()


def test_empty_inputs() -> None:
    empty = torch.empty(0, 8)
    assert fused.add_rms_norm(empty, empty, torch.ones(8), 1e-5)[0].shape == (0, 8)
    assert fused.gated(empty, "silu").shape == (0, 4)
    assert fused.argmax(empty).shape == (0,)
    assert fused.gather_rows(empty, torch.empty(0, dtype=torch.int64)).shape == (0, 8)
