"""Builds csrc/nvrar with nvcc on first use and keeps the library in the cache."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

from yalis import env
from yalis.errors import YalisFailure
from yalis.log import get_logger

log = get_logger(__name__)

MAIN = "launch.cu"
FLAGS = ("-std=c++17", "-O3", "-rdc=true", "-shared", "-Xcompiler", "-fPIC")


def find_sources() -> Path | None:
    """csrc/nvrar of the checkout this runs from, else of the installed distribution."""
    here = Path(__file__).parents[3] / "csrc" / "nvrar"
    if (here / MAIN).exists():
        return here
    try:
        files = importlib.metadata.files("yalis") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    found = (Path(str(file.locate())) for file in files if file.name == MAIN)
    return next((path.resolve().parent for path in found if path.exists()), None)


def find_nvcc() -> Path | None:
    """$CUDA_HOME's, else the one on the path, else the usual place's."""
    home = env.cuda_home()
    found = None if home else shutil.which("nvcc")
    place = Path(found) if found else (home or Path("/usr/local/cuda")) / "bin" / "nvcc"
    return place if place.exists() else None


def find_nvshmem() -> Path | None:
    """$NVSHMEM_HOME, else the wheel's folder, which has include/ and lib/."""
    home = env.nvshmem_home()
    if home is None:
        try:
            spec = importlib.util.find_spec("nvidia.nvshmem")
        except ModuleNotFoundError:
            spec = None
        places = [Path(place) for place in (spec.submodule_search_locations or ())] if spec else []
    else:
        places = [home]
    return next((place for place in places if (place / "include" / "nvshmem.h").exists()), None)


def missing() -> str | None:
    """What would have to be installed before the library can be built, as a short clause; None where nothing."""
    if find_sources() is None:
        return "this installation lacks the sources of nvrar; install yalis anew"
    if find_nvcc() is None:
        return "no nvcc; install the CUDA toolkit, or set CUDA_HOME to where it is"
    if find_nvshmem() is None:
        major = (torch.version.cuda or "13").split(".")[0]
        return f"NVSHMEM is not installed (pip install nvidia-nvshmem-cu{major}), and NVSHMEM_HOME names none"
    return None


def build(architecture: str) -> Path:
    """The library for GPUs of this architecture, like "90"; named by everything its code depends on."""
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
    folder = env.cache_dir() / "nvrar"
    built = folder / f"{key.hexdigest()[:16]}.so"
    if built.exists():
        return built
    folder.mkdir(parents=True, exist_ok=True)
    log.info("building nvrar for sm_%s", architecture)
    with tempfile.TemporaryDirectory(dir=folder) as made:
        out = Path(made) / "nvrar.so"
        places = [f"-I{sources}", f"-I{nvshmem / 'include'}", f"-L{nvshmem / 'lib'}"]
        target = ["-gencode", f"arch=compute_{architecture},code=sm_{architecture}"]
        # The wheel has no link without a version, which -lnvshmem_host would look for.
        libraries = ["-lnvshmem_device", "-Xlinker", f"-l:{host.name}", "-Xlinker", f"-rpath={nvshmem / 'lib'}"]
        _run([str(nvcc), *flags, *target, *places, str(sources / MAIN), "-o", str(out), *libraries], 600)
        os.replace(out, built)  # whole or not at all, whoever else builds it now
    return built


def _run(command: list[str], seconds: float) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise YalisFailure(f"nvrar cannot be built: {command[0]} did not run: {error}") from error
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line.lower()] or done.stderr.splitlines()
        raise YalisFailure(f"nvrar cannot be built: {command[0]}: {lines[0] if lines else done.returncode}")
    return done.stdout
