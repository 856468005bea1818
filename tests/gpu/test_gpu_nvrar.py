"""nvrar between ranks that share one GPU under MPS, with logical nodes."""

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
# For a first look: YALIS_NVRAR_OPS=2000.
OPS = int(os.environ.get("YALIS_NVRAR_OPS", "20000"))


def run(mps: Mps | None, *command: str, timeout: float = 200, **extra: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **(mps.environment if mps else {}), **extra}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout)


def told(done: subprocess.CompletedProcess[str]) -> dict[str, object]:
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    answer: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return answer


@pytest.mark.parametrize("nodes", ["1+1", "2+2", "2+1", "1+1+1"])
def test_the_whole_contract(mps: Mps, nodes: str) -> None:
    size = sum(map(int, nodes.split("+")))
    answer = told(run(mps, *CHECKS, "all", "nvrar", str(size), "cuda:0", nodes))
    assert min(answer["checks"]) > 300  # type: ignore[call-overload]


@pytest.mark.parametrize("nodes", SHAPES)
def test_operations_back_to_back(mps: Mps, nodes: str) -> None:
    """Random sizes, types, launches, delays before and inside operations, two groups, a matmul beside: no wrong bit."""
    storms = (*JOB, "storms", nodes, f"ops={OPS}")
    flags = "-DNVRAR_JITTER"
    answer = told(run(mps, *storms, YALIS_NVRAR_FLAGS=flags, YALIS_NVRAR_TIMEOUT="60", YALIS_NVRAR_ARENA="400"))
    right = {"ops": OPS, "wrong": 0, "alike": True}
    assert answer == {"eager": right, "graphs": right}


def test_one_engine_after_another(mps: Mps) -> None:
    assert told(run(mps, *JOB, "small", "2+1", "ops=50", "times=3")) == {"wrong": 0, "alike": True}


@pytest.mark.parametrize("nodes", ["2+2", "1+1+1"])
def test_residual_and_norm_in_the_same_kernel(mps: Mps, nodes: str) -> None:
    answer = told(run(mps, *JOB, "norm", nodes))
    assert answer["alike"]
    assert answer["worst_ulps"] < 3  # type: ignore[operator]


def test_a_graph_holds_very_long_sums(mps: Mps) -> None:
    assert told(run(mps, *JOB, "long", "1+1")) == {"eager": True, "captured": True}


def test_compile_keeps_the_operation(mps: Mps) -> None:
    answer = told(run(mps, *JOB, "compiled", "1+1"))
    assert any("yalis.all_reduce_" in name for name in answer["nodes"])  # type: ignore[attr-defined]
    assert answer["eager"]
    assert answer["compiled"]


@pytest.mark.parametrize("overrun", [0, 1])
def test_memcheck_is_clean(overrun: int) -> None:
    """And is not where an operation writes past its output: nvrar's kernels, and only they, are watched.

    Without MPS, under which compute-sanitizer does not run: ranks take turns, so this is small.
    """
    sanitizer = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not Path(sanitizer).exists():
        pytest.skip("needs compute-sanitizer")
    chosen = "--kernel-name" if "--kernel-name" in run(None, sanitizer, "--help").stdout else "--kernel-regex"
    of_kernels = ["--report-api-errors", "no"]  # NCCL tries calls that may fail
    watched = [sanitizer, "--tool", "memcheck", "--target-processes", "all", "--error-exitcode", "9", *of_kernels]
    watched += [chosen, "kns=nvrar"]
    apart = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}  # so that a tensor's end is an allocation's
    done = run(None, *watched, *JOB, "small", "1+1", "ops=20", f"overrun={overrun}", timeout=400, **apart)
    told = done.stdout[-4000:] + done.stderr[-2000:]
    if overrun:  # in rank 1, which rank 0 started
        assert "Invalid __global__ write" in done.stdout, told
        assert done.returncode != 0, told
        return
    assert done.returncode == 0, told
    assert "Invalid" not in done.stdout, told
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    assert json.loads(lines[-1]) == {"wrong": 0, "alike": True}


@pytest.mark.parametrize(("how", "patience"), [(0, 60), (1, 4)])
def test_a_rank_that_leaves_is_reported(mps: Mps, how: int, patience: int) -> None:
    """Killed: the watch hears of it and the device's waits end. Standing still: a wait times out and says where."""
    try:
        done = run(mps, *JOB, "leave", "1+1+1", f"how={how}", timeout=100, YALIS_NVRAR_TIMEOUT=str(patience))
        ended = time.time()
    finally:
        mps.stop()  # what a killed process had in flight leaves the others of its daemon undefined
        mps.start()
    assert done.returncode not in (0, None)
    left = next(json.loads(line)["left"] for line in done.stderr.splitlines() if line.startswith('{"left"'))
    assert "rank 2" in done.stderr, done.stderr
    if how == 1:
        assert "s in the all-reduce of group all" in done.stderr
        assert "phase between nodes" in done.stderr
    assert ended - left < patience + 20
