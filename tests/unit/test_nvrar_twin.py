"""The kernels of csrc/nvrar, run on the CPU with puts that arrive late and in any order. Broken variants must fail."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "csrc" / "nvrar"
TWIN = Path(__file__).with_name("nvrar_twin.cpp")
REDUCE_SCATTER, INTER_NODE, ALL_GATHER = 1, 2, 3

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
    arguments = [f"nodes={nodes}", *(f"{name}={value}" for name, value in options.items())]
    return subprocess.run([twin, *arguments], capture_output=True, text=True, timeout=200)


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(SOURCES, tmp_path_factory.mktemp("twin") / "twin", "-O1")


SHAPES = ["2", "3", "1,1", "2,1", "1,1,1", "2,2", "3,2", "2,2,2", "1,3,2", "4,4", "2,2,2,2", "1,1,1,1,1", "3,3,3,3,3"]
SETTINGS: dict[str, dict[str, int]] = {
    "plain": {},
    "two groups, different block counts": {"groups": 2, "uneven_blocks": 1},
    "epilogue": {"epilogue": 1, "blocks": 3, "threads": 2},
    "sequence numbers beyond 32 bits": {"sequence": 2**32 - 60, "threads": 3, "blocks": 1},
    "ring": {"algorithm": 1},
    "one-shot": {"algorithm": 2},
    "heap in host memory": {"host_heap": 1},
    "lines": {"protocol": 2, "whole": 1, "groups": 2, "uneven_blocks": 1},
    "lines, halving": {"protocol": 2, "whole": 1, "schedule": 1, "threads": 3},
    "halving": {"schedule": 1, "groups": 2, "uneven_blocks": 1, "epilogue": 1},
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_every_rank_has_the_sum(twin: Path, setting: str) -> None:
    """Exact for integers, within rounding error for floats, bitwise equal on all ranks; all dtypes and any size."""
    for seed, nodes in enumerate(SHAPES):
        done = run(twin, nodes, ops=60, seed=seed, **SETTINGS[setting])
        assert done.returncode == 0, f"{nodes} seed={seed}: {done.stdout}{done.stderr}"


def test_one_shot_within_a_node(twin: Path) -> None:
    for seed, nodes in enumerate(("2", "3", "8")):
        done = run(twin, nodes, ops=60, seed=seed, schedule=2, capacity=32768, epilogue=1, groups=2)
        assert done.returncode == 0, f"{nodes}: {done.stdout}"


def test_torn_lines_are_found(twin: Path) -> None:
    """The tear test counts them, and the protocol for lines would be wrong."""
    for nodes in ("1,1", "2,2", "1,1,1", "1,1,1,1"):
        assert run(twin, nodes, tear=30, threads=4, seed=1, whole=1).stdout == "0 torn lines\n"
        torn = int(run(twin, nodes, tear=30, threads=4, seed=1).stdout.split()[0])
        assert torn > 0
        done = run(twin, nodes, ops=60, seed=1, protocol=2, dtype=0, timeout=3_000_000)
        assert re.match(r"operation \d+ on rank \d+: ", done.stdout), done.stderr


# What the protocols demand of a network: LL that the 8 bytes of a word arrive together, put-with-signal that a signal
# arrives after its data, both that nothing arrives twice. Protocol 0 is LL.
@pytest.mark.parametrize(
    ("fault", "broken"), [("torn", {0}), ("early", {1}), ("replay", {0, 1})], ids=["torn", "early", "replay"]
)
@pytest.mark.parametrize("schedule", [0, 1], ids=["doubling", "halving"])
def test_network_faults_are_noticed_where_the_protocol_forbids_them(
    twin: Path, fault: str, broken: set[int], schedule: int
) -> None:
    for protocol in (0, 1):
        options = {"ops": 150, "protocol": protocol, "schedule": schedule, "dtype": 0, "timeout": 3_000_000}
        done = run(twin, "1,1,1,1", seed=1, **{fault: 1}, **options)
        assert (done.returncode != 0) == (protocol in broken), done.stdout
        if done.returncode:
            assert re.match(r"operation \d+ on rank \d+: ", done.stdout), done.stderr


def test_thousands_of_operations(twin: Path) -> None:
    for nodes, count in (("2,2", 3000), ("1,1,1", 3000)):
        done = run(twin, nodes, ops=count, groups=2, seed=5)
        assert done.returncode == 0, done.stdout
        assert int(done.stdout.split()[0]) == count * sum(map(int, nodes.split(",")))


@pytest.mark.full
@pytest.mark.parametrize("setting", SETTINGS)
def test_many_schedules(twin: Path, setting: str) -> None:
    for seed in range(40):
        for nodes in [*SHAPES, "1,1,1,1,1,1,1", "2,1,3,1,1,2"]:
            done = run(twin, nodes, ops=60, seed=100 + seed, **SETTINGS[setting])
            assert done.returncode == 0, f"{nodes} seed={100 + seed}: {done.stdout}"


def test_absent_rank_is_reported(twin: Path) -> None:
    """Rank 3 of 2 + 2 + 1 never runs: every other rank times out and reports the phase and the peer it waited for."""
    for protocol in (0, 1):
        done = run(twin, "2,2,1", ops=1, absent=3, timeout=200_000, seed=3, protocol=protocol, sequence=41)
        lines = [[int(word) for word in line.split()] for line in done.stdout.splitlines()]
        assert [line[0] for line in lines] == [1, 1, 1, 0, 1]
        phases = {rank: (line[2], line[4]) for rank, line in enumerate(lines) if rank != 3}
        assert phases == {0: (INTER_NODE, 2), 1: (ALL_GATHER, 0), 2: (REDUCE_SCATTER, 3), 4: (INTER_NODE, 0)}
        assert {line[5] for line in lines if line[0]} == {41}


# Changes that break the protocol: file, original text, replacement, and options that expose the failure.
BREAKS: dict[str, tuple[str, str, str, dict[str, int]]] = {
    "one buffer": ("operation.h", "parity = int(sequence & 1);", "parity = 0;", {"protocol": 0}),
    "one stage buffer": (
        "layout.h",
        "base + uint64_t(parity * slots() + index) * slot_bytes;",
        "base + uint64_t((index < stage_slot(0) ? parity : 0) * slots() + index) * slot_bytes;",
        {"protocol": 0, "speed": 0},
    ),
    "half of the flags": (
        "protocol.h",
        "a.flag(0) == op.flag && a.flag(1) == op.flag && b.flag(0) == op.flag && b.flag(1) == op.flag",
        "a.flag(0) == op.flag && b.flag(0) == op.flag",
        {"protocol": 0},
    ),
    "a signal of the previous operation": (
        "protocol.h",
        "op.transport.load_signal(sender.signal) >= op.sequence + 1",
        "op.transport.load_signal(sender.signal) + 2 >= op.sequence + 1",
        {"protocol": 1},
    ),
    "no barrier before a put": (
        "protocol.h",
        "op.transport.sync();\n    op.transport.release_sources();\n"
        "    uint64_t begin = uint64_t(chunk.begin) * kSlotPackBytes;\n    op.transport.put(",
        "uint64_t begin = uint64_t(chunk.begin) * kSlotPackBytes;\n    op.transport.put(",
        {"protocol": 0, "threads": 4},
    ),
    "no barrier before an intra-node signal": (
        "protocol.h",
        "op.transport.sync();\n"
        "    for (int i = op.transport.thread(); i < count; i += op.transport.threads()) {\n"
        "      if (uint64_t*",
        "for (int i = op.transport.thread(); i < count; i += op.transport.threads()) {\n      if (uint64_t*",
        {"protocol": 1, "threads": 4},
    ),
    "one slot for all inter-node steps": (
        "layout.h",
        "return reduce_slots + gather_slots + step;",
        "return reduce_slots + gather_slots;",
        {},
    ),
    "the first block advances the sequence number": (
        "operation.h",
        "transport.fetch_increment(&state->blocks_done) == uint32_t(transport.blocks()) - 1",
        "transport.fetch_increment(&state->blocks_done) == 0",
        {},
    ),
    "no system fence before a put": (
        "protocol.h",
        "op.transport.release_sources();\n"
        "    uint64_t begin = uint64_t(chunk.begin) * kSlotPackBytes;\n    uint64_t bytes",
        "uint64_t begin = uint64_t(chunk.begin) * kSlotPackBytes;\n    uint64_t bytes",
        {"host_heap": 1, "protocol": 1},
    ),
    "finished chunks in the slot of the last round": (
        "inter_node.h",
        "if (sent_on) Protocol::write(op, stage_of(begin), batch, packs);",
        "if (sent_on) Protocol::write(op, stage_of(end - 1), batch, packs);",
        {"schedule": 1},
    ),
    "no barrier before the epilogue": ("allreduce.h", "    grid_barrier(op);\n", "", {"epilogue": 1}),
}
IN_CI = ("one buffer", "one stage buffer", "no system fence before a put")


@pytest.mark.parametrize(
    "name", [name if name in IN_CI else pytest.param(name, marks=pytest.mark.full) for name in BREAKS]
)
def test_broken_protocol_fails(twin: Path, name: str, tmp_path: Path) -> None:
    """Every condition is needed: some seed fails or times out without it, and passes with the original code."""
    file, right, wrong, options = BREAKS[name]
    sources = tmp_path / "nvrar"
    shutil.copytree(SOURCES, sources)
    text = (sources / file).read_text()
    assert text.count(right) == 1
    (sources / file).write_text(text.replace(right, wrong))
    broken = build(sources, tmp_path / "twin", "-O0", "-DTWIN_SMALL")
    for seed in range(30):
        for nodes in ("2,2", "1,1,1", "2,2,2,2"):
            trial = {"ops": 150, "seed": seed, "dtype": 0, "timeout": 3_000_000, **options}
            done = run(broken, nodes, **trial)
            if done.returncode:
                assert re.match(r"operation \d+ on rank \d+: ", done.stdout), done.stderr
                assert run(twin, nodes, **trial).returncode == 0
                return
    pytest.fail("no schedule failed")


def test_inter_node_phase_uses_no_peer_pointers() -> None:
    """A pointer into another rank's memory would pass every test on one GPU, but does not exist over a network."""
    text = re.sub(r"//.*", "", (SOURCES / "inter_node.h").read_text())
    assert "Protocol::put" in text
    for forbidden in ("nvshmem_ptr", "peer", "signal_peers"):
        assert forbidden not in text
    transport = (SOURCES / "gpu_transport.cuh").read_text()
    assert "nvshmem_ptr" not in transport
