"""All collectives of each communication backend between ranks that share one GPU."""

from __future__ import annotations

import json

import pytest
import torch

from tests.multiprocess.test_comm_backends import CHECKS, mpirun, run

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("backend", ["torch", "mpi"])
def test_all_collectives(backend: str, size: int) -> None:
    launcher = mpirun(size) if backend == "mpi" else []
    done = run(*launcher, *CHECKS, "all", backend, str(size), "cuda:0")
    assert done.returncode == 0, done.stderr
    assert min(json.loads(done.stdout)["checks"]) > 300


@pytest.mark.parametrize("nodes", ["1+1", "2+2", "2+1"])
def test_all_collectives_over_several_nodes(nodes: str) -> None:
    size = sum(map(int, nodes.split("+")))
    done = run(*CHECKS, "all", "hierarchical", str(size), "cuda:0", nodes)
    assert done.returncode == 0, done.stderr
    assert min(json.loads(done.stdout)["checks"]) > 300
