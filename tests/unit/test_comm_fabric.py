"""What a host has for communication, read from copies of sysfs and procfs."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tests import fabric_trees
from yalis.comm import fabric
from yalis.comm.nvrar.nvshmem import find_nvshmem, nvshmem_version, plugin_file, transport_plugins


def test_a_slingshot_host(tmp_path: Path) -> None:
    fabric_trees.perlmutter(tmp_path)
    nics, gpus = fabric.find_nics(tmp_path), fabric.find_gpus(tmp_path)
    assert [(nic.name, nic.kind, nic.driver, nic.up) for nic in nics] == [
        (f"cxi{number}", "cxi", "cxi_ss1", True) for number in range(4)
    ]
    assert [gpu.address for gpu in gpus] == [f"0000:{number}1:00.0" for number in range(4)]
    distances = [[fabric.pci_distance(gpu.pci, nic.pci) for nic in nics] for gpu in gpus]
    far = "between host bridges"
    assert distances == [["one host bridge" if i == j else far for j in range(4)] for i in range(4)]
    assert fabric.peer_memory(tmp_path) == "dmabuf"
    assert not fabric.gdrcopy_driver(tmp_path)
    assert not fabric.peer_mapping_override(tmp_path)


def test_an_infiniband_host(tmp_path: Path) -> None:
    fabric_trees.infiniband_cluster(tmp_path)
    nics, gpus = fabric.find_nics(tmp_path), fabric.find_gpus(tmp_path)
    assert [(nic.name, nic.kind, nic.driver) for nic in nics] == [
        ("mlx5_0", "infiniband", "mlx5_core"), ("mlx5_1", "infiniband", "mlx5_core"),
    ]  # fmt: skip
    assert [fabric.pci_distance(gpu.pci, nics[0].pci) for gpu in gpus] == ["one switch", "between host bridges"]
    assert fabric.peer_memory(tmp_path) == "nvidia_peermem"
    assert fabric.gdrcopy_driver(tmp_path)
    assert fabric.peer_mapping_override(tmp_path)


def test_nics_that_are_down_and_roce(tmp_path: Path) -> None:
    fabric_trees.add_slingshot(tmp_path, "cxi0", "pci0000:00/0000:01:00.0", state="down")
    fabric_trees.add_infiniband(tmp_path, "mlx5_0", "pci0000:00/0000:02:00.0", layer="Ethernet")
    fabric_trees.add_infiniband(tmp_path, "mlx5_1", "pci0000:00/0000:03:00.0", state="1: DOWN")
    assert [(nic.name, nic.kind, nic.up) for nic in fabric.find_nics(tmp_path)] == [
        ("cxi0", "cxi", False), ("mlx5_0", "roce", True), ("mlx5_1", "infiniband", False),
    ]  # fmt: skip


def test_a_host_without_anything(tmp_path: Path) -> None:
    assert fabric.find_nics(tmp_path) == ()
    assert fabric.find_gpus(tmp_path) == ()
    assert fabric.peer_memory(tmp_path) is None
    assert fabric.pci_distance((), ("0000:00:01.0",)) == "unknown"


def test_the_interface_of_an_address(tmp_path: Path) -> None:
    names = [name for _, name in socket.if_nameindex()]
    assert fabric.interface_of("127.0.0.1") in names
    assert fabric.interface_of("203.0.113.77") is None
    line = "20010db8000000000000000000000001 03 40 00 80 hsn0"
    fabric_trees.write(tmp_path / "proc/net/if_inet6", f"{'0' * 31}1 01 80 10 80 lo\n{line}\n")
    assert fabric.interface_of("2001:db8::1", tmp_path) == "hsn0"
    assert fabric.interface_of("2001:db8::2", tmp_path) is None


def test_nvshmem_is_found_with_version_and_plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home, sdk = tmp_path / "home", tmp_path / "sdk"
    fabric_trees.add_nvshmem(sdk / "comm_libs/nvshmem", "3.2.5", ("ibrc",))
    monkeypatch.setenv("NVSHMEM_HOME", str(home))
    assert find_nvshmem() is None  # named by the user, so no other is used
    fabric_trees.add_nvshmem(home)
    assert find_nvshmem() == home
    assert nvshmem_version(home) == (3, 4, 5)
    assert transport_plugins(home) == ("ibgda", "ibrc", "libfabric")
    assert plugin_file(home, "ibrc") == home / "lib/nvshmem_transport_ibrc.so.3"
    assert plugin_file(home, "ucx") is None
    monkeypatch.delenv("NVSHMEM_HOME")
    monkeypatch.setenv("NVHPC_ROOT", str(sdk))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)  # no pip package
    found = find_nvshmem()
    assert found == sdk / "comm_libs/nvshmem"
    assert (nvshmem_version(found), transport_plugins(found)) == ((3, 2, 5), ("ibrc",))
    assert nvshmem_version(tmp_path) is None
