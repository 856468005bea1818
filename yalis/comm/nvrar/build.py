"""Builds csrc/nvrar with nvcc on first use and caches the shared library."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

from yalis import env
from yalis.cache_folders import cache_folder
from yalis.comm.nvrar.nvshmem import find_nvshmem
from yalis.errors import YalisFailure
from yalis.log import get_logger

log = get_logger(__name__)

MAIN = "launch.cu"
FLAGS = ("-std=c++17", "-O3", "-rdc=true", "-shared", "-Xcompiler", "-fPIC")


def find_sources() -> Path | None:
    """Return csrc/nvrar of the checkout, else of the installed distribution, or None."""
    checkout = Path(__file__).parents[3] / "csrc" / "nvrar"
    if (checkout / MAIN).exists():
        return checkout
    try:
        files = importlib.metadata.files("yalis") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    found = (Path(str(file.locate())) for file in files if file.name == MAIN)
    return next((path.resolve().parent for path in found if path.exists()), None)


def find_nvcc() -> Path | None:
    """Return nvcc of $CUDA_HOME, else of $PATH, else of /usr/local/cuda, or None."""
    home = env.cuda_home()
    found = None if home else shutil.which("nvcc")
    nvcc = Path(found) if found else (home or Path("/usr/local/cuda")) / "bin" / "nvcc"
    return nvcc if nvcc.exists() else None


def missing() -> str | None:
    """Return what must be installed before the library can be built, as a short clause, or None."""
    if find_sources() is None:
        return "the nvrar sources are not installed; reinstall yalis"
    if find_nvcc() is None:
        return "nvcc not found; install the CUDA toolkit or set CUDA_HOME"
    if find_nvshmem() is None:
        major = (torch.version.cuda or "13").split(".")[0]
        return f"NVSHMEM not found; run pip install nvidia-nvshmem-cu{major} or set NVSHMEM_HOME"
    return None


def build(architecture: str) -> Path:
    """Build the library for this GPU architecture (for example "90"), unless it is cached. Returns its path.

    The file name is a hash of the sources, the compiler and NVSHMEM versions and the flags.
    """
    sources, nvcc, nvshmem = find_sources(), find_nvcc(), find_nvshmem()
    if sources is None or nvcc is None or nvshmem is None:
        raise YalisFailure(f"nvrar cannot be built: {missing()}")
    host = next((nvshmem / "lib").glob("libnvshmem_host.so*"), None)
    if host is None:
        raise YalisFailure(f"nvrar cannot be built: {nvshmem / 'lib'} has no libnvshmem_host.so")
    flags = [*FLAGS, *env.nvrar_flags()]
    key = hashlib.sha256(architecture.encode())
    for part in (*sorted(sources.iterdir()), *(nvshmem / "include").rglob("nvshmem_version.h")):
        if part.is_file():
            key.update(part.name.encode() + b"\0" + part.read_bytes())
    key.update(_run([str(nvcc), "--version"], 60).encode() + str(nvshmem).encode() + " ".join(flags).encode())
    folder = cache_folder("nvrar", to_write=True)
    built = folder / f"{key.hexdigest()[:16]}.so"
    if built.exists():
        return built
    log.info("building nvrar for sm_%s", architecture)
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        out = Path(temporary) / "nvrar.so"
        paths = [f"-I{sources}", f"-I{nvshmem / 'include'}", f"-L{nvshmem / 'lib'}"]
        target = ["-gencode", f"arch=compute_{architecture},code=sm_{architecture}"]
        # The pip package has only the versioned libnvshmem_host.so.N, which -lnvshmem_host would not find.
        libraries = ["-lnvshmem_device", "-Xlinker", f"-l:{host.name}", "-Xlinker", f"-rpath={nvshmem / 'lib'}"]
        _run([str(nvcc), *flags, *target, *paths, str(sources / MAIN), "-o", str(out), *libraries], 600)
        os.replace(out, built)  # atomic, in case another process builds it too
    return built


def _run(command: list[str], seconds: float) -> str:
    """Run a command and return its stdout. Raises a YalisFailure with the first error line if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise YalisFailure(f"nvrar cannot be built: {command[0]} did not run: {error}") from error
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line.lower()] or done.stderr.splitlines()
        raise YalisFailure(f"nvrar cannot be built: {command[0]}: {lines[0] if lines else done.returncode}")
    return done.stdout
