"""Finds NVSHMEM, its version and its transport plugins, without loading it."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

from yalis import env

_VERSION = re.compile(r"#define NVSHMEM_VENDOR_(MAJOR|MINOR|PATCH)_VERSION (\d+)")
_PLUGIN = re.compile(r"nvshmem_transport_(\w+)\.so(\.\d+)*$")
_SYSTEM = Path("/usr/local/nvshmem")


def find_nvshmem() -> Path | None:
    """Return the folder of NVSHMEM, with include/ and lib/, or None.

    That is $NVSHMEM_HOME if set, else the pip package, NVIDIA's HPC SDK or /usr/local/nvshmem.
    """
    return next((folder for folder in _candidates() if (folder / "include" / "nvshmem.h").exists()), None)


def _candidates() -> Iterator[Path]:
    if (home := env.nvshmem_home()) is not None:
        yield home
        return
    try:
        spec = importlib.util.find_spec("nvidia.nvshmem")
    except ModuleNotFoundError:
        spec = None
    yield from (Path(folder) for folder in (spec.submodule_search_locations or ())) if spec else ()
    if (sdk := env.hpc_sdk()) is not None:
        yield sdk / "comm_libs" / "nvshmem"
    yield _SYSTEM


def nvshmem_version(folder: Path) -> tuple[int, ...] | None:
    """Return the version of this NVSHMEM, such as (3, 4, 5), or None if its headers do not contain it."""
    for header in (folder / "include").rglob("nvshmem_version.h"):
        found = dict(_VERSION.findall(header.read_text(encoding="utf-8", errors="replace")))
        if len(found) == 3:
            return tuple(int(found[part]) for part in ("MAJOR", "MINOR", "PATCH"))
    return None


def plugin_file(folder: Path, name: str) -> Path | None:
    """Return the shared library of a transport plugin such as "ibrc", or None."""
    return next((path for path in _plugin_files(folder) if _plugin_name(path) == name), None)


def transport_plugins(folder: Path) -> tuple[str, ...]:
    """Return the names of the transport plugins of this NVSHMEM, such as "ibrc"."""
    return tuple(sorted({_plugin_name(path) for path in _plugin_files(folder)}))


def _plugin_files(folder: Path) -> list[Path]:
    return [path for path in sorted((folder / "lib").glob("nvshmem_transport_*")) if _PLUGIN.match(path.name)]


def _plugin_name(path: Path) -> str:
    found = _PLUGIN.match(path.name)
    return found[1] if found else ""
