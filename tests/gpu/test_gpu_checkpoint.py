"""Weights are loaded on a GPU with the same values as on a CPU, and with little extra memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from yalis.checkpoint.random import RandomCheckpoint
from yalis.checkpoint.safetensors import SafetensorsCheckpoint

if not torch.cuda.is_available():
    pytest.skip("no GPU here", allow_module_level=True)

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", DTYPES)
def test_random_weights_have_the_same_bits(dtype: torch.dtype) -> None:
    lazy = RandomCheckpoint({}, seed=3).tensor("w", (700, 1111))
    here, there = torch.empty(700, 500, dtype=dtype), torch.empty(700, 500, dtype=dtype, device="cuda")
    lazy.read_into(here, slice(None), slice(11, 511))
    lazy.read_into(there, slice(None), slice(11, 511))
    assert torch.equal(here, there.cpu())


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_slice_of_a_file(dtype: torch.dtype, tmp_path: Path) -> None:
    whole = torch.randn(300, 200)
    (tmp_path / "config.json").write_text("{}")
    save_file({"w": whole}, tmp_path / "model.safetensors")
    out = torch.empty(200, 50, dtype=dtype, device="cuda")
    SafetensorsCheckpoint(tmp_path).tensor("w", (300, 200)).read_into(out, slice(100, 300), slice(7, 57))
    assert torch.equal(out.cpu(), whole[100:300, 7:57].to(dtype))


def test_extra_memory_while_loading(tmp_path: Path) -> None:
    """Loading 256 MiB needs less than that in addition."""
    out = torch.empty(16384, 8192, dtype=torch.bfloat16, device="cuda")
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    RandomCheckpoint({}).tensor("w", (16384, 8192)).read_into(out)
    assert torch.cuda.max_memory_allocated() - before < out.nbytes
