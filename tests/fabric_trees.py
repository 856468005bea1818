"""Copies of the parts of sysfs and procfs that `yalis/comm/fabric.py` reads, as on hosts with real networks."""

from __future__ import annotations

from pathlib import Path


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def add_device(root: Path, path: str, driver: str = "", **files: str) -> Path:
    """Add a PCI device below the bridges of `path`, such as "pci0000:00/0000:00:01.0/0000:01:00.0"."""
    device = root / "sys/devices" / path
    device.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        write(device / name, f"{text}\n")
    listed = root / "sys/bus/pci/devices" / device.name
    listed.parent.mkdir(parents=True, exist_ok=True)
    listed.symlink_to(device)
    if driver:
        folder = root / "sys/bus/pci/drivers" / driver
        folder.mkdir(parents=True, exist_ok=True)
        (device / "driver").symlink_to(folder)
    return device


def add_gpu(root: Path, path: str) -> Path:
    return add_device(root, path, "nvidia", vendor="0x10de", **{"class": "0x030200"}, numa_node="0")


def add_slingshot(root: Path, name: str, path: str, state: str = "up") -> None:
    device = add_device(root, path, "cxi_ss1")
    write(device / f"net/hsn{name[-1]}/operstate", f"{state}\n")
    folder = root / "sys/class/cxi" / name
    folder.mkdir(parents=True)
    (folder / "device").symlink_to(device)


def add_infiniband(
    root: Path, name: str, path: str, layer: str = "InfiniBand", state: str = "4: ACTIVE", driver: str = "mlx5_core"
) -> None:
    device = add_device(root, path, driver)
    folder = root / "sys/class/infiniband" / name
    write(folder / "ports/1/state", f"{state}\n")
    write(folder / "ports/1/link_layer", f"{layer}\n")
    (folder / "device").symlink_to(device)


def add_nvshmem(
    folder: Path, version: str = "3.4.5", plugins: tuple[str, ...] = ("ibgda", "ibrc", "libfabric")
) -> Path:
    """Make a folder that has the names of an NVSHMEM installation, but no code."""
    parts = zip(("MAJOR", "MINOR", "PATCH"), version.split("."), strict=True)
    lines = "".join(f"#define NVSHMEM_VENDOR_{part}_VERSION {number}\n" for part, number in parts)
    write(folder / "include/non_abi/nvshmem_version.h", lines)
    write(folder / "include/nvshmem.h", "")
    write(folder / "lib/libnvshmem_host.so.3", "")
    for name in plugins:
        write(folder / f"lib/nvshmem_transport_{name}.so.3", "")
    return folder


def perlmutter(root: Path) -> None:
    """Add four GPUs, each with its own Slingshot NIC below the same host bridge."""
    for number in range(4):
        bus = f"pci0000:{number}0/0000:{number}0:01.0"
        add_gpu(root, f"{bus}/0000:{number}1:00.0")
        add_slingshot(root, f"cxi{number}", f"pci0000:{number}0/0000:{number}0:03.0/0000:{number}2:00.0")
    write(root / "proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95\n")


def infiniband_cluster(root: Path) -> None:
    """Add two GPUs and two NICs, in pairs below the same PCI switch, with GDRCopy and nvidia_peermem."""
    for number in range(2):
        switch = f"pci0000:{number}0/0000:{number}0:01.0/0000:{number}1:00.0"
        add_gpu(root, f"{switch}/0000:{number}2:00.0/0000:{number}3:00.0")
        add_infiniband(root, f"mlx5_{number}", f"{switch}/0000:{number}2:01.0/0000:{number}4:00.0")
    for module in ("nvidia_peermem", "gdrdrv"):
        (root / "sys/module" / module).mkdir(parents=True)
    write(root / "proc/driver/nvidia/params", 'RegistryDwords: "PeerMappingOverride=1;"\n')
