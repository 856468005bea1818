"""The memory limits of cgroups, and the refusal of a model that exceeds them before it is loaded."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.tiny_chat import save_tiny_chat
from yalis.host_memory import HostMemory, count_oom_kills, read_host_memory

MIB, GIB = 1 << 20, 1 << 30
MEMINFO = "MemTotal: 16777216 kB\nMemAvailable: 8388608 kB\n"
V1_MOUNT = "35 31 0:32 {shown} /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
V2_MOUNT = "41 31 0:38 {shown} /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"
UNLIMITED_V1 = 9223372036854771712


def _system(root: Path, own: str, mounts: str, groups: dict[str, dict[str, object]]) -> Path:
    """Create proc and sys below `root`. `groups`: the files of cgroups by folder."""
    files: dict[str, object] = {"proc/meminfo": MEMINFO, "proc/self/cgroup": own, "proc/self/mountinfo": mounts}
    files |= {f"sys/fs/cgroup/{group}/{name}": value for group, part in groups.items() for name, value in part.items()}
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{str(content).strip()}\n")
    return root


def _v2(limit: object, used: int, cached: int = 0, high: object = "max") -> dict[str, object]:
    stat = f"anon 1\ninactive_file {cached}\nactive_file 0"
    return {"memory.max": limit, "memory.high": high, "memory.current": used, "memory.stat": stat}


def _v1(limit: int, used: int, cached: int = 0) -> dict[str, object]:
    stat = f"inactive_file 7\ntotal_inactive_file {cached}\ntotal_active_file 0"
    return {"memory.limit_in_bytes": limit, "memory.usage_in_bytes": used, "memory.stat": stat}


@pytest.mark.parametrize(
    ("own", "mounts", "groups", "expected"),
    [
        ("0::/", "", {}, None),
        ("0::/job", V2_MOUNT, {"job": _v2("max", GIB)}, None),
        ("0::/job", V2_MOUNT, {"job": _v2(3 * GIB, GIB)}, 2 * GIB),
        ("0::/job", V2_MOUNT, {"job": _v2(3 * GIB, GIB, cached=GIB // 2)}, 2 * GIB + GIB // 2),
        ("0::/job", V2_MOUNT, {"job": _v2(3 * GIB, GIB, high=2 * GIB)}, GIB),
        ("0::/job", V2_MOUNT, {"job": _v2(GIB, 2 * GIB)}, 0),
        ("0::/job/step", V2_MOUNT, {"job": _v2(2 * GIB, GIB), "job/step": _v2("max", GIB)}, GIB),
        ("0::/job/step", V2_MOUNT, {"job": _v2(4 * GIB, GIB), "job/step": _v2(2 * GIB, GIB)}, GIB),
        ("0::/job", V2_MOUNT, {"job": _v2(64 * GIB, GIB)}, None),
        ("0::/../other", V2_MOUNT, {".": _v2(2 * GIB, GIB)}, GIB),
        ("4:memory:/job/step", V1_MOUNT, {"memory/job": _v1(2 * GIB, GIB)}, GIB),
        ("4:cpu,memory:/job", V1_MOUNT, {"memory/job": _v1(2 * GIB, GIB, cached=MIB)}, GIB + MIB),
        ("4:memory:/job", V1_MOUNT, {"memory/job": _v1(UNLIMITED_V1, GIB)}, None),
        ("4:memory:/box/1\n0::/", V1_MOUNT.format(shown="/box/1") + V2_MOUNT, {"memory": _v1(2 * GIB, GIB)}, GIB),
        ("4:cpu:/job", V1_MOUNT, {"memory/job": _v1(2 * GIB, GIB)}, None),
        ("odd", "odd", {}, None),
    ],
)
def test_limits(
    tmp_path: Path, own: str, mounts: str, groups: dict[str, dict[str, object]], expected: int | None
) -> None:
    root = _system(tmp_path, own, mounts.replace("{shown}", "/"), groups)
    assert read_host_memory(root) == (HostMemory(8 * GIB) if expected is None else HostMemory(expected, limited=True))


def test_a_system_without_these_files(tmp_path: Path) -> None:
    assert read_host_memory(tmp_path) == HostMemory(None)


@pytest.mark.parametrize(
    ("own", "mounts", "path", "text"),
    [
        ("0::/job", V2_MOUNT, "job/memory.events", "low 0\noom 9\noom_kill 3\n"),
        ("4:memory:/job", V1_MOUNT, "memory/job/memory.oom_control", "under_oom 0\noom_kill 3\n"),
    ],
)
def test_oom_kills_of_other_containers_do_not_count(
    tmp_path: Path, own: str, mounts: str, path: str, text: str
) -> None:
    root = _system(tmp_path, own, mounts.replace("{shown}", "/"), {})
    (root / "proc/vmstat").write_text("oom_kill 7\n")
    assert count_oom_kills(root) == 7
    (root / "sys/fs/cgroup" / path).parent.mkdir(parents=True, exist_ok=True)
    (root / "sys/fs/cgroup" / path).write_text(text)
    assert count_oom_kills(root) == 3


@pytest.fixture
def limited() -> Iterator[Callable[[int], str]]:
    """Yield a function that sets the limit of a new cgroup and returns the file that moves a process into it."""
    own = next(
        (line.split(":", 2)[2] for line in Path("/proc/self/cgroup").read_text().splitlines() if ":memory:" in line),
        "/",
    )
    parent = Path(f"/sys/fs/cgroup/memory{own}")
    group = parent / f"yalis-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no cgroup with a memory limit can be created here ({error.strerror})")

    def limit(count: int) -> str:
        (group / "memory.limit_in_bytes").write_text(str(count))
        return str(group / "cgroup.procs")

    yield limit
    group.rmdir()


def test_a_model_beyond_the_limit_is_refused_before_it_is_loaded(tmp_path: Path, limited: Callable[[int], str]) -> None:
    model = str(save_tiny_chat(tmp_path))

    def generate(limit: int, *flags: str) -> subprocess.CompletedProcess[str]:
        join = f'echo $$ > {limited(limit)}; exec "$@"'
        command = [sys.executable, "-m", "yalis", "generate", "a", "--model", model, "--max-tokens", "2", *flags]
        return subprocess.run(["sh", "-c", join, "sh", *command], capture_output=True, text=True, timeout=200)

    probe = generate(2 * GIB, "--kv-blocks", "1000000000")
    assert probe.returncode == 1, probe.stderr
    needed = float(probe.stderr.partition(" GiB needed")[0].rpartition(" ")[2])
    blocks = int(1.2 / (needed / 1e9))  # 1.2 GiB of KV cache
    refused = generate(GIB, "--kv-blocks", str(blocks))
    assert refused.returncode == 1
    assert f"a KV cache of {blocks} blocks does not fit the memory of cpu: 1.2 GiB needed" in refused.stderr
    assert refused.stderr.endswith("or less; a cgroup limits the memory of this job\n")
    both = generate(2 * GIB, "--kv-blocks", str(2 * blocks), "--tp", "2")  # 1.2 GiB on each of two ranks
    assert both.returncode == 1
    assert "does not fit the memory of cpu: 2.4 GiB needed" in both.stderr
    assert generate(2 * GIB, "--kv-blocks", str(blocks)).returncode == 0
