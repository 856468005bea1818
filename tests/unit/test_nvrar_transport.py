"""The choice of a transport between GPUs, and the variables that NVSHMEM then gets."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests import fabric_trees
from tests.unit.test_comm_auto import in_worlds
from yalis import env
from yalis.comm.nvrar.launch_config import DIRECT, PROXIED, candidate_launches, candidate_protocols, choose_launch
from yalis.comm.nvrar.launch_config import defaults_for as launch_defaults
from yalis.comm.nvrar.transport import (
    HostFacts,
    Transport,
    agree_on_transport,
    choose_transport,
    explain_start_failure,
    transport_variables,
)
from yalis.errors import YalisError
from yalis.launch.world import World


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith(("NVSHMEM_", "FI_CXI_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("NVSHMEM_HOME", str(fabric_trees.add_nvshmem(tmp_path / "nvshmem")))
    monkeypatch.setattr(env, "_set_for_nvshmem", {})


def facts_of(root: Path, **changes: Any) -> HostFacts:
    return replace(HostFacts.find(root), **changes)


def test_one_host_needs_no_network(tmp_path: Path) -> None:
    fabric_trees.perlmutter(tmp_path)
    facts = facts_of(tmp_path)
    assert choose_transport(facts, 1, 8, {}).name == "shared-gpu"
    assert choose_transport(facts, 1, 1, {}).name == "nvlink"
    # A child process inherits what its parent has set.
    assert choose_transport(facts, 1, 8, {"NVSHMEM_REMOTE_TRANSPORT": "none"}).name == "shared-gpu"


def test_slingshot(tmp_path: Path) -> None:
    fabric_trees.perlmutter(tmp_path)
    facts = facts_of(tmp_path)
    found = choose_transport(facts, 2, 1, {})
    assert (found.name, found.nic) == ("libfabric-cxi", "4 cxi")
    assert found.reason == "this host has Slingshot (4 cxi)"
    without = choose_transport(replace(facts, plugins=("ibrc",)), 2, 1, {})
    assert without.name == "none"
    assert "no libfabric plugin; to choose another, set NVSHMEM_REMOTE_TRANSPORT" in without.reason


@pytest.mark.parametrize(
    ("changes", "variables", "name", "reason"),
    [
        ({}, {}, "ibgda", "InfiniBand (2 infiniband); NVSHMEM has IBGDA"),
        ({"plugins": ("ibrc",)}, {}, "ibrc", "not IBGDA: this NVSHMEM has no ibgda plugin"),
        ({"version": (3, 3, 9)}, {}, "ibgda", "NVSHMEM has IBGDA"),
        (
            {"version": (3, 3, 9), "gdrcopy": False, "peer_mapping": False},
            {},
            "ibrc",
            "NVSHMEM 3.3.9 needs GDRCopy or the driver option PeerMappingOverride=1 for it",
        ),
        ({}, {"NVSHMEM_IB_ENABLE_IBGDA": "0"}, "ibrc", "NVSHMEM_IB_ENABLE_IBGDA is set"),
        ({"plugins": ("libfabric",)}, {"NVSHMEM_IB_ENABLE_IBGDA": "0"}, "none", "no ibrc plugin"),
        ({"version": None}, {}, "none", "NVSHMEM is not installed"),
        ({}, {"NVSHMEM_REMOTE_TRANSPORT": "ibrc"}, "ibrc", "NVSHMEM_REMOTE_TRANSPORT=ibrc is set"),
        ({}, {"NVSHMEM_REMOTE_TRANSPORT": "ibrc", "NVSHMEM_IB_ENABLE_IBGDA": "1"}, "ibgda", "is set"),
        ({}, {"NVSHMEM_REMOTE_TRANSPORT": "ucx"}, "ucx", "is set"),
        (
            {},
            {"NVSHMEM_REMOTE_TRANSPORT": "libfabric", "NVSHMEM_LIBFABRIC_PROVIDER": "efa"},
            "libfabric-efa",
            "is set",
        ),
        ({}, {"NVSHMEM_REMOTE_TRANSPORT": "none"}, "none", "but the ranks are on 2 hosts; unset it"),
    ],
)
def test_infiniband(tmp_path: Path, changes: dict[str, Any], variables: dict[str, str], name: str, reason: str) -> None:
    fabric_trees.infiniband_cluster(tmp_path)
    found = choose_transport(facts_of(tmp_path, **changes), 2, 1, variables)
    assert found.name == name
    assert reason in found.reason


def test_roce_uses_ibgda_from_nvshmem_3_5_on(tmp_path: Path) -> None:
    fabric_trees.add_infiniband(tmp_path, "mlx5_0", "pci0000:00/0000:02:00.0", layer="Ethernet")
    facts = facts_of(tmp_path)
    old = choose_transport(facts, 2, 1, {})
    assert (old.name, old.nic) == ("ibrc", "1 roce")
    assert "IBGDA of NVSHMEM 3.4.5 does not work over RoCE" in old.reason
    assert choose_transport(replace(facts, version=(3, 5, 19)), 2, 1, {}).name == "ibgda"


def test_hosts_without_a_usable_network(tmp_path: Path) -> None:
    assert "no NIC that NVSHMEM can use" in choose_transport(facts_of(tmp_path), 2, 1, {}).reason
    fabric_trees.add_infiniband(tmp_path, "mlx5_0", "pci0000:00/0000:02:00.0", state="1: DOWN")
    assert "NICs of this host are down (mlx5_0)" in choose_transport(facts_of(tmp_path), 2, 1, {}).reason
    fabric_trees.add_infiniband(tmp_path, "efa_0", "pci0000:00/0000:03:00.0", driver="efa")
    found = choose_transport(facts_of(tmp_path), 2, 1, {})
    assert found.name == "none"
    assert "set NVSHMEM_REMOTE_TRANSPORT to ibrc, libfabric or none" in found.reason


def test_variables_of_each_transport(monkeypatch: pytest.MonkeyPatch) -> None:
    one_host = {"NVSHMEM_REMOTE_TRANSPORT": "none", "NVSHMEM_DISABLE_LOCAL_ONLY_PROXY": "1"}
    assert transport_variables(Transport("shared-gpu", ""), "127.0.0.1") == one_host
    assert transport_variables(Transport("nvlink", ""), "10.0.0.1") == one_host
    monkeypatch.setattr("yalis.comm.fabric.interface_of", lambda address, root: "hsn0")
    met = {"NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME": "hsn0", "NVSHMEM_BOOTSTRAP_UID_SOCK_FAMILY": "AF_INET"}
    slingshot = transport_variables(Transport("libfabric-cxi", ""), "10.0.0.1")
    assert slingshot == {
        "NVSHMEM_REMOTE_TRANSPORT": "libfabric",
        "NVSHMEM_LIBFABRIC_PROVIDER": "cxi",
        "FI_CXI_OPTIMIZED_MRS": "0",
        **met,
    }
    ibgda = transport_variables(Transport("ibgda", ""), "2001:db8::1")
    assert ibgda["NVSHMEM_REMOTE_TRANSPORT"] == "ibrc"
    assert ibgda["NVSHMEM_IB_ENABLE_IBGDA"] == "1"
    assert ibgda["NVSHMEM_BOOTSTRAP_UID_SOCK_FAMILY"] == "AF_INET6"
    assert transport_variables(Transport("ibrc", ""), "10.0.0.1")["NVSHMEM_IB_ENABLE_IBGDA"] == "0"
    assert transport_variables(Transport("ucx", ""), "10.0.0.1") == met  # the user configures it


def test_variables_of_the_user_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NVSHMEM_SYMMETRIC_SIZE", "NVSHMEM_REMOTE_TRANSPORT", "NVSHMEM_DISABLE_NCCL"):
        monkeypatch.setenv(name, "user")
    monkeypatch.delenv("NVSHMEM_REMOTE_TRANSPORT")
    env.prepare_nvshmem(1 << 20, {"NVSHMEM_REMOTE_TRANSPORT": "libfabric"})
    found = env.variables()
    assert (found["NVSHMEM_SYMMETRIC_SIZE"], found["NVSHMEM_REMOTE_TRANSPORT"]) == ("user", "libfabric")
    users = env.nvshmem_variables()
    assert users["NVSHMEM_SYMMETRIC_SIZE"] == users["NVSHMEM_DISABLE_NCCL"] == "user"
    assert "NVSHMEM_REMOTE_TRANSPORT" not in users
    # The next engine of the process may use another transport.
    env.prepare_nvshmem(1 << 20, {"NVSHMEM_REMOTE_TRANSPORT": "none"})
    assert env.variables()["NVSHMEM_REMOTE_TRANSPORT"] == "none"
    for name in ("NVSHMEM_REMOTE_TRANSPORT", "NVSHMEM_IGNORE_CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"):
        monkeypatch.delenv(name)


def test_ranks_agree_and_count_the_ranks_of_a_gpu(tmp_path: Path) -> None:
    fabric_trees.infiniband_cluster(tmp_path)

    def rank(world: World) -> Transport:
        return agree_on_transport(world, f"GPU-{world.rank // 2}", tmp_path)

    found = in_worlds(4, rank)
    assert len(set(found)) == 1
    assert (found[0].name, found[0].ranks_per_gpu, found[0].nvshmem) == ("shared-gpu", 2, "3.4.5")


def test_hosts_with_different_networks_are_named(tmp_path: Path) -> None:
    fabric_trees.perlmutter(tmp_path / "0")
    fabric_trees.infiniband_cluster(tmp_path / "1")

    def rank(world: World) -> str:
        world.members = (world.members[0]._replace(host="one"), world.members[1]._replace(host="two", node=1))
        with pytest.raises(YalisError) as raised:
            agree_on_transport(world, f"GPU-{world.rank}", tmp_path / str(world.rank))
        return str(raised.value)

    sentences = in_worlds(2, rank)
    assert sentences[0] == sentences[1]
    assert sentences[0].startswith(
        "rank 0 on one has the transport libfabric-cxi (this host has Slingshot (4 cxi)) and rank 1 on two has ibgda ("
    )
    assert "set NVSHMEM_REMOTE_TRANSPORT to the same value on every rank" in sentences[0]


def test_a_failed_start_names_the_transport() -> None:
    sentence = explain_start_failure("NVSHMEM initialization failed", Transport("ibrc", "because"))
    assert sentence == (
        "NVSHMEM did not start over the transport ibrc (because): NVSHMEM initialization failed; NVSHMEM_DEBUG=INFO "
        "shows why; to choose another, set NVSHMEM_REMOTE_TRANSPORT to ibrc, libfabric or none on every rank"
    )


def test_launch_defaults_follow_the_transport() -> None:
    direct = {name: launch_defaults(Transport(name, "")) for name in ("shared-gpu", "nvlink", "ibgda")}
    assert set(direct.values()) == {DIRECT}
    assert {launch_defaults(Transport(name, "")) for name in ("libfabric-cxi", "ibrc", "ucx")} == {PROXIED}
    for size in (8 << 10, 1 << 20, 64 << 20):
        assert choose_launch(None, size, 4, 64, PROXIED).protocol == "ll"
    # Puts per exchange of 1 MB over nodes of four ranks: 4 of 64 KB instead of 32 of 8 KB, each with a signal.
    few, many = (choose_launch(None, 1 << 20, 4, 64, defaults) for defaults in (PROXIED, DIRECT))
    assert (few.blocks, few.chunk) == (4, 64 << 10)
    assert (many.protocol, many.blocks, many.chunk) == ("signal", 32, 8 << 10)
    assert choose_launch(None, 128 << 10, 4, 64, PROXIED).blocks == 1
    assert candidate_protocols(16 << 20, DIRECT) == ("signal",)
    assert candidate_protocols(16 << 20, PROXIED) == ("ll", "signal")
    assert candidate_protocols(16 << 20, PROXIED, whole_lines=True) == ("ll", "signal", "line")
    chunks = {launch.get("chunk") for launch in candidate_launches(2 << 20, 2, 64, PROXIED)}
    assert chunks == {None, 32 << 10}
    assert 256 << 10 in {launch.get("chunk") for launch in candidate_launches(2 << 20, 1, 4, PROXIED)}
