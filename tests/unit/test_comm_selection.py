"""Opening a communication backend by name, and the errors if it cannot be used."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch

from yalis import env
from yalis.comm import mpi
from yalis.comm.auto import AutoBackend
from yalis.comm.base import BACKENDS, CommBackend, SingleRank
from yalis.comm.hierarchical import HierarchicalBackend
from yalis.comm.mpi import MpiBackend
from yalis.comm.selection import open_backend
from yalis.comm.torch_dist import TorchBackend
from yalis.errors import YalisError
from yalis.launch.link import Link
from yalis.launch.world import RankInfo, World

CPU = torch.device("cpu")


class Pair(World):
    """Rank 0 of two. Rank 1 exchanges the same values, except that it cannot use the backends in `unusable`."""

    def __init__(self, unusable: dict[str, str] | None = None) -> None:
        super().__init__(0, tuple(RankInfo(rank, f"host{rank}", rank, 0, "127.0.0.1", 1) for rank in (0, 1)))
        self.unusable = unusable or {}

    def all_gather_object(self, value: Any) -> list[Any]:
        names = isinstance(value, dict) and value.keys() & self.unusable.keys()
        return [value, {name: self.unusable[name] for name in names} if names else value]

    def reduce_object(self, value: Any, combine: Callable[[list[Any]], Any]) -> Any:
        return combine(self.all_gather_object(value))

    def open_links(self, leader: int | None) -> dict[int, Link]:
        """Return no links: rank 1 has no process that could connect."""
        return {}


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env, "variables", dict)


@pytest.mark.parametrize("name", ["torch", "hierarchical", "auto"])
@pytest.mark.parametrize("world", [World.single_process, Pair])
def test_open_by_name(name: str, world: Callable[[], World]) -> None:
    backend = open_backend(name, world(), CPU)
    assert (type(backend), backend.name) == (BACKENDS.load(name), name)
    backend.close()


def test_backend_unusable_on_one_rank_is_refused_on_all() -> None:
    world = Pair({"torch": "this torch was built without gloo"})
    with pytest.raises(
        YalisError,
        match=r"'torch' cannot be used here: this torch was .* on rank 1 \(host1\); usable: hierarchical, auto",
    ):
        open_backend("torch", world, CPU)
    nothing_usable = Pair(dict.fromkeys(BACKENDS.names(), "nothing works"))
    with pytest.raises(YalisError, match=r"'auto' cannot be used here: nothing works .*; no other backend is usable"):
        open_backend("auto", nothing_usable, CPU)


def test_unknown_backend() -> None:
    accepted = "accepted: torch, mpi, hierarchical, nvrar, auto"
    with pytest.raises(YalisError, match=f"unknown communication backend 'nccl'; {accepted}"):
        open_backend("nccl", World.single_process(), CPU)


def test_device_without_torch_backend() -> None:
    assert (
        TorchBackend.unusable(World.single_process(), torch.device("mps"))
        == "the torch backend supports CPUs and CUDA GPUs, not mps"
    )


def test_mpi_reports_missing_requirements(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mpi, "find_spec", lambda name: None)
    with pytest.raises(
        YalisError,
        match=r"'mpi' .*: mpi4py is not installed \(pip install mpi4py\).*; usable: torch, hierarchical, auto",
    ):
        open_backend("mpi", Pair(), CPU)
    monkeypatch.setattr(mpi, "find_spec", lambda name: object())
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(YalisError, match="mpirun did not start these ranks, and is not installed"):
        open_backend("mpi", Pair(), CPU)
    monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/mpirun")
    with pytest.raises(YalisError, match="mpirun -n 2 before the same command"):
        open_backend("mpi", Pair(), CPU)


@pytest.mark.parametrize("backend", [TorchBackend, MpiBackend, HierarchicalBackend, AutoBackend])
def test_group_of_one_rank(backend: type[CommBackend]) -> None:
    opened = backend(World.single_process(), CPU)
    assert isinstance(opened.group("all", [0]), SingleRank)
    opened.close()


def test_environment_of_nccl_on_a_shared_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_HOSTID", "theirs")
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    env.allow_nccl_gpu_sharing(3, one_host=True)
    assert (env.os.environ["NCCL_HOSTID"], env.os.environ["NCCL_SOCKET_IFNAME"]) == ("yalis-3", "lo")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth0")
    env.allow_nccl_gpu_sharing(3, one_host=True)
    assert env.os.environ["NCCL_SOCKET_IFNAME"] == "eth0"
