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
    # Over TCP, where, unlike in shared memory, a message progresses only if its sender makes MPI calls.
    options = ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "--mca", "btl", "tcp,self"]
    return [needs.program("mpirun"), *options, "--mca", "mpi_yield_when_idle", "1", "-n", str(size)]


@pytest.mark.parametrize("size", [4, pytest.param(2, marks=pytest.mark.full), pytest.param(3, marks=pytest.mark.full)])
@pytest.mark.parametrize("backend", ["torch", "mpi"])
def test_all_collectives(backend: str, size: int) -> None:
    launcher = mpirun(size) if backend == "mpi" else []
    done = run(*launcher, *CHECKS, "all", backend, str(size), "cpu")
    assert done.returncode == 0, done.stderr
    outcome = json.loads(done.stdout)
    assert outcome["backend"] == backend
    assert len(outcome["checks"]) == size
    assert min(outcome["checks"]) > 300


@pytest.mark.parametrize("nodes", ["2+2", "2+2+1", pytest.param("1+1+1+1+1+1", marks=pytest.mark.full)])
def test_all_collectives_over_several_nodes(nodes: str) -> None:
    size = sum(map(int, nodes.split("+")))
    done = run(*CHECKS, "all", "hierarchical", str(size), "cpu", nodes)
    assert done.returncode == 0, done.stderr
    outcome = json.loads(done.stdout)
    assert outcome["backend"] == "hierarchical"
    assert min(outcome["checks"]) > 300


@pytest.mark.parametrize("backend", ["torch", "hierarchical"])
def test_dead_rank_fails_the_collectives_of_the_others(backend: str) -> None:
    done = run(*CHECKS, "death", backend, "3", "cpu")
    outcome = json.loads(done.stdout)
    assert outcome["raised"] == "PeerLost"
    assert outcome["after"] < 5
    assert "rank 2" in outcome["cause"]


def test_mpirun_terminates_the_job_of_a_dead_rank() -> None:
    done = run(*mpirun(3), *CHECKS, "death", "mpi", "3", "cpu")
    assert done.returncode != 0
    assert "rank 2" in done.stderr


def test_mpi_backend_without_mpirun_is_an_error() -> None:
    if find_spec("mpi4py") is None:
        pytest.skip("mpi4py is not installed (pip install mpi4py)")
    needs.program("mpirun")
    done = run(*CHECKS, "all", "mpi", "2", "cpu")
    assert done.returncode != 0
    assert "mpirun did not start these ranks (type mpirun -n 2 before the same command)" in done.stderr
    assert "usable: torch, hierarchical, auto" in done.stderr
