"""nvrar between ranks that share one GPU under MPS, on logical nodes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.mps import Mps
from tests.multiprocess.test_comm_backends import CHECKS

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from yalis.comm.nvrar import build

if build.missing() is not None:
    pytest.skip(f"nvrar cannot be built here: {build.missing()}", allow_module_level=True)

ROOT = Path(__file__).resolve().parents[2]
JOB = [sys.executable, "-m", "tests.gpu.nvrar_job"]
SHAPES = ["1+1", "2+2", "1+1+1+1", "2+2+2+2", "4+4", "1+1+1+1+1+1+1+1", "1+1+1", "2+2+2", "2+1"]
# For a quick run: YALIS_NVRAR_OPS=2000.
OPS = int(os.environ.get("YALIS_NVRAR_OPS", "20000"))


def run(mps: Mps | None, *command: str, timeout: float = 200, **extra: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **(mps.environment if mps else {}), **extra}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout)


def parse_outcome(done: subprocess.CompletedProcess[str]) -> dict[str, object]:
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    outcome: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return outcome


@pytest.mark.parametrize("nodes", ["1+1", "2+2", "2+1", "1+1+1"])
def test_all_collectives(mps: Mps, nodes: str) -> None:
    size = sum(map(int, nodes.split("+")))
    outcome = parse_outcome(run(mps, *CHECKS, "all", "nvrar", str(size), "cuda:0", nodes))
    assert min(outcome["checks"]) > 300  # type: ignore[call-overload]


@pytest.mark.parametrize("nodes", SHAPES)
def test_operations_back_to_back(mps: Mps, nodes: str) -> None:
    """Random sizes, dtypes, launch parameters and delays, two groups, a concurrent matmul: no wrong bit."""
    stress = (*JOB, "stress", nodes, f"ops={OPS}")
    flags = "-DNVRAR_JITTER"
    outcome = parse_outcome(
        run(mps, *stress, YALIS_NVRAR_FLAGS=flags, YALIS_NVRAR_TIMEOUT="60", YALIS_NVRAR_ARENA="400")
    )
    expected = {"ops": OPS, "wrong": 0, "identical": True}
    assert outcome == {"eager": expected, "graphs": expected}


@pytest.mark.parametrize("proxy", [False, True])
def test_sessions_one_after_another(mps: Mps, proxy: bool) -> None:
    """With NVSHMEM's proxy thread, which a network needs, the content of freed pinned memory must not matter."""
    job = run(
        mps, *JOB, "small", "2+1", "ops=50", "times=3", "dirty=1",
        **({"NVSHMEM_DISABLE_LOCAL_ONLY_PROXY": "0"} if proxy else {}),
    )  # fmt: skip
    assert parse_outcome(job) == {"wrong": 0, "identical": True}


@pytest.mark.parametrize("nodes", ["2+2", "1+1+1"])
def test_fused_residual_and_norm(mps: Mps, nodes: str) -> None:
    """Within rounding error of plain torch, and with the bits of separate kernels."""
    outcome = parse_outcome(run(mps, *JOB, "norm", nodes))
    assert outcome["identical"]
    assert outcome["worst_ulps"] < 3  # type: ignore[operator]
    assert outcome["fused"] > 0  # type: ignore[operator]


def test_graph_captures_very_long_messages(mps: Mps) -> None:
    assert parse_outcome(run(mps, *JOB, "long", "1+1")) == {"eager": True, "captured": True}


def test_torch_compile_keeps_one_node(mps: Mps) -> None:
    outcome = parse_outcome(run(mps, *JOB, "compiled", "1+1"))
    assert any("yalis.all_reduce_" in name for name in outcome["nodes"])  # type: ignore[attr-defined]
    assert outcome["eager"]
    assert outcome["compiled"]


@pytest.mark.parametrize("overrun", [0, 1])
def test_memcheck_is_clean(overrun: int) -> None:
    """With `overrun`, memcheck must find the write past the output. Only nvrar's kernels are checked.

    compute-sanitizer does not run under MPS. Without MPS the ranks time-slice the GPU, so this test is small.
    """
    sanitizer = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not Path(sanitizer).exists():
        pytest.skip("needs compute-sanitizer")
    kernel_filter = "--kernel-name" if "--kernel-name" in run(None, sanitizer, "--help").stdout else "--kernel-regex"
    kernels_only = ["--report-api-errors", "no"]  # NCCL makes calls that may fail
    memcheck = [sanitizer, "--tool", "memcheck", "--target-processes", "all", "--error-exitcode", "9", *kernels_only]
    memcheck += [kernel_filter, "kns=nvrar"]
    uncached = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}  # a tensor then ends where its allocation ends
    done = run(None, *memcheck, *JOB, "small", "1+1", "ops=20", f"overrun={overrun}", timeout=400, **uncached)
    output = done.stdout[-4000:] + done.stderr[-2000:]
    if overrun:  # in rank 1, a child process of rank 0
        assert "Invalid __global__ write" in done.stdout, output
        assert done.returncode != 0, output
        return
    assert done.returncode == 0, output
    assert "Invalid" not in done.stdout, output
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    assert json.loads(lines[-1]) == {"wrong": 0, "identical": True}


@pytest.mark.parametrize(("how", "timeout"), [(0, 60), (1, 4)])
def test_dead_or_hanging_rank_is_reported(mps: Mps, how: int, timeout: int) -> None:
    """The liveness check finds a killed rank and ends all device waits. A hanging rank makes a wait time out."""
    try:
        done = run(mps, *JOB, "leave", "1+1+1", f"how={how}", timeout=100, YALIS_NVRAR_TIMEOUT=str(timeout))
        ended = time.time()
    finally:
        mps.stop()  # MPS clients are in an undefined state after one of them was killed
        mps.start()
    assert done.returncode not in (0, None)
    left = next(json.loads(line)["left"] for line in done.stderr.splitlines() if line.startswith('{"left"'))
    assert "rank 2" in done.stderr, done.stderr
    if how == 1:
        assert "s in the all-reduce of group all" in done.stderr
        assert "phase inter-node exchange" in done.stderr
    assert ended - left < timeout + 20
