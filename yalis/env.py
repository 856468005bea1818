"""The only reader of os.environ."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from yalis.errors import YalisError

LOG_LEVELS = ("debug", "info", "warning", "error")
# Spin iterations of a waiting OpenMP thread, about 10 us: as long as the gap between two GEMMs of a step.
_SPIN_COUNT = "3000"
# What prepare_nvshmem has set in this process.
_set_for_nvshmem: dict[str, str] = {}


def cache_dir() -> Path:
    """Return the cache directory: $YALIS_CACHE, else $XDG_CACHE_HOME/yalis, else ~/.cache/yalis."""
    if path := os.environ.get("YALIS_CACHE"):
        return Path(path).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "yalis"


def log_level() -> str:
    """$YALIS_LOG: the lowest level of messages to show."""
    level = os.environ.get("YALIS_LOG", "warning")
    if level not in LOG_LEVELS:
        raise YalisError(f"YALIS_LOG is {level!r}; accepted: {', '.join(LOG_LEVELS)}")
    return level


def variables() -> dict[str, str]:
    """Return a copy of all variables, for detecting launchers and for child processes."""
    return dict(os.environ)


def job_secret() -> str | None:
    """$YALIS_SECRET: the secret that the ranks of a job share. None if not set."""
    return os.environ.get("YALIS_SECRET")


def job_secret_file() -> Path | None:
    """$YALIS_SECRET_FILE: a file with that secret. None if not set."""
    path = os.environ.get("YALIS_SECRET_FILE")
    return Path(path).expanduser() if path else None


def munge_socket() -> str | None:
    """$YALIS_MUNGE_SOCKET: the socket of munged, if it is not the default one of libmunge."""
    return os.environ.get("YALIS_MUNGE_SOCKET") or None


def runtime_dir() -> Path | None:
    """$XDG_RUNTIME_DIR: a directory of this user on this host."""
    path = os.environ.get("XDG_RUNTIME_DIR")
    return Path(path) if path else None


def limit_openmp_spinning() -> None:
    """Make waiting OpenMP threads yield their core after about 10 us, unless the user has configured it.

    Call before torch is imported: its OpenMP reads the variable then. By default a thread that waits for a descheduled
    thread spins for its whole time slice, at each of the hundreds of GEMMs of a step.
    """
    if "torch" not in sys.modules and not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & set(os.environ):
        os.environ["GOMP_SPINCOUNT"] = _SPIN_COUNT


def without_openmp_spin_limit(variables: dict[str, str]) -> dict[str, str]:
    """Remove the limit of `limit_openmp_spinning`, so that other engines are measured with their own defaults."""
    return {name: value for name, value in variables.items() if (name, value) != ("GOMP_SPINCOUNT", _SPIN_COUNT)}


def triton_interpreted() -> bool:
    """Return whether Triton runs kernels in its interpreter, which accepts CPU tensors."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def pdl() -> bool:
    """$YALIS_PDL: 0 turns programmatic dependent launch off."""
    return _pdl() != "0"


def pdl_between_ranks() -> bool:
    """$YALIS_PDL: "all" also uses programmatic dependent launch with tensor parallelism over nvrar."""
    return _pdl() == "all"


def _pdl() -> str:
    given = os.environ.get("YALIS_PDL") or "1"
    if given not in ("0", "1", "all"):
        raise YalisError(f"YALIS_PDL is {given!r}; accepted: 0, 1 or all")
    return given


def experimental() -> bool:
    """$YALIS_EXPERIMENTAL: 1 uses on GPUs what has been tested on CPUs only, and has never run on a GPU."""
    return _switch("YALIS_EXPERIMENTAL", False)


def nvrar_fuse_norm() -> bool:
    """$YALIS_NVRAR_FUSE_NORM: 0 runs the norm after an all-reduce of nvrar as a kernel of its own, to compare."""
    return _switch("YALIS_NVRAR_FUSE_NORM", True)


def prepare_vllm(threads: int, uniform_routing: bool = False) -> None:
    """Set defaults that vLLM reads when it is imported: no telemetry, no downloads, few log messages.

    With `uniform_routing` its routers choose experts at random."""
    if uniform_routing:
        os.environ["VLLM_MOE_ROUTING_SIMULATION_STRATEGY"] = "uniform_random"
    cores = sorted(os.sched_getaffinity(0))[:threads]  # by default it leaves one core unused
    for name, value in (
        ("VLLM_CPU_OMP_THREADS_BIND", ",".join(map(str, cores))),
        ("VLLM_NO_USAGE_STATS", "1"),
        ("DO_NOT_TRACK", "1"),
        ("HF_HUB_OFFLINE", "1"),
        ("VLLM_LOGGING_LEVEL", "WARNING"),
        ("VLLM_USE_FLASHINFER_SAMPLER", "0"),  # it would have to be compiled
    ):
        os.environ.setdefault(name, value)


def peers_environment() -> str | None:
    """$YALIS_PEERS: the virtual environment of peer engines; "" means this process's own. None if not set."""
    return os.environ.get("YALIS_PEERS")


def peer_timeout() -> float:
    """$YALIS_PEER_TIMEOUT: seconds to wait for an answer of a peer engine's process."""
    return _positive("YALIS_PEER_TIMEOUT", 3600.0)


def silence_profiler() -> None:
    """Turn off the stderr messages of torch's profiler by default. Call before its first use."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")


def set_compile_cache_dirs(folder: Callable[[str], Path]) -> None:
    """Let Triton and torch.compile use folder("triton") and folder("inductor"), unless the user has set theirs."""
    for variable, name in (("TRITON_CACHE_DIR", "triton"), ("TORCHINDUCTOR_CACHE_DIR", "inductor")):
        if variable not in os.environ:
            os.environ[variable] = str(folder(name))


def c_compiler() -> str | None:
    """$CC: the command of the C compiler for native kernels, possibly with flags."""
    return os.environ.get("CC") or None


def allow_nccl_gpu_sharing(rank: int, one_host: bool) -> None:
    """Let ranks share a GPU under NCCL, by making each look like its own host. Call before NCCL's first use."""
    os.environ["NCCL_HOSTID"] = f"yalis-{rank}"
    if one_host:
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")


def cuda_home() -> Path | None:
    """$CUDA_HOME: the CUDA toolkit whose nvcc to use."""
    path = os.environ.get("CUDA_HOME")
    return Path(path) if path else None


def nvshmem_home() -> Path | None:
    """$NVSHMEM_HOME: an NVSHMEM to use instead of the wheel's, such as one built for the cluster's network."""
    path = os.environ.get("NVSHMEM_HOME")
    return Path(path) if path else None


def nvrar_timeout() -> float:
    """$YALIS_NVRAR_TIMEOUT: seconds a rank waits inside an all-reduce before it fails."""
    return _positive("YALIS_NVRAR_TIMEOUT", 300.0)


def nvrar_arena() -> int:
    """$YALIS_NVRAR_ARENA: MiB of GPU memory per rank for all-reduce groups. Returns bytes."""
    return int(_positive("YALIS_NVRAR_ARENA", 256.0) * 2**20)


def nvrar_flags() -> list[str]:
    """$YALIS_NVRAR_FLAGS: additional nvcc options for nvrar, such as -lineinfo, or -DNVRAR_JITTER for tests."""
    return os.environ.get("YALIS_NVRAR_FLAGS", "").split()


def hpc_sdk() -> Path | None:
    """$NVHPC_ROOT: NVIDIA's HPC SDK, which contains an NVSHMEM."""
    path = os.environ.get("NVHPC_ROOT")
    return Path(path) if path else None


def nvshmem_variables() -> dict[str, str]:
    """Return the variables of NVSHMEM and of libfabric's cxi provider, without those of a transport that
    `prepare_nvshmem` has set."""
    return {
        name: value
        for name, value in os.environ.items()
        if name.startswith(("NVSHMEM_", "FI_CXI_")) and _set_for_nvshmem.get(name) != value
    }


def prepare_nvshmem(heap: int, transport: Mapping[str, str]) -> None:
    """Set what NVSHMEM reads when it starts, except what the user has set. Call before its first use.

    `heap`: bytes of symmetric memory. `transport`: the variables of the transport between the ranks."""
    users = nvshmem_variables()
    # Ranks that this process starts inherit what is set here, so all ranks keep the heap of the first session.
    os.environ.setdefault("NVSHMEM_SYMMETRIC_SIZE", str(heap))
    os.environ.setdefault("NVSHMEM_DISABLE_NCCL", "1")
    # Ranks that share a GPU under MPS have no thread percentage assigned, which NVSHMEM otherwise rejects.
    os.environ.setdefault("NVSHMEM_IGNORE_CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "1")
    for name, value in transport.items():
        if name not in users:
            os.environ[name] = _set_for_nvshmem[name] = value


def _switch(name: str, default: bool) -> bool:
    given = os.environ.get(name) or str(int(default))
    if given not in ("0", "1"):
        raise YalisError(f"{name} is {given!r}; accepted: 0 or 1")
    return given == "1"


def _positive(name: str, default: float) -> float:
    given = os.environ.get(name)
    try:
        value = float(given) if given else default
    except ValueError:
        value = -1.0
    if not 0 < value < float("inf"):
        raise YalisError(f"{name} is {given!r}; accepted: a number above 0")
    return value
