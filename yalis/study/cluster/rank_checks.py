"""What a rank needs for all-reduces between nodes: NVSHMEM, its transport, kernel modules, limits and cores.

Everything here is found without a GPU; `gpu_checks.py` has what needs one.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from yalis import env
from yalis.comm import fabric
from yalis.comm.nvrar.build import find_nvcc
from yalis.comm.nvrar.nvshmem import find_nvshmem, nvshmem_version, plugin_file
from yalis.comm.nvrar.transport import IBGDA, IBRC, NONE, SLINGSHOT, HostFacts, Transport, choose_transport
from yalis.errors import count_of
from yalis.launch.world import World
from yalis.machine import package_version, usable_cores
from yalis.study.cluster.finding import Finding

AREA = "cluster"
#: Host memory that NVSHMEM and NCCL register with a NIC, with room to spare.
_MIN_LOCKED_BYTES = 1 << 30
#: A rank's own thread, and under a proxy the thread that sends its puts.
_CORES, _CORES_WITH_PROXY = 1, 2
_NO_GPU = "there is no NVIDIA GPU on this host"


def found(name: str, detail: str) -> Finding:
    return Finding(AREA, name, True, detail)


def impossible(name: str, detail: str) -> Finding:
    return Finding(AREA, name, False, detail)


def warning(name: str, detail: str) -> Finding:
    return Finding(AREA, name, True, detail, warning=True)


def check_rank(world: World, root: Path = fabric.ROOT) -> Iterator[Finding]:
    """Yield the findings of this rank, without those that need a GPU."""
    facts = HostFacts.find(root)
    hosts = len({member.node for member in world.members})
    transport = choose_transport(facts, max(hosts, 2), 1, env.nvshmem_variables())
    yield check_nvshmem(find_nvshmem(), find_nvcc())
    yield check_transport(transport, facts, hosts)
    yield check_plugin(find_nvshmem(), transport)
    yield check_libfabric(transport)
    yield check_gdrcopy(root, transport)
    yield check_peer_memory(root)
    yield check_locked_memory(fabric.locked_memory_limit(), transport)
    yield check_distances(root)
    on_host = [member.rank for member in world.members if member.node == world.members[world.rank].node]
    yield check_cores(usable_cores(), len(on_host), transport)
    yield check_nccl_plugin(transport)


def check_nvshmem(folder: Path | None, nvcc: Path | None) -> Finding:
    """Compare the CUDA versions of NVSHMEM and nvcc, which builds nvrar against it."""
    if folder is None:
        advice = "install nvidia-nvshmem-cu13 (or cu12) with pip, or set NVSHMEM_HOME"
        return impossible("nvshmem", f"not found, so nvrar cannot be used; {advice}")
    version = ".".join(map(str, nvshmem_version(folder) or ("unknown",)))
    if nvcc is None:
        return warning("nvshmem", f"{version} in {folder}, but no nvcc to build nvrar; set CUDA_HOME")
    nvcc_version = read_nvcc_version(run_command([str(nvcc), "--version"]))
    majors = {major for major in ("12", "13") if package_version(f"nvidia-nvshmem-cu{major}")}
    if env.nvshmem_home() is None and majors and nvcc_version.split(".")[0] not in majors:
        wanted = f"nvidia-nvshmem-cu{nvcc_version.split('.')[0]}"
        return warning(
            "nvshmem",
            f"{version} for CUDA {' and '.join(sorted(majors))}, but nvcc is {nvcc_version}; install {wanted}",
        )
    return found("nvshmem", f"{version} in {folder}, nvcc {nvcc_version}")


def read_nvcc_version(text: str) -> str:
    """Return the release, such as "13.0", from the output of nvcc --version."""
    match = re.search(r"release (\d+\.\d+)", text)
    return match[1] if match else "unknown"


def check_transport(transport: Transport, facts: HostFacts, hosts: int) -> Finding:
    job = "between the hosts of this job" if hosts > 1 else "if a job has several hosts"
    nics = ", ".join(f"{nic.name} ({nic.kind}{'' if nic.up else ', down'})" for nic in facts.nics) or "no NIC"
    if transport.name == NONE:
        return impossible("transport", f"none {job}: {transport.reason}")
    return found("transport", f"{transport.name} {job}: {transport.reason}; {nics}")


def check_plugin(folder: Path | None, transport: Transport) -> Finding:
    if folder is None or transport.name == NONE:
        return impossible("plugin", "no transport whose plugin could be loaded")
    names = [IBRC, IBGDA] if transport.name == IBGDA else [transport.name.partition("-")[0]]
    for name in names:
        path = plugin_file(folder, name)
        if path is None:
            return impossible("plugin", f"{folder / 'lib'} has no nvshmem_transport_{name}; install another NVSHMEM")
        host = folder / "lib/libnvshmem_host.so.3"
        reason = load_library([*([str(host)] if host.exists() else []), str(path)]).reason
        if reason:
            return warning("plugin", f"{path.name} does not load: {reason}; install that library or load its module")
    return found("plugin", f"{' and '.join(names)}: loaded")


@dataclass(frozen=True)
class Loaded:
    """What came of loading a shared library: the number that a function of it returned, or why it did not load."""

    reason: str = ""
    number: int | None = None


def load_library(libraries: Sequence[str], function: str = "") -> Loaded:
    """Load shared libraries, one after the other, and call a function of the last one.

    That happens in a new process: a broken library may end it, and libfabric's providers replace signal handlers."""
    script = (
        "import ctypes, sys\n"
        "*libraries, function = sys.argv[1:]\n"
        "for path in libraries:\n"
        "    library = ctypes.CDLL(path, ctypes.RTLD_GLOBAL)\n"
        "print(getattr(library, function)() if function else 0)\n"
    )
    try:
        done = subprocess.run(
            [sys.executable, "-c", script, *libraries, function], capture_output=True, text=True, timeout=60
        )
    except subprocess.TimeoutExpired:
        return Loaded("it took more than 60 s")
    if done.returncode == 0 and done.stdout.strip().isdigit():
        return Loaded(number=int(done.stdout))
    lines = done.stderr.strip().splitlines()
    return Loaded(lines[-1].removeprefix("OSError: ") if lines else f"the process ended with status {done.returncode}")


def check_libfabric(transport: Transport, loaded: Loaded | None = None) -> Finding:
    """`loaded`: libfabric and the result of its fi_version(); by default, it is loaded."""
    loaded = loaded or load_library(["libfabric.so.1"], "fi_version")
    needed = transport.name.startswith("libfabric")
    if loaded.number is None:
        if not needed:
            return found("libfabric", f"not installed, and not needed {_purpose(transport)}")
        return warning("libfabric", f"{loaded.reason}; load its module, or add its folder to LD_LIBRARY_PATH")
    version = f"{loaded.number >> 16}.{loaded.number & 0xFFFF}"
    if transport.name == SLINGSHOT and "cxi" not in (providers := run_command(["fi_info", "-l"])) and providers:
        return warning("libfabric", f"{version} without a cxi provider; use the libfabric of the system")
    return found("libfabric", version if needed else f"{version}, not needed {_purpose(transport)}")


def check_gdrcopy(root: Path, transport: Transport) -> Finding:
    """NVSHMEM's atomics, and so its signals, need GDRCopy over IBRC."""
    driver, library = fabric.gdrcopy_driver(root), _loads("libgdrapi.so.2")
    if driver and library:
        return found("gdrcopy", "driver and library")
    missing = " and ".join(
        name for name, present in (("the driver gdrdrv", driver), ("libgdrapi.so.2", library)) if not present
    )
    if transport.name == IBRC:
        return warning("gdrcopy", f"without {missing}; signals over ibrc need it: ask the administrator")
    return found("gdrcopy", f"without {missing}, which is not needed {_purpose(transport)}")


def check_peer_memory(root: Path) -> Finding:
    if (way := fabric.peer_memory(root)) is not None:
        return found("peer memory", f"NICs access GPU memory through {way}")
    if not fabric.find_gpus(root):
        return impossible("peer memory", _NO_GPU)
    return warning(
        "peer memory",
        "neither nvidia_peermem nor the open kernel modules of the driver; without them NICs cannot access GPU memory: "
        "ask the administrator for `modprobe nvidia_peermem`",
    )


def check_locked_memory(limit: int | None, transport: Transport) -> Finding:
    if limit is None:
        return found("locked memory", "no limit")
    size = f"{limit / 2**20:g} MiB" if limit < 1 << 30 else f"{limit / 2**30:g} GiB"
    if limit >= _MIN_LOCKED_BYTES:
        return found("locked memory", f"limit {size}")
    if transport.name == NONE:
        return found("locked memory", f"limit {size}; a network between GPUs would need unlimited")
    return warning("locked memory", f"limit {size}, too little for a NIC; set `ulimit -l unlimited` for jobs of srun")


def check_distances(root: Path) -> Finding:
    """Name the nearest NIC of each GPU on the PCI bus."""
    gpus, nics = fabric.find_gpus(root), [nic for nic in fabric.find_nics(root) if nic.up]
    if not gpus or not nics:
        return impossible("gpu to nic", _NO_GPU if not gpus else "no NIC that is up")
    order = ("one switch", "one host bridge", "between host bridges", "unknown")
    parts, far = [], 0
    for gpu in gpus:
        distance, name = min((order.index(fabric.pci_distance(gpu.pci, nic.pci)), nic.name) for nic in nics)
        far += distance > 1
        parts.append(f"{gpu.address} to {name}: {order[distance]}")
    if far:
        return warning("gpu to nic", f"{', '.join(parts)}; {count_of(far, 'GPU')} without a NIC nearby: expect less")
    return found("gpu to nic", ", ".join(parts))


def check_cores(cores: int, ranks_on_host: int, transport: Transport) -> Finding:
    """`cores`: those in the affinity mask of this rank. A launcher that binds ranks gives each its own."""
    needed = _CORES_WITH_PROXY if transport.proxied else _CORES
    detail = f"{count_of(cores, 'core')} for this rank, {count_of(ranks_on_host, 'rank')} on its host"
    if cores < needed:
        return warning("cores", f"{detail}; {transport.name} needs {needed}: raise --cpus-per-task")
    return found("cores", detail)


def check_nccl_plugin(transport: Transport) -> Finding:
    """Without its network plugin, NCCL uses TCP over Slingshot."""
    name = env.variables().get("NCCL_NET_PLUGIN") or "net"
    library = name if name.endswith(".so") or "/" in name else f"libnccl-{name}.so"
    if _loads(library):
        return found("nccl plugin", library)
    if transport.name.startswith("libfabric"):
        return warning(
            "nccl plugin", f"{library} does not load, so NCCL uses TCP; load your site's aws-ofi-nccl module"
        )
    return found("nccl plugin", f"none ({library}), which NCCL needs only for networks other than InfiniBand")


def _purpose(transport: Transport) -> str:
    return "without a network" if transport.name == NONE else f"for {transport.name}"


def _loads(library: str) -> bool:
    return not load_library([library]).reason


def run_command(argv: list[str]) -> str:
    """Return the output of a command, empty if it cannot be run."""
    try:
        return subprocess.run(argv, capture_output=True, text=True, timeout=30, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""
