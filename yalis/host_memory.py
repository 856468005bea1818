"""The host memory that this process can still use, within the limits of its control groups (cgroups)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

_UNLIMITED = 1 << 60  # cgroup v1 reports "no limit" as a number close to 2**63


class HostMemory(NamedTuple):
    """Host memory that this process can allocate without swapping or being killed."""

    available: int | None  # bytes; None if the system does not report it
    limited: bool = False  # a cgroup, such as that of a Slurm job or a container, allows less than the host has


def read_host_memory(root: Path = Path("/")) -> HostMemory:
    """Return the smaller of the host's available memory and what each cgroup of this process has left.

    `root` is the folder that has proc and sys, for tests.
    """
    free = None
    with suppress(OSError):
        found = re.search(r"MemAvailable:\s+(\d+) kB", (root / "proc/meminfo").read_text(encoding="ascii"))
        free = int(found[1]) << 10 if found else None
    left = [headroom for group in _cgroups(root) if (headroom := _headroom(group)) is not None]
    if left and (free is None or min(left) < free):
        return HostMemory(max(0, min(left)), limited=True)
    return HostMemory(free)


def count_oom_kills(root: Path = Path("/")) -> int:
    """Return how many processes of this cgroup the kernel has killed because memory ran out; without one, of the host.

    `root` is the folder that has proc and sys, for tests.
    """
    own = next(_cgroups(root), None)
    files = [] if own is None else [own / "memory.events", own / "memory.oom_control"]  # of cgroup v2 and v1
    for path in (*files, root / "proc/vmstat"):
        with suppress(OSError):
            if found := re.search(r"^oom_kill (\d+)$", path.read_text(), re.MULTILINE):
                return int(found[1])
    return 0


def _cgroups(root: Path) -> Iterator[Path]:
    """Yield the folders of this process's memory cgroup and of its parents, for cgroup v1 and v2."""
    with suppress(OSError, ValueError):
        mounts = list(_cgroup_mounts(root))
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and "memory" not in controllers.split(","):
                continue
            for is_v2, mounted, point in mounts:
                if is_v2 == (not controllers):
                    # In a container the mount may show only a part of the tree, and the path may be outside of it.
                    is_inside = Path(path).is_relative_to(mounted) and ".." not in path.split("/")
                    inside = Path(path).relative_to(mounted) if is_inside else Path()
                    yield from (point / folder for folder in (inside, *inside.parents))


def _cgroup_mounts(root: Path) -> Iterator[tuple[bool, str, Path]]:
    """Yield each mount with memory cgroups: whether it is cgroup v2, the part of the tree it shows, and its folder."""
    for line in (root / "proc/self/mountinfo").read_text().splitlines():
        mount, _, file_system = line.partition(" - ")
        kind, _, options = file_system.split(" ")[:3]
        if kind == "cgroup2" or (kind == "cgroup" and "memory" in options.split(",")):
            mounted, point = mount.split(" ")[3:5]
            yield kind == "cgroup2", mounted, root / point.lstrip("/")


def _headroom(group: Path) -> int | None:
    """Return the bytes left below the limit of a cgroup, counting page cache as free; None if it has no limit."""
    is_v2 = (group / "memory.current").exists()
    names = ("memory.max", "memory.high") if is_v2 else ("memory.limit_in_bytes",)
    limits = [limit for name in names if (limit := _read_number(group / name)) is not None and limit < _UNLIMITED]
    used = _read_number(group / ("memory.current" if is_v2 else "memory.usage_in_bytes"))
    if not limits or used is None:
        return None
    cached = 0
    with suppress(OSError, ValueError):
        total = "" if is_v2 else "total_"  # the totals include child groups, as usage_in_bytes does
        for line in (group / "memory.stat").read_text().splitlines():
            name, number = line.split()
            cached += int(number) if name in (f"{total}inactive_file", f"{total}active_file") else 0
    return min(limits) - max(0, used - cached)


def _read_number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # no such file, or "max"
        return None
