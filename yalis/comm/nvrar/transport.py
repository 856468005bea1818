"""Chooses the transport over which NVSHMEM connects the ranks of a job, and configures NVSHMEM for it.

Names of transports: "shared-gpu" (ranks of one host share GPUs), "nvlink" (one host, a GPU each), "libfabric-cxi"
(Slingshot), "ibgda" (InfiniBand, the GPU writes requests for the NIC), "ibrc" (InfiniBand through a CPU thread), or
"none". A user who sets NVSHMEM_REMOTE_TRANSPORT chooses it; "libfabric-efa", "ucx" and "ibdevx" exist only so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from yalis import env
from yalis.comm import fabric
from yalis.comm.fabric import Nic
from yalis.comm.nvrar.nvshmem import find_nvshmem, nvshmem_version, transport_plugins
from yalis.errors import YalisError
from yalis.launch.link import is_loopback
from yalis.launch.world import World

SHARED_GPU, NVLINK, SLINGSHOT, IBGDA, IBRC, NONE = (
    "shared-gpu", "nvlink", "libfabric-cxi", "ibgda", "ibrc", "none",
)  # fmt: skip
#: The first NVSHMEM whose IBGDA works without GDRCopy and without an option of the driver, and the first whose IBGDA
#: works over RoCE.
_CPU_ASSISTED_IBGDA, _ROCE_IBGDA = (3, 4), (3, 5)
_OVERRIDE = "to choose another, set NVSHMEM_REMOTE_TRANSPORT to ibrc, libfabric or none on every rank"


@dataclass(frozen=True)
class Transport:
    """The transport between the GPUs of a job, and why it was chosen."""

    name: str
    reason: str
    nic: str = ""  # kind and number of the NICs that it uses, such as "4 cxi"
    nvshmem: str = ""  # version
    ranks_per_gpu: int = 1

    @property
    def one_host(self) -> bool:
        return self.name in (SHARED_GPU, NVLINK)

    @property
    def proxied(self) -> bool:
        """Whether a CPU thread of each rank sends the puts, one after another. Then many small puts are slow, and a
        signal waits in that thread for everything before it."""
        return self.name not in (SHARED_GPU, NVLINK, IBGDA, NONE)

    def __str__(self) -> str:
        return f"{self.name} ({self.reason})"


@dataclass(frozen=True)
class HostFacts:
    """What one host has for a transport."""

    nics: tuple[Nic, ...] = ()
    version: tuple[int, ...] | None = None  # of NVSHMEM; None: not installed
    plugins: tuple[str, ...] = ()  # of NVSHMEM, such as "ibrc"
    peer_memory: str | None = None
    gdrcopy: bool = False
    peer_mapping: bool = False

    @classmethod
    def find(cls, root: Path = fabric.ROOT) -> HostFacts:
        folder = find_nvshmem()
        return cls(
            fabric.find_nics(root),
            nvshmem_version(folder) if folder else None,
            transport_plugins(folder) if folder else (),
            fabric.peer_memory(root),
            fabric.gdrcopy_driver(root),
            fabric.peer_mapping_override(root),
        )


def choose_transport(facts: HostFacts, hosts: int, ranks_per_gpu: int, variables: Mapping[str, str]) -> Transport:
    """Return the transport for ranks on so many hosts. `variables`: those of NVSHMEM that the user has set."""
    chosen = variables.get("NVSHMEM_REMOTE_TRANSPORT", "").lower()
    if chosen and not (chosen == "none" and hosts == 1):
        return _chosen_by_user(chosen, facts, hosts, variables)
    if hosts == 1 and ranks_per_gpu > 1:
        return Transport(SHARED_GPU, f"{ranks_per_gpu} ranks share a GPU of one host")
    if hosts == 1:
        return Transport(NVLINK, "all ranks are on one host, whose GPUs access each other's memory")
    return _choose_network(facts, variables)


def _chosen_by_user(chosen: str, facts: HostFacts, hosts: int, variables: Mapping[str, str]) -> Transport:
    reason = f"NVSHMEM_REMOTE_TRANSPORT={chosen} is set"
    if chosen == "none":
        return Transport(NONE, f"{reason}, but the ranks are on {hosts} hosts; unset it or choose a network")
    if chosen == "libfabric":
        provider = variables.get("NVSHMEM_LIBFABRIC_PROVIDER", "cxi").lower()
        return Transport(f"libfabric-{provider}", reason, _count_nics(facts.nics, ("cxi",)))
    ibgda = chosen == "ibgda" or (chosen == IBRC and _wants_ibgda(variables))
    name = IBGDA if ibgda else chosen
    return Transport(name, reason, _count_nics(facts.nics, ("infiniband", "roce")))


def _wants_ibgda(variables: Mapping[str, str]) -> bool:
    return variables.get("NVSHMEM_IB_ENABLE_IBGDA", "").lower() in ("1", "true", "yes", "on", "y", "t")


def _choose_network(facts: HostFacts, variables: Mapping[str, str]) -> Transport:
    """Return the network transport of a host without a user's choice."""
    if facts.version is None:
        return Transport(NONE, "NVSHMEM is not installed")
    nics = [nic for nic in facts.nics if nic.up]
    if any(nic.kind == "cxi" for nic in nics):
        count = _count_nics(nics, ("cxi",))
        if "libfabric" in facts.plugins:
            return Transport(SLINGSHOT, f"this host has Slingshot ({count})", count)
        return Transport(NONE, f"this host has Slingshot, but this NVSHMEM has no libfabric plugin; {_OVERRIDE}")
    mellanox = [nic for nic in nics if nic.kind != "cxi" and nic.driver in ("mlx5_core", "")]
    if not mellanox:
        return Transport(NONE, f"{_describe_missing(facts.nics)}; {_OVERRIDE}")
    count = _count_nics(mellanox, ("infiniband", "roce"))
    if "NVSHMEM_IB_ENABLE_IBGDA" in variables:
        name, why = (IBGDA if _wants_ibgda(variables) else IBRC), "NVSHMEM_IB_ENABLE_IBGDA is set"
    else:
        obstacle = _no_ibgda(facts, mellanox)
        name, why = (IBRC, f"not IBGDA: {obstacle}") if obstacle else (IBGDA, "NVSHMEM has IBGDA")
    if name == IBRC and "ibrc" not in facts.plugins:
        return Transport(NONE, f"this host has InfiniBand, but this NVSHMEM has no ibrc plugin; {_OVERRIDE}")
    return Transport(name, f"this host has InfiniBand ({count}); {why}", count)


def _no_ibgda(facts: HostFacts, nics: Sequence[Nic]) -> str | None:
    """Return why the GPU cannot write requests for the NIC, or None if it can."""
    assert facts.version is not None
    version = ".".join(map(str, facts.version))
    if "ibgda" not in facts.plugins:
        return "this NVSHMEM has no ibgda plugin"
    if all(nic.kind == "roce" for nic in nics) and facts.version < _ROCE_IBGDA:
        return f"IBGDA of NVSHMEM {version} does not work over RoCE"
    if not (facts.peer_mapping or facts.gdrcopy or facts.version >= _CPU_ASSISTED_IBGDA):
        return f"NVSHMEM {version} needs GDRCopy or the driver option PeerMappingOverride=1 for it"
    return None


def _describe_missing(nics: Sequence[Nic]) -> str:
    if not nics:
        return "this host has no NIC that NVSHMEM can use (none in /sys/class/cxi or /sys/class/infiniband)"
    if down := [nic.name for nic in nics if not nic.up]:
        return f"the NICs of this host are down ({', '.join(down)})"
    return f"NVSHMEM is not configured for NICs of driver {', '.join(sorted({nic.driver for nic in nics}))}"


def _count_nics(nics: Sequence[Nic], kinds: Sequence[str]) -> str:
    counts = {kind: sum(nic.kind == kind and nic.up for nic in nics) for kind in kinds}
    return ", ".join(f"{count} {kind}" for kind, count in counts.items() if count)


def local_transport(world: World, root: Path = fabric.ROOT) -> Transport:
    """Return the transport that this rank alone would choose, as if no ranks shared a GPU."""
    hosts = len({member.node for member in world.members})
    return choose_transport(HostFacts.find(root), hosts, 1, env.nvshmem_variables())


def gather_transports(world: World, gpu: str, root: Path = fabric.ROOT) -> list[Transport]:
    """Return the transport that each rank finds, by rank. Every rank calls this; `gpu` identifies the GPU of a rank."""
    found: list[dict[str, Any]] = world.all_gather_object(
        {"gpu": gpu, "facts": asdict(HostFacts.find(root)), "variables": env.nvshmem_variables()}
    )
    gpus = [rank["gpu"] for rank in found]
    ranks_per_gpu = max(gpus.count(name) for name in gpus)
    hosts = len({member.node for member in world.members})
    transports = []
    for rank in found:
        facts = _parse_facts(rank["facts"])
        chosen = choose_transport(facts, hosts, ranks_per_gpu, rank["variables"])
        version = ".".join(map(str, facts.version or ()))
        transports.append(replace(chosen, nvshmem=version, ranks_per_gpu=ranks_per_gpu))
    return transports


def agree_on_transport(world: World, gpu: str, root: Path = fabric.ROOT) -> Transport:
    """Return the transport of rank 0. All ranks raise a YalisError if another rank has found another transport."""
    transports = gather_transports(world, gpu, root)
    first = transports[0]
    for member, other in zip(world.members, transports, strict=True):
        if other.name != first.name:
            raise YalisError(
                f"{world.members[0]} has the transport {first} and {member} has {other}; all hosts of a job "
                "need the same: leave out the hosts that differ, or set NVSHMEM_REMOTE_TRANSPORT to the same value on "
                "every rank"
            )
    return first


def _parse_facts(values: dict[str, Any]) -> HostFacts:
    """Return the facts that another rank sent as JSON."""
    nics = tuple(Nic(**{**nic, "pci": tuple(nic["pci"])}) for nic in values["nics"])
    version = None if values["version"] is None else tuple(values["version"])
    return HostFacts(**{**values, "nics": nics, "version": version, "plugins": tuple(values["plugins"])})


def transport_variables(transport: Transport, address: str, root: Path = fabric.ROOT) -> dict[str, str]:
    """Return the environment variables that NVSHMEM needs for a transport on a rank with this IP address."""
    if transport.one_host:
        # Without a network, NVSHMEM's proxy thread only polls for an exit that device code requests, on its own core.
        return {"NVSHMEM_REMOTE_TRANSPORT": "none", "NVSHMEM_DISABLE_LOCAL_ONLY_PROXY": "1"}
    values = {}
    if transport.name == SLINGSHOT:
        # With optimized memory regions, libfabric's cxi provider can hang under NVSHMEM.
        values = {
            "NVSHMEM_REMOTE_TRANSPORT": "libfabric",
            "NVSHMEM_LIBFABRIC_PROVIDER": "cxi",
            "FI_CXI_OPTIMIZED_MRS": "0",
        }
    elif transport.name in (IBRC, IBGDA):
        values = {"NVSHMEM_REMOTE_TRANSPORT": "ibrc", "NVSHMEM_IB_ENABLE_IBGDA": str(int(transport.name == IBGDA))}
    # Otherwise NVSHMEM takes the first interface it finds, which may lead to no other host.
    interface = None if is_loopback(address) else fabric.interface_of(address, root)
    if interface is not None:
        values["NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME"] = interface
        values["NVSHMEM_BOOTSTRAP_UID_SOCK_FAMILY"] = "AF_INET6" if ":" in address else "AF_INET"
    return values


def explain_start_failure(reason: str, transport: Transport) -> str:
    """Return the message for a failure of NVSHMEM's start over this transport."""
    return f"NVSHMEM did not start over the transport {transport}: {reason}; NVSHMEM_DEBUG=INFO shows why; {_OVERRIDE}"
