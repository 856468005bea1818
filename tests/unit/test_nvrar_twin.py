"""The kernels of csrc/nvrar, run on the CPU with puts that arrive late and in any order; broken ones are caught."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "csrc" / "nvrar"
TWIN = Path(__file__).with_name("nvrar_twin.cpp")
REDUCE, INTER_NODE, GATHER = 1, 2, 3

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


def build(sources: Path, out: Path, *flags: str) -> Path:
    command = [
        "g++",
        "-std=c++17",
        "-Wall",
        "-Wno-unknown-pragmas",
        "-U_FORTIFY_SOURCE",
        f"-I{sources}",
        *flags,
        str(TWIN),
        "-o",
        str(out),
    ]
    subprocess.run(command, check=True, timeout=200)
    return out


def run(twin: Path, nodes: str, **options: int) -> subprocess.CompletedProcess[str]:
    words = [f"nodes={nodes}", *(f"{name}={value}" for name, value in options.items())]
    return subprocess.run([twin, *words], capture_output=True, text=True, timeout=200)


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(SOURCES, tmp_path_factory.mktemp("twin") / "twin", "-O1")


SHAPES = ["2", "3", "1,1", "2,1", "1,1,1", "2,2", "3,2", "2,2,2", "1,3,2", "4,4", "2,2,2,2", "1,1,1,1,1", "3,3,3,3,3"]
SETTINGS: dict[str, dict[str, int]] = {
    "plain": {},
    "two groups, unlike blocks": {"groups": 2, "unlike": 1},
    "epilogue": {"epilogue": 1, "blocks": 3, "threads": 2},
    "numbers beyond 32 bits": {"number": 2**32 - 60, "threads": 3, "blocks": 1},
    "ring": {"algorithm": 1},
    "one-shot": {"algorithm": 2},
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_every_rank_has_the_sum(twin: Path, setting: str) -> None:
    """Integers exactly, floats within their error; the same bits on every rank; all types, odd sizes, in place too."""
    for seed, nodes in enumerate(SHAPES):
        done = run(twin, nodes, ops=60, seed=seed, **SETTINGS[setting])
        assert done.returncode == 0, f"{nodes} seed={seed}: {done.stdout}{done.stderr}"


def test_thousands_of_operations(twin: Path) -> None:
    for nodes, value in (("2,2", 3000), ("1,1,1", 3000)):
        done = run(twin, nodes, ops=value, groups=2, seed=5)
        assert done.returncode == 0, done.stdout
        assert int(done.stdout.split()[0]) == value * sum(map(int, nodes.split(",")))


@pytest.mark.full
@pytest.mark.parametrize("setting", SETTINGS)
def test_many_schedules(twin: Path, setting: str) -> None:
    for seed in range(40):
        for nodes in [*SHAPES, "1,1,1,1,1,1,1", "2,1,3,1,1,2"]:
            done = run(twin, nodes, ops=60, seed=100 + seed, **SETTINGS[setting])
            assert done.returncode == 0, f"{nodes} seed={100 + seed}: {done.stdout}"


def test_absent_rank_is_reported(twin: Path) -> None:
    """Rank 3 of 2 + 2 + 1 never comes: each rank says in which phase and for whom it waited, and ends."""
    for protocol in (0, 1):
        done = run(twin, "2,2,1", ops=1, absent=3, timeout=200_000, seed=3, protocol=protocol, number=41)
        lines = [[int(word) for word in line.split()] for line in done.stdout.splitlines()]
        assert [line[0] for line in lines] == [1, 1, 1, 0, 1]
        phases = {rank: (line[2], line[4]) for rank, line in enumerate(lines) if rank != 3}
        assert phases == {0: (INTER_NODE, 2), 1: (GATHER, 0), 2: (REDUCE, 3), 4: (INTER_NODE, 0)}
        assert {line[5] for line in lines if line[0]} == {41}


# What breaks the protocol: file, what stands there, what stands there instead, and options that show it.
BREAKS: dict[str, tuple[str, str, str, dict[str, int]]] = {
    "one buffer": ("operation.h", "parity = int(number & 1);", "parity = 0;", {"protocol": 0}),
    "one buffer to send from": (
        "layout.h",
        "base + uint64_t(parity * slots() + index) * slot",
        "base + uint64_t((index < stage(0) ? parity : 0) * slots() + index) * slot",
        {"protocol": 0, "speed": 0},
    ),
    "half of the flags": (
        "protocol.h",
        "a.flag0 == op.flag && a.flag1 == op.flag && b.flag0 == op.flag && b.flag1 == op.flag",
        "a.flag0 == op.flag && b.flag0 == op.flag",
        {"protocol": 0},
    ),
    "a signal of the operation before": (
        "protocol.h",
        "op.wire.load_signal(sender.signal) >= op.number + 1",
        "op.wire.load_signal(sender.signal) + 2 >= op.number + 1",
        {"protocol": 1},
    ),
    "no barrier before a put": (
        "protocol.h",
        "op.wire.sync();\n    uint64_t begin = uint64_t(chunk.begin) * kWireUnit;\n    op.wire.put(",
        "uint64_t begin = uint64_t(chunk.begin) * kWireUnit;\n    op.wire.put(",
        {"protocol": 0, "threads": 4},
    ),
    "no barrier before a signal in the node": (
        "protocol.h",
        "op.wire.sync();\n    for (int i = op.wire.thread(); i < count; i += op.wire.threads()) {\n      if (uint64_t*",
        "for (int i = op.wire.thread(); i < count; i += op.wire.threads()) {\n      if (uint64_t*",
        {"protocol": 1, "threads": 4},
    ),
    "one slot for all steps": ("layout.h", "return widest + owners + exchange;", "return widest + owners;", {}),
    "the first block advances the number": (
        "operation.h",
        "wire.count(&state->ticket) == uint32_t(wire.blocks()) - 1",
        "wire.count(&state->ticket) == 0",
        {},
    ),
    "no barrier before the epilogue": ("allreduce.h", "    meet(op);\n", "", {"epilogue": 1}),
}
IN_CI = ("one buffer", "one buffer to send from", "half of the flags")


@pytest.mark.parametrize(
    "name", [name if name in IN_CI else pytest.param(name, marks=pytest.mark.full) for name in BREAKS]
)
def test_broken_protocol_is_caught(twin: Path, name: str, tmp_path: Path) -> None:
    """Each condition is needed: without it some schedule gives a wrong sum or never ends; with it that one is right."""
    file, right, wrong, options = BREAKS[name]
    sources = tmp_path / "nvrar"
    shutil.copytree(SOURCES, sources)
    text = (sources / file).read_text()
    assert text.count(right) == 1
    (sources / file).write_text(text.replace(right, wrong))
    broken = build(sources, tmp_path / "twin", "-O0", "-DTWIN_SMALL")
    for seed in range(30):
        for nodes in ("2,2", "1,1,1", "2,2,2,2"):
            trial = {"ops": 150, "seed": seed, "value": 0, "timeout": 3_000_000, **options}
            done = run(broken, nodes, **trial)
            if done.returncode:
                assert re.match(r"operation \d+ on rank \d+: ", done.stdout), done.stderr
                assert run(twin, nodes, **trial).returncode == 0
                return
    pytest.fail("nothing was wrong")


def test_no_peer_pointer_between_nodes() -> None:
    """On one GPU a pointer into another rank's memory passes every test; on a network there is none."""
    text = re.sub(r"//.*", "", (SOURCES / "inter_node.h").read_text())
    assert "Protocol::put" in text
    for forbidden in ("nvshmem_ptr", "peer", "announce"):
        assert forbidden not in text
    wire = (SOURCES / "gpu_transport.cuh").read_text()
    assert "nvshmem_ptr" not in wire
