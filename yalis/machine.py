"""Describe the machine and the software of this process: host, CPU cores, package versions and git revision."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

from yalis.version import __version__


def versions() -> dict[str, str | None]:
    """Return the versions of YALIS, Python and the packages that affect performance."""
    found: dict[str, str | None] = {"yalis": __version__, "python": platform.python_version()}
    for package in ("torch", "transformers", "triton", "gguf"):
        found[package] = package_version(package)
    return found


def package_version(package: str) -> str | None:
    """Return the installed version without importing the package, or None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def host() -> dict[str, Any]:
    """Describe operating system, CPU, usable cores and memory. The host name is left out: results are published."""
    try:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        memory = 0
    return {
        "system": f"{platform.system()} {platform.release()}",
        "machine": platform.machine(),
        "cpu": _cpu_name(),
        "cores": usable_cores(),
        "memory_gib": round(memory / 2**30, 1),
    }


def usable_cores() -> int:
    """Return the CPU cores in this process's affinity mask, which a job scheduler may have restricted."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def revision() -> str | None:
    """Return the git commit this package runs from, with "-dirty" if modified; None outside a checkout."""
    root = Path(__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None
