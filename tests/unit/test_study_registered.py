"""Where NCCL with registered buffers can be a baseline."""

from __future__ import annotations

import pytest
import torch

from yalis.engine.slice_rank import SliceWorld
from yalis.study.allreduce import registered


def test_why_buffers_cannot_be_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    world, gpu = SliceWorld(0, 2), torch.device("cuda:0")
    assert registered.find_obstacle(world, torch.device("cpu")) == "it is NCCL, and these ranks use cpu"
    monkeypatch.setattr(torch, "__version__", "2.8.1+cu128")
    assert "need torch 2.9 or newer, and this is 2.8.1" in str(registered.find_obstacle(world, gpu))
    monkeypatch.setattr(torch, "__version__", "2.11.0+cu130")
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 26, 5))
    assert "need NCCL 2.27 or newer, and this is 2.26.5" in str(registered.find_obstacle(world, gpu))
