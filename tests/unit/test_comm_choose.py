"""Which communication backend is chosen, and what is said when one cannot be."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch

from yalis import env
from yalis.comm import mpi
from yalis.comm.base import SingleRank
from yalis.comm.choose import choose_backend
from yalis.comm.mpi import MpiBackend
from yalis.comm.torch_dist import TorchBackend
from yalis.errors import YalisError
from yalis.launch.world import Member, World

CPU = torch.device("cpu")


class Pair(World):
    """Rank 0 of two; the other one tells what it was made with."""

    def __init__(self, other: dict[str, str | None] | None = None) -> None:
        super().__init__(0, tuple(Member(rank, f"host{rank}", rank, 0, "127.0.0.1", 1) for rank in (0, 1)))
        self.other = other

    def exchange(self, value: Any) -> list[Any]:
        return [value, value if self.other is None else self.other]


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env, "variables", dict)


def test_auto_is_torch() -> None:
    assert choose_backend("auto", World.alone(), CPU) is TorchBackend
    assert choose_backend("auto", Pair(), CPU) is TorchBackend
    assert choose_backend("torch", Pair(), CPU) is TorchBackend


def test_auto_is_what_every_rank_can_use() -> None:
    other = {"torch": "this torch was built without gloo", "mpi": None}
    with pytest.raises(YalisError, match=r"torch: this torch was built without gloo on rank 1 \(host1\); mpi: "):
        choose_backend("auto", Pair(other), CPU)
    with pytest.raises(YalisError, match=r"'torch' cannot be used here: .* on rank 1 .*; no other one is usable"):
        choose_backend("torch", Pair(other), CPU)


def test_an_unknown_backend() -> None:
    with pytest.raises(YalisError, match="unknown communication backend 'nccl'; accepted: auto, torch, mpi"):
        choose_backend("nccl", World.alone(), CPU)


def test_a_device_torch_cannot_join() -> None:
    assert TorchBackend.unusable(World.alone(), torch.device("mps")) == "torch joins CPUs and CUDA GPUs, not mps"


def test_mpi_says_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mpi, "find_spec", lambda name: None)
    with pytest.raises(
        YalisError, match=r"'mpi' .*: mpi4py is not installed \(pip install mpi4py\).*; usable: auto, torch"
    ):
        choose_backend("mpi", Pair(), CPU)
    monkeypatch.setattr(mpi, "find_spec", lambda name: object())
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(YalisError, match="mpirun did not start these ranks, and is not installed"):
        choose_backend("mpi", Pair(), CPU)
    monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/mpirun")
    with pytest.raises(YalisError, match="mpirun -n 2 before the same command"):
        choose_backend("mpi", Pair(), CPU)


@pytest.mark.parametrize("backend", [TorchBackend, MpiBackend])
def test_a_world_of_one_needs_nothing(backend: type[TorchBackend] | type[MpiBackend]) -> None:
    made = backend(World.alone(), CPU)
    assert isinstance(made.group("all", [0]), SingleRank)
    made.close()


def test_nccl_is_told_of_a_shared_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_HOSTID", "theirs")
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    env.let_nccl_share_a_gpu(3, one_host=True)
    assert (env.os.environ["NCCL_HOSTID"], env.os.environ["NCCL_SOCKET_IFNAME"]) == ("yalis-3", "lo")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth0")
    env.let_nccl_share_a_gpu(3, one_host=True)
    assert env.os.environ["NCCL_SOCKET_IFNAME"] == "eth0"
