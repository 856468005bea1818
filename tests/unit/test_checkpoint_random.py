"""Random weights: a function of seed, name and index alone."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from yalis.checkpoint import random
from yalis.checkpoint.random import STD, RandomCheckpoint


def _read(
    checkpoint: RandomCheckpoint, name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    out = torch.full(shape, torch.nan, dtype=dtype)
    checkpoint.tensor(name, shape).read_into(out)
    return out


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_slice_has_the_same_values(data: st.DataObject) -> None:
    shape = data.draw(st.sampled_from([(50,), (17, 23), (5, 4, 6)]))
    checkpoint = RandomCheckpoint({}, seed=data.draw(st.integers(0, 2**63 - 1)))
    whole = _read(checkpoint, "w", shape)
    index = []
    for size in shape:
        start = data.draw(st.integers(0, size))
        index.append(slice(start, data.draw(st.integers(start, size))))
    expected = whole[tuple(index)]
    out = torch.full(expected.shape, torch.nan)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(random._CHUNK, "cpu", data.draw(st.sampled_from([1, 20, 1 << 14])))
        checkpoint.tensor("w", shape).read_into(out, *index)
    assert torch.equal(out, expected)


def test_values_depend_on_seed_and_name_only() -> None:
    first = _read(RandomCheckpoint({}, seed=1), "w", (64, 64))
    assert torch.equal(first, _read(RandomCheckpoint({"hidden_size": 9}, seed=1), "w", (64, 64)))
    assert not torch.equal(first, _read(RandomCheckpoint({}, seed=2), "w", (64, 64)))
    assert not torch.equal(first, _read(RandomCheckpoint({}, seed=1), "v", (64, 64)))
    assert torch.equal(first.bfloat16(), _read(RandomCheckpoint({}, seed=1), "w", (64, 64), torch.bfloat16))


def test_known_values() -> None:
    """Values must not change between versions, so that results with random weights stay comparable."""
    values = _read(RandomCheckpoint({}, seed=0), "model.embed_tokens.weight", (2, 2)).flatten().tolist()
    assert values == [0.01330556720495224, 0.02756440080702305, -0.011578750796616077, 0.013296788558363914]


def test_values_look_random() -> None:
    x = _read(RandomCheckpoint({}, seed=0), "w", (1024, 1024)).double()
    assert abs(x.mean()) < 5 * STD / 1024
    assert x.std().item() == pytest.approx(STD, rel=2e-3)
    assert x.abs().max() <= STD * math.sqrt(3)
    reseeded = _read(RandomCheckpoint({}, seed=1), "w", (1024, 1024))
    for other in (x.roll(1, 1), x.roll(1, 0), x.roll(64, 1), x.t(), reseeded):
        correlation = (x * other).mean() / STD**2
        assert abs(correlation) < 5 / 1024
    # a matrix of independent numbers has no large singular value
    assert torch.linalg.matrix_norm(x[:256, :256], 2) < 2.2 * STD * math.sqrt(256)
    counts = torch.histc(x, 256)
    assert ((counts - counts.mean()) ** 2 / counts.mean()).sum() < 256 + 6 * math.sqrt(2 * 256)


def test_norms_are_the_identity() -> None:
    plain, gemma = RandomCheckpoint({}), RandomCheckpoint({"model_type": "gemma2"})
    for part in ("norm", "layers.0.input_layernorm", "layers.0.self_attn.q_norm"):
        name = f"model.{part}.weight"
        assert _read(plain, name, (8,)).eq(1).all()
        assert _read(gemma, name, (8,)).eq(0).all()
    assert _read(plain, "model.layers.0.input_layernorm.bias", (8,)).eq(0).all()
    assert 0 < _read(plain, "model.layers.0.self_attn.q_proj.bias", (8,)).abs().max() < 4 * STD


def test_it_has_no_list_of_names() -> None:
    checkpoint = RandomCheckpoint({"dtype": "float16"})
    assert list(checkpoint.names()) == []
    assert checkpoint.find("model.norm.weight") is None
    assert checkpoint.tensor("w", (2, 3)).dtype == torch.float16
    assert RandomCheckpoint({}).tensor("w", (2, 3)).dtype == torch.bfloat16
    assert checkpoint.bytes_read == 0
