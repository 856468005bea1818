"""Finds what this host has for communication between GPUs of several hosts: NICs, kernel modules and PCI distances.

Everything is read from sysfs, procfs and device files under a root folder, so no GPU is needed and tests use a copy.
"""

from __future__ import annotations

import fcntl
import re
import resource
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/")
_SIOCGIFADDR = 0x8915  # of <linux/sockios.h>: the IPv4 address of an interface
_PCI_ADDRESS = re.compile(r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]", re.IGNORECASE)
_NVIDIA, _DISPLAY = "0x10de", "0x03"  # the vendor and class of a GPU


@dataclass(frozen=True)
class Nic:
    """A NIC that can access memory of other hosts."""

    name: str  # such as "cxi0" or "mlx5_0"
    kind: str  # "cxi" (Slingshot), "infiniband" or "roce"
    driver: str = ""  # such as "mlx5_core"; empty if unknown
    up: bool = True
    pci: tuple[str, ...] = ()  # PCI addresses from the root of the bus to the NIC


@dataclass(frozen=True)
class PciGpu:
    address: str
    pci: tuple[str, ...]
    numa: str


def find_nics(root: Path = ROOT) -> tuple[Nic, ...]:
    """Return the Slingshot and InfiniBand NICs of this host."""
    classes = root / "sys/class"
    found = [
        Nic(folder.name, "cxi", _driver(folder), _is_up(folder), pci_path(folder / "device"))
        for folder in _folders(classes / "cxi")
    ]
    for folder in _folders(classes / "infiniband"):
        ports = _folders(folder / "ports")
        layers = {_read(port / "link_layer") for port in ports}
        up = not ports or any("ACTIVE" in _read(port / "state") for port in ports)
        kind = "roce" if layers == {"Ethernet"} else "infiniband"
        found.append(Nic(folder.name, kind, _driver(folder), up, pci_path(folder / "device")))
    return tuple(found)


def find_gpus(root: Path = ROOT) -> tuple[PciGpu, ...]:
    """Return the NVIDIA GPUs on the PCI bus, also those that this process cannot use."""
    return tuple(
        PciGpu(folder.name, pci_path(folder), _read(folder / "numa_node"))
        for folder in _folders(root / "sys/bus/pci/devices")
        if _read(folder / "vendor") == _NVIDIA and _read(folder / "class").startswith(_DISPLAY)
    )


def pci_path(device: Path) -> tuple[str, ...]:
    """Return the PCI addresses in the resolved path of a device: bridges first, the device last."""
    return tuple(_PCI_ADDRESS.findall(str(device.resolve()))) if device.exists() else ()


def pci_distance(one: Sequence[str], other: Sequence[str]) -> str:
    """Return how two devices are connected, nearest first: "one switch", "one host bridge" or "between host bridges".

    The paths are those of `pci_path`. The first address of a path is below the host bridge, whose name is not in it.
    """
    if not one or not other:
        return "unknown"
    shared = sum(1 for _ in _common_prefix(one[:-1], other[:-1]))
    if shared > 1:
        return "one switch"
    same_bus = one[0].rsplit(":", 1)[0] == other[0].rsplit(":", 1)[0]
    return "one host bridge" if shared or same_bus else "between host bridges"


def _common_prefix(one: Sequence[str], other: Sequence[str]) -> Sequence[str]:
    count = 0
    for left, right in zip(one, other, strict=False):
        if left != right:
            break
        count += 1
    return one[:count]


def module_loaded(name: str, root: Path = ROOT) -> bool:
    """Return whether a kernel module is loaded."""
    return (root / "sys/module" / name).exists()


def peer_memory(root: Path = ROOT) -> str | None:
    """Return how NICs register GPU memory: "nvidia_peermem", "nv_peer_mem" or "dmabuf"; None if they cannot."""
    for module in ("nvidia_peermem", "nv_peer_mem"):
        if module_loaded(module, root):
            return module
    # Only the open kernel modules of NVIDIA's driver export GPU memory as dmabuf.
    return "dmabuf" if "Open Kernel Module" in _read(root / "proc/driver/nvidia/version") else None


def gdrcopy_driver(root: Path = ROOT) -> bool:
    """Return whether GDRCopy's driver is loaded."""
    return (root / "dev/gdrdrv").exists() or module_loaded("gdrdrv", root)


def peer_mapping_override(root: Path = ROOT) -> bool:
    """Return whether the driver lets GPUs write to a NIC's doorbells, which IBGDA without CPU assistance needs."""
    return "PeerMappingOverride=1" in _read(root / "proc/driver/nvidia/params")


def locked_memory_limit() -> int | None:
    """Return the bytes of memory that this process may lock, None for no limit."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def interface_of(address: str, root: Path = ROOT) -> str | None:
    """Return the network interface that has this IP address, or None."""
    if ":" in address:
        return _interface_of_ipv6(address, root)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
            except OSError:  # no IPv4 address
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None


def _interface_of_ipv6(address: str, root: Path) -> str | None:
    packed = socket.inet_pton(socket.AF_INET6, address.partition("%")[0]).hex()
    lines = [line.split() for line in _read(root / "proc/net/if_inet6").splitlines()]
    return next((line[-1] for line in lines if line and line[0] == packed), None)


def _driver(folder: Path) -> str:
    link = folder / "device/driver"
    return link.resolve().name if link.exists() else ""


def _is_up(folder: Path) -> bool:
    """Return whether a network interface of the NIC is up; True if it has none that could tell."""
    states = [_read(interface / "operstate") for interface in _folders(folder / "device/net")]
    return not states or any(state in ("up", "unknown") for state in states)


def _folders(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
