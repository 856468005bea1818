"""The only reader of os.environ."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from yalis.errors import YalisError

LOG_LEVELS = ("debug", "info", "warning", "error")
# Turns of a waiting thread, some ten microseconds: as long as what lies between two products of a step.
_SPINS = "3000"


def cache_dir() -> Path:
    """Where fetched models and built files are kept: $YALIS_CACHE, else $XDG_CACHE_HOME/yalis, else ~/.cache/yalis."""
    if own := os.environ.get("YALIS_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "yalis"


def log_level() -> str:
    """$YALIS_LOG: from which level on messages are shown."""
    level = os.environ.get("YALIS_LOG", "warning")
    if level not in LOG_LEVELS:
        raise YalisError(f"YALIS_LOG is {level!r}; accepted: {', '.join(LOG_LEVELS)}")
    return level


def variables() -> dict[str, str]:
    """All variables, as a copy: what launchers set, and what a child process is given."""
    return dict(os.environ)


def share_cores() -> None:
    """Threads that wait for each other give their core away soon, unless the user has said when.

    torch's OpenMP reads it when it is loaded. Left to itself, a thread whose partner another process keeps from its
    core spins until its own time is over, for every one of the hundreds of products of a step.
    """
    if "torch" not in sys.modules and not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & set(os.environ):
        os.environ["GOMP_SPINCOUNT"] = _SPINS


def without_shared_cores(variables: dict[str, str]) -> dict[str, str]:
    """For programs that are measured beside us: they wait as they do for their users."""
    return {name: value for name, value in variables.items() if (name, value) != ("GOMP_SPINCOUNT", _SPINS)}


def triton_interpreted() -> bool:
    """Whether Triton runs kernels in its interpreter, which works on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def pdl() -> bool:
    """$YALIS_PDL: with 0 no launch on a GPU begins before the one before it ends."""
    return _switch("YALIS_PDL", True)


def prepare_vllm(threads: int) -> None:
    """What vLLM reads when it is first imported: it measures and stays quiet, unless the user has said otherwise."""
    cores = sorted(os.sched_getaffinity(0))[:threads]  # left to itself it keeps a core of the CPU for others
    for name, value in (
        ("VLLM_CPU_OMP_THREADS_BIND", ",".join(map(str, cores))),
        ("VLLM_NO_USAGE_STATS", "1"),
        ("DO_NOT_TRACK", "1"),
        ("HF_HUB_OFFLINE", "1"),
        ("VLLM_LOGGING_LEVEL", "WARNING"),
        ("VLLM_USE_FLASHINFER_SAMPLER", "0"),  # which it would have to compile
    ):
        os.environ.setdefault(name, value)


def peers() -> str | None:
    """$YALIS_PEERS: the environment that peers run in; empty for our own process. None where nothing was said."""
    return os.environ.get("YALIS_PEERS")


def peer_timeout() -> float:
    """$YALIS_PEER_TIMEOUT: seconds after which a peer in a process of its own that has not answered is given up."""
    return _positive("YALIS_PEER_TIMEOUT", 3600.0)


def quiet_profiler() -> None:
    """torch's profiler says on stderr that it starts and stops, unless the user has said otherwise. Before that."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")


def keep_compiled() -> None:
    """Keep what Triton and torch.compile build beside what we build, unless the user has said where."""
    os.environ.setdefault("TRITON_CACHE_DIR", str(cache_dir() / "triton"))
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_dir() / "inductor"))


def c_compiler() -> str | None:
    """The command of the C compiler to build native kernels with: $CC, with any flags of its own."""
    return os.environ.get("CC") or None


def let_nccl_share_a_gpu(rank: int, one_host: bool) -> None:
    """NCCL refuses two ranks of a host on one GPU; as hosts of their own they use sockets. Before its first use."""
    os.environ["NCCL_HOSTID"] = f"yalis-{rank}"
    if one_host:
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")


def cuda_home() -> Path | None:
    """$CUDA_HOME: the CUDA toolkit whose nvcc is to be used."""
    own = os.environ.get("CUDA_HOME")
    return Path(own) if own else None


def nvshmem_home() -> Path | None:
    """$NVSHMEM_HOME: an NVSHMEM other than the wheel's, for one that knows the cluster's network."""
    own = os.environ.get("NVSHMEM_HOME")
    return Path(own) if own else None


def nvrar_timeout() -> float:
    """$YALIS_NVRAR_TIMEOUT: seconds after which a rank that waits in an all-reduce gives up."""
    return _positive("YALIS_NVRAR_TIMEOUT", 300.0)


def nvrar_arena() -> int:
    """$YALIS_NVRAR_ARENA: MiB of GPU memory that every rank keeps for its all-reduce groups."""
    return int(_positive("YALIS_NVRAR_ARENA", 256.0) * 2**20)


def nvrar_flags() -> list[str]:
    """$YALIS_NVRAR_FLAGS: more options for the compiler of nvrar, like -lineinfo, or -DNVRAR_JITTER to test it."""
    return os.environ.get("YALIS_NVRAR_FLAGS", "").split()


def prepare_nvshmem(heap: int, one_host: bool) -> None:
    """What NVSHMEM reads when it starts, where the user has not said otherwise. Before its first use."""
    os.environ.setdefault("NVSHMEM_SYMMETRIC_SIZE", str(heap))
    os.environ.setdefault("NVSHMEM_DISABLE_NCCL", "1")
    # Ranks that share a GPU under MPS have no share of it assigned, which NVSHMEM otherwise takes for a mistake.
    os.environ.setdefault("NVSHMEM_IGNORE_CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "1")
    if one_host:
        os.environ.setdefault("NVSHMEM_REMOTE_TRANSPORT", "none")


def _switch(name: str, otherwise: bool) -> bool:
    given = os.environ.get(name) or str(int(otherwise))
    if given not in ("0", "1"):
        raise YalisError(f"{name} is {given!r}; accepted: 0 or 1")
    return given == "1"


def _positive(name: str, otherwise: float) -> float:
    given = os.environ.get(name)
    try:
        value = float(given) if given else otherwise
    except ValueError:
        value = -1.0
    if not 0 < value < float("inf"):
        raise YalisError(f"{name} is {given!r}; accepted: a number above 0")
    return value
