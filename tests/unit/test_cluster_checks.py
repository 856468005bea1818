"""The checks of `yalis doctor` for a cluster, on copies of sysfs and with values that this machine does not have."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests import fabric_trees
from yalis.comm.nvrar.transport import HostFacts, Transport
from yalis.launch.world import World
from yalis.study.cluster import gpu_checks, rank_checks
from yalis.study.cluster.finding import Finding, merge_ranks
from yalis.study.cluster.rank_checks import Loaded, load_library

SLINGSHOT, IBRC, IBGDA = (Transport(name, "") for name in ("libfabric-cxi", "ibrc", "ibgda"))
NO_NETWORK = Transport("none", "")


@pytest.fixture(autouse=True)
def _nvshmem(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NVSHMEM_HOME", str(fabric_trees.add_nvshmem(tmp_path / "nvshmem")))


def test_every_check_of_an_infiniband_host(tmp_path: Path) -> None:
    fabric_trees.infiniband_cluster(tmp_path)
    findings = {finding.name: finding for finding in rank_checks.check_rank(World.single_process(), tmp_path)}
    assert list(findings) == [
        "nvshmem", "transport", "plugin", "libfabric", "gdrcopy", "peer memory", "locked memory", "gpu to nic",
        "cores", "nccl plugin",
    ]  # fmt: skip
    assert findings["transport"].detail == (
        "ibgda if a job has several hosts: this host has InfiniBand (2 infiniband); NVSHMEM has IBGDA; "
        "mlx5_0 (infiniband), mlx5_1 (infiniband)"
    )
    # The files of this NVSHMEM are empty, so that loading one really fails.
    assert findings["plugin"].status == "warning"
    assert "nvshmem_transport_ibrc.so.3 does not load" in findings["plugin"].detail
    assert findings["peer memory"].detail == "NICs access GPU memory through nvidia_peermem"
    assert findings["gpu to nic"].status == "ok"
    assert findings["gpu to nic"].detail == "0000:03:00.0 to mlx5_0: one switch, 0000:13:00.0 to mlx5_1: one switch"


def test_a_gpu_far_from_every_nic(tmp_path: Path) -> None:
    fabric_trees.add_gpu(tmp_path, "pci0000:00/0000:00:01.0/0000:01:00.0")
    fabric_trees.add_slingshot(tmp_path, "cxi0", "pci0000:80/0000:80:01.0/0000:81:00.0")
    far = rank_checks.check_distances(tmp_path)
    assert far.status == "warning"
    assert "0000:01:00.0 to cxi0: between host bridges; 1 GPU without a NIC nearby" in far.detail
    assert rank_checks.check_peer_memory(tmp_path).status == "warning"
    assert "modprobe nvidia_peermem" in rank_checks.check_peer_memory(tmp_path).detail


def test_a_host_without_gpu_says_so(tmp_path: Path) -> None:
    for finding in (rank_checks.check_distances(tmp_path), rank_checks.check_peer_memory(tmp_path)):
        assert (finding.status, finding.detail) == ("not possible here", "there is no NVIDIA GPU on this host")


@pytest.mark.parametrize(
    ("finding", "status", "words"),
    [
        (rank_checks.check_locked_memory(None, IBRC), "ok", "no limit"),
        (rank_checks.check_locked_memory(8 << 30, IBRC), "ok", "limit 8 GiB"),
        (rank_checks.check_locked_memory(64 << 20, IBRC), "warning", "limit 64 MiB, too little for a NIC"),
        (rank_checks.check_locked_memory(64 << 20, NO_NETWORK), "ok", "would need unlimited"),
        (rank_checks.check_cores(1, 4, SLINGSHOT), "warning", "1 core for this rank, 4 ranks on its host; libfabric"),
        (rank_checks.check_cores(1, 4, IBGDA), "ok", "1 core for this rank"),
        (rank_checks.check_cores(16, 4, SLINGSHOT), "ok", "16 cores"),
        (rank_checks.check_nvshmem(None, None), "not possible here", "set NVSHMEM_HOME"),
    ],
)
def test_limits(finding: Finding, status: str, words: str) -> None:
    assert finding.status == status
    assert words in finding.detail


def test_kernel_modules_count_for_the_transport_that_needs_them(tmp_path: Path) -> None:
    assert rank_checks.check_gdrcopy(tmp_path, IBRC).status == "warning"
    assert rank_checks.check_gdrcopy(tmp_path, IBGDA).status == "ok"
    assert "which is not needed without a network" in rank_checks.check_gdrcopy(tmp_path, NO_NETWORK).detail


def test_libfabric(monkeypatch: pytest.MonkeyPatch) -> None:
    absent, present = Loaded("libfabric.so.1: cannot open shared object file"), Loaded(number=1 << 16 | 22)
    assert rank_checks.check_libfabric(SLINGSHOT, absent).status == "warning"
    assert rank_checks.check_libfabric(IBRC, absent).status == "ok"
    monkeypatch.setattr(rank_checks, "run_command", lambda argv: "cxi:\n    version: 2.0\ntcp:\n")
    assert rank_checks.check_libfabric(SLINGSHOT, present).detail == "1.22"
    monkeypatch.setattr(rank_checks, "run_command", lambda argv: "tcp:\n    version: 2.0\n")
    assert "1.22 without a cxi provider" in rank_checks.check_libfabric(SLINGSHOT, present).detail


def test_libraries_are_loaded_in_another_process() -> None:
    """A library may end its process, or replace signal handlers, as the providers of libfabric do."""
    assert load_library(["libc.so.6"], "getpid").number not in (None, os.getpid())
    assert load_library(["libc.so.6"], "abort").reason == f"the process ended with status {-signal.SIGABRT}"
    assert "no-such-library.so" in load_library(["no-such-library.so"]).reason


def test_nvshmem_needs_the_cuda_version_of_nvcc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvcc, folder = tmp_path / "nvcc", tmp_path / "nvshmem"
    fabric_trees.write(nvcc, "#!/bin/sh\necho 'Cuda compilation tools, release 12.8, V12.8.61'\n")
    nvcc.chmod(0o755)
    assert rank_checks.check_nvshmem(folder, nvcc).detail == f"3.4.5 in {folder}, nvcc 12.8"
    assert "no nvcc to build nvrar; set CUDA_HOME" in rank_checks.check_nvshmem(folder, None).detail
    monkeypatch.delenv("NVSHMEM_HOME")
    package = "nvidia-nvshmem-cu13"
    monkeypatch.setattr(rank_checks, "package_version", lambda name: "3.4.5" if name == package else None)
    mixed = rank_checks.check_nvshmem(folder, nvcc)
    assert (mixed.status, mixed.detail) == (
        "warning", "3.4.5 for CUDA 13, but nvcc is 12.8; install nvidia-nvshmem-cu12",
    )  # fmt: skip


def test_the_transport_without_nvshmem(monkeypatch: pytest.MonkeyPatch) -> None:
    found = rank_checks.check_transport(Transport("none", "NVSHMEM is not installed"), HostFacts(), 2)
    assert found.status == "not possible here"
    assert found.detail == "none between the hosts of this job: NVSHMEM is not installed"


def test_gpu_checks() -> None:
    assert gpu_checks.check_peer_access([[True] * 4] * 4).detail == "between all 4 GPUs"
    partly = gpu_checks.check_peer_access([[True, False], [True, True]])
    assert (partly.status, "none from GPU 0 to 1" in partly.detail) == ("warning", True)
    assert gpu_checks.check_peer_access([[True]]).status == "not possible here"
    fast = "0, 1980 MHz, 345 MHz, Not Active, 700.00 W\n1, 1980 MHz, 345 MHz, Not Active, 700.00 W\n"
    assert gpu_checks.read_clocks(fast).detail == "up to 1980 MHz, 700.00 W"
    slow = gpu_checks.read_clocks(fast.replace("345 MHz, Not Active", "345 MHz, Active", 1))
    assert slow.status == "warning"
    assert "GPU 0 is slowed down by heat or power (up to 1980 MHz, 700.00 W); report the node" in slow.detail
    assert gpu_checks.read_clocks("").status == "not possible here"


def test_one_table_for_all_ranks() -> None:
    same, first, second = (Finding("a", "x", True, "one"), Finding("a", "y", True, "1"), Finding("a", "y", False, "2"))
    only = Finding("b", "z", True, "here")
    table = merge_ranks([[same, first], [same, second, only], [same, second]])
    assert [(row.detail, row.ranks) for row in table] == [
        ("one", (0, 1, 2)), ("1 [rank 0]", (0,)), ("2 [ranks 1 and 2]", (1, 2)), ("here [rank 1]", (1,)),
    ]  # fmt: skip
    assert table[2].to_json() == {
        "area": "a", "name": "y", "usable": False, "detail": "2", "needed": False, "warning": False,
        "status": "not possible here", "ranks": [1, 2],
    }  # fmt: skip
    assert Finding.from_json(second.to_json()) == second
