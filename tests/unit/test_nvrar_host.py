"""The host side of nvrar without a GPU: missing requirements, the build, launch parameters and the C interface."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from yalis.comm.nvrar import build
from yalis.comm.nvrar.group import NvrarBackend, NvrarGroup, Session
from yalis.comm.nvrar.launch_config import LaunchConfig, candidate_launches, candidate_schedules, choose_launch
from yalis.comm.nvrar.library import _SIGNATURES, PHASES, Library, Status, int32s
from yalis.comm.tuning import Choice
from yalis.errors import YalisError, YalisFailure
from yalis.launch.world import World

SOURCES = Path(__file__).parents[2] / "csrc" / "nvrar"


def test_missing_gpu_is_reported_first(monkeypatch: pytest.MonkeyPatch) -> None:
    no_gpu = "nvrar needs NVIDIA GPUs, and torch finds none"
    for reason, message in ((None, no_gpu), ("nvcc not found", f"{no_gpu}; also, nvcc not found")):
        monkeypatch.setattr("yalis.comm.nvrar.group.missing", lambda reason=reason: reason)
        assert NvrarBackend.unusable(World.single_process(), torch.device("cpu")) == message


def test_missing_requirements_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert build.missing() == "nvcc not found; install the CUDA toolkit or set CUDA_HOME"
    with pytest.raises(YalisFailure, match="nvcc not found"):
        build.build("90")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvcc").touch()
    monkeypatch.setenv("NVSHMEM_HOME", str(tmp_path))
    assert re.match(
        r"NVSHMEM not found; run pip install nvidia-nvshmem-cu\d+ or set NVSHMEM_HOME", build.missing() or ""
    )
    (tmp_path / "include").mkdir()
    (tmp_path / "include" / "nvshmem.h").touch()
    assert build.missing() is None
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libnvshmem_host.so.3").touch()
    with pytest.raises(YalisFailure, match="did not run"):  # an empty file is no compiler
        build.build("90")


def test_compiler_errors_are_quoted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for folder in ("bin", "include", "lib"):
        (tmp_path / folder).mkdir()
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && exit 0\necho "launch.cu(1): error: no such thing" >&2\nexit 2\n'
    )
    nvcc.chmod(0o755)
    (tmp_path / "include" / "nvshmem.h").touch()
    (tmp_path / "lib" / "libnvshmem_host.so.3").touch()
    for name in ("CUDA_HOME", "NVSHMEM_HOME", "YALIS_CACHE"):
        monkeypatch.setenv(name, str(tmp_path))
    with pytest.raises(YalisFailure, match=r"nvcc: launch.cu\(1\): error: no such thing"):
        build.build("90")
    assert not list((tmp_path / "nvrar").iterdir())
    # A successful build is cached under a name that depends on the architecture.
    nvcc.write_text('#!/bin/sh\n[ "$1" = --version ] && exit 0\nwhile [ "$1" != -o ]; do shift; done; echo > "$2"\n')
    first = build.build("90")
    assert first.exists()
    assert build.build("80") != first
    nvcc.write_text('#!/bin/sh\n[ "$1" = --version ] && exit 0\nexit 2\n')
    assert build.build("90") == first


def test_launch_parameters() -> None:
    small = choose_launch(None, 1, 2, 8)
    assert (small.protocol, small.blocks, small.chunk) == ("ll", 1, 1)
    assert choose_launch(None, 128 << 10, 2, 64).blocks == 8
    shared, alone = choose_launch(None, 1 << 20, 1, 8), choose_launch(None, 1 << 20, 1, 66)
    assert (shared.protocol, shared.blocks, alone.blocks) == ("signal", 8, 32)
    assert shared.chunk == alone.chunk  # the same on ranks with different block limits
    tuned = choose_launch(Choice("nvrar", {"protocol": "signal", "blocks": 4, "chunk": 4096}), 1 << 10, 2, 8)
    assert (tuned.protocol, tuned.blocks, tuned.chunk) == ("signal", 4, 4096)
    for wrong in ({"protocol": "fast"}, {"blocks": 0}, {"chunk": "many"}):
        with pytest.raises(YalisError, match="--tune again"):
            choose_launch(Choice("nvrar", wrong), 1 << 10, 2, 8)
    for size in (1 << 10, 32 << 10, 128 << 10, 1 << 20, 16 << 20):
        for num_shards in (1, 2, 8):
            launches = [
                choose_launch(Choice("nvrar", options), size, num_shards, 8)
                for options in candidate_launches(size, num_shards, 8)
            ]
            assert launches
            assert len(set(launches)) == len(launches), f"{size} bytes in {num_shards} shards: a duplicate candidate"


def test_schedules() -> None:
    """Defaults are unchanged; a table may choose another schedule, but only one that the group's nodes allow."""
    assert choose_launch(None, 1 << 20, 1, 64, nodes=4).schedule == "doubling"
    assert choose_launch(None, 1 << 20, 4, 64, nodes=1).schedule == "two-shot"
    halving = choose_launch(Choice("nvrar", {"schedule": "halving", "blocks": 2}), 64 << 10, 1, 64, nodes=7)
    assert halving.chunk == 16 << 10, "each of 4 nodes finishes a chunk"
    one_shot = choose_launch(Choice("nvrar", {"schedule": "one-shot"}), 64 << 10, 4, 64, nodes=1)
    assert one_shot.blocks == 8, "every rank reduces the whole message"
    with pytest.raises(YalisError, match="schedule='halving' for 1 node; accepted: two-shot or one-shot"):
        choose_launch(Choice("nvrar", {"schedule": "halving"}), 1 << 10, 1, 8, nodes=1)
    assert candidate_schedules(1 << 20, 1, 2) == ("doubling",), "with two nodes halving sends the same bytes"
    assert candidate_schedules(1 << 20, 1, 3) == ("doubling", "halving")
    assert candidate_schedules(64 << 10, 8, 1) == ("two-shot", "one-shot")
    assert candidate_schedules(1 << 20, 8, 1) == ("two-shot",), "an input does not fit into the slot of a shard"


def test_which_sums_are_fused_with_the_norm() -> None:
    group: Any = object.__new__(NvrarGroup)
    group._session, group._num_shards = SimpleNamespace(max_blocks=16), 2
    group._launch = lambda size: choose_launch(None, size, 2, 16)

    def launch(rows: int, width: int = 2048, weight: torch.dtype = torch.bfloat16) -> LaunchConfig | None:
        x = torch.empty(rows, width, dtype=torch.bfloat16, device="meta")
        config: LaunchConfig | None = group._norm_launch(x, x, torch.empty(width, dtype=weight, device="meta"))
        return config

    plain, fused = choose_launch(None, 4096, 2, 16), launch(1)
    assert fused == plain
    many = launch(16)
    assert many is not None
    assert many.blocks == 16, "a row for each block"
    assert many.chunk == choose_launch(None, 16 * 4096, 2, 16).chunk, "ranks with other limits use the same chunk"
    assert launch(32) is not None
    assert launch(33) is None, "blocks would norm more than two rows"
    assert launch(1, weight=torch.float32) is not None
    assert launch(1, weight=torch.float16) is None
    assert launch(8, width=1 << 17) is not None
    assert launch(16, width=1 << 18) is None, "more than one operation"


def test_timeout_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("YALIS_NVRAR_TIMEOUT", "30")
    session = object.__new__(Session)
    session.world, session.group_names = World.single_process(), {3: "tp"}
    session.status = Status(reported=1, group=3, phase=2, step=1, peer=0, sequence=4711)
    name = session.world.name(0)
    assert session.describe_timeout() == (
        f"waited 30 s in the all-reduce of group tp for {name}: phase inter-node exchange, step 1, operation 4711"
    )
    monkeypatch.setenv("YALIS_NVRAR_TIMEOUT", "soon")
    with pytest.raises(YalisError, match="YALIS_NVRAR_TIMEOUT is 'soon'; accepted: a number above 0"):
        session.describe_timeout()


def test_python_bindings_match_the_c_interface() -> None:
    """Every bound function exists with the same number of arguments, and Status has the same fields."""
    source = (SOURCES / "launch.cu").read_text()
    exported = source[source.index('extern "C" {') :]
    for name, (_, arguments) in _SIGNATURES.items():
        found = re.search(rf"\bnvrar_{name}\(([^)]*)\) \{{", exported)
        assert found, name
        assert len([part for part in found[1].split(",") if part.strip()]) == len(arguments), name
    layout = (SOURCES / "layout.h").read_text()
    status = re.search(r"struct Status \{(.*?)\n\};", layout, re.DOTALL)
    assert status
    fields = re.findall(r"\buint(32|64)_t ([\w, ]+);", status[1])
    assert [(name, bits) for bits, names in fields for name in names.split(", ")] == [
        (name, str(8 * ctypes.sizeof(ctype))) for name, ctype in Status._fields_
    ]
    assert len(PHASES) == len(re.findall(r"k\w+ = \d", re.search(r"enum Phase.*", layout)[0]))  # type: ignore[index]


@pytest.mark.full
@pytest.mark.skipif(build.missing() is not None, reason=f"cannot be built here: {build.missing()}")
def test_library_builds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("YALIS_CACHE", str(tmp_path))
    library = Library(build.build("90"))
    assert library.call("unique_id_bytes") == 128
    four_by_two = int32s([0, 0, 1, 1, 2, 2, 3, 3])
    assert library.call("group_bytes", four_by_two, 8, 0, 1 << 20, 0) > 8 * 2 * (1 << 20)
