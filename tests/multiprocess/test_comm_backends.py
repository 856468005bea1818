"""Every communication backend between real processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.system import needs

ROOT = Path(__file__).resolve().parents[2]
CHECKS = [sys.executable, "-m", "tests.multiprocess.comm_checks"]


def run(*command: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)


def mpirun(size: int) -> list[str]:
    if find_spec("mpi4py") is None:
        pytest.skip("mpi4py is not installed (pip install mpi4py)")
    # Over TCP, where unlike in shared memory a message does not move unless its sender helps.
    options = ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "--mca", "btl", "tcp,self"]
    return [needs.program("mpirun"), *options, "--mca", "mpi_yield_when_idle", "1", "-n", str(size)]


@pytest.mark.parametrize("size", [4, pytest.param(2, marks=pytest.mark.full), pytest.param(3, marks=pytest.mark.full)])
@pytest.mark.parametrize("backend", ["torch", "mpi"])
def test_the_whole_contract(backend: str, size: int) -> None:
    launcher = mpirun(size) if backend == "mpi" else []
    done = run(*launcher, *CHECKS, "all", backend, str(size), "cpu")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["backend"] == backend
    assert len(told["checks"]) == size
    assert min(told["checks"]) > 300


@pytest.mark.parametrize("nodes", ["2+2", "2+2+1", pytest.param("1+1+1+1+1+1", marks=pytest.mark.full)])
def test_the_whole_contract_between_nodes(nodes: str) -> None:
    size = sum(map(int, nodes.split("+")))
    done = run(*CHECKS, "all", "hierarchical", str(size), "cpu", nodes)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["backend"] == "hierarchical"
    assert min(told["checks"]) > 300


@pytest.mark.parametrize("backend", ["torch", "hierarchical"])
def test_a_dead_rank_breaks_the_collectives_of_the_others(backend: str) -> None:
    done = run(*CHECKS, "death", backend, "3", "cpu")
    told = json.loads(done.stdout)
    assert told["raised"] == "RuntimeError"
    assert told["after"] < 5
    assert "rank 2" in told["cause"]


def test_mpirun_ends_the_ranks_of_a_dead_one() -> None:
    done = run(*mpirun(3), *CHECKS, "death", "mpi", "3", "cpu")
    assert done.returncode != 0
    assert "rank 2" in done.stderr


def test_mpi_without_mpirun_is_refused_in_one_sentence() -> None:
    if find_spec("mpi4py") is None:
        pytest.skip("mpi4py is not installed (pip install mpi4py)")
    needs.program("mpirun")
    done = run(*CHECKS, "all", "mpi", "2", "cpu")
    assert done.returncode != 0
    assert "mpirun did not start these ranks (type mpirun -n 2 before the same command)" in done.stderr
    assert "usable: torch, hierarchical, auto" in done.stderr
