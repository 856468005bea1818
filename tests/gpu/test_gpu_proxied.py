"""nvrar over NVSHMEM's proxied path: ranks of one GPU under MPS, connected by csrc/test_transport."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.gpu.proxied import build_plugin, environment, read_counts
from tests.mps import Mps

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)
if shutil.which("g++") is None:
    pytest.skip("needs g++", allow_module_level=True)

from tests.gpu.test_gpu_nvrar import JOB, OPS, parse_outcome, run
from tests.gpu.test_gpu_ranks import ON_GPU, compare
from tests.multiprocess.test_splits import Models

DISORDER = {"REORDER": 1, "DELAY_US": 5, "JITTER_US": 20, "HOLD_US": 10}
#: A proxied operation takes tens of microseconds and the plugin's copies more, so a storm is long.
LIMIT, PATIENCE = 580, {"YALIS_NVRAR_TIMEOUT": "60", "YALIS_NVRAR_ARENA": "400"}


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_plugin(tmp_path_factory.mktemp("plugin"))


@pytest.mark.parametrize("nodes", ["1+1", "1+1+1", "1+1+1+1"])
def test_storms_with_delay_and_reordering(mps: Mps, plugin: Path, nodes: str, tmp_path: Path) -> None:
    """No wrong bit and no hang while puts overtake each other and their sources are read late."""
    variables = environment(plugin, tmp_path, **DISORDER)
    outcome = parse_outcome(run(mps, *JOB, "stress", nodes, f"ops={OPS}", timeout=LIMIT, **variables, **PATIENCE))
    expected = {"ops": OPS, "wrong": 0, "identical": True}
    assert outcome == {"eager": expected, "graphs": expected}
    counts = read_counts(tmp_path)
    assert len(counts) == len(nodes.split("+"))
    assert min(count["puts"] for count in counts) > OPS
    assert min(count["atomics"] for count in counts) > OPS // 4  # signals
    assert min(count["overtaken"] for count in counts) > 0


@pytest.mark.parametrize("settings", [DISORDER, {"IN_ORDER": 1}], ids=["reordered", "in order"])
def test_a_heap_in_host_memory(mps: Mps, plugin: Path, settings: dict[str, int], tmp_path: Path) -> None:
    """Without a fence of system scope before a put, the proxy reads what was staged two operations earlier."""
    variables = {**environment(plugin, tmp_path, **settings), "NVSHMEM_HEAP_KIND": "SYSMEM"}
    job = run(mps, *JOB, "small", "1+1+1+1", f"ops={min(OPS, 1000)}", timeout=LIMIT, **variables, **PATIENCE)
    assert parse_outcome(job) == {"wrong": 0, "identical": True}


@pytest.mark.parametrize("nodes", ["2+2", "2+2+2"])
def test_two_ranks_a_node(mps: Mps, plugin: Path, nodes: str, tmp_path: Path) -> None:
    """Stores within a node, proxied puts between nodes."""
    variables = environment(plugin, tmp_path, ranks_per_node=2, **DISORDER)
    job = run(mps, *JOB, "small", nodes, f"ops={min(OPS, 2000)}", timeout=LIMIT, **variables, **PATIENCE)
    if job.returncode and "NVSHMEM did not start" in job.stderr + job.stdout:
        pytest.xfail(f"NVSHMEM does not start with emulated nodes: {job.stderr[-500:]}")
    assert parse_outcome(job) == {"wrong": 0, "identical": True}
    assert min(count["puts"] for count in read_counts(tmp_path)) > 0


def test_puts_per_operation(mps: Mps, plugin: Path, tmp_path: Path) -> None:
    """LL without a table: one put per 64 KB of the shard, and no signals."""
    outcome = parse_outcome(run(mps, *JOB, "puts", "1+1", "ops=100", **environment(plugin, tmp_path), **PATIENCE))
    assert outcome["protocol"] == "ll"
    expected = outcome["expected"]
    assert expected == 100 * 16
    for count in read_counts(tmp_path):
        assert expected <= count["puts"] < expected + 200  # NVSHMEM's own are few
        assert count["atomics"] < 200


def test_ll_is_ahead_where_operations_are_slow(mps: Mps, plugin: Path, tmp_path: Path) -> None:
    """A put-with-signal is two operations and waits in the proxy thread between them."""
    variables = environment(plugin, tmp_path, OPERATION_US=20)
    medians = parse_outcome(run(mps, *JOB, "protocols", "1+1", **variables, **PATIENCE))
    print(f"\n20 us per operation: {medians}")
    assert medians["ll"] < medians["signal"]  # type: ignore[operator]


@pytest.mark.parametrize(("ranks", "splits"), [(2, [2]), (4, [4])])
def test_tokens(tmp_path_factory, mps, plugin, ranks, splits, tmp_path):
    counts = tmp_path / "counts"
    counts.mkdir()
    proxied = SimpleNamespace(environment={**mps.environment, **environment(plugin, counts, **DISORDER)})
    models = Models(tmp_path_factory.mktemp("wide"), ON_GPU)
    fields = {"allreduce": "nvrar", "ranks_per_node": 1}
    trials = [("llama3-gqa4", fields), ("llama-bias-linear", {**fields, "eager": True})]
    compare(models, proxied, tmp_path, trials, ranks, [{"tp": tp} for tp in splits])
    assert min(count["puts"] for count in read_counts(counts)) > 0


@pytest.mark.parametrize(("how", "timeout"), [(0, 60), (1, 6)])
def test_dead_or_hanging_rank(mps: Mps, plugin: Path, how: int, timeout: int, tmp_path: Path) -> None:
    variables = {**environment(plugin, tmp_path, **DISORDER), "YALIS_NVRAR_TIMEOUT": str(timeout)}
    try:
        done = run(mps, *JOB, "leave", "1+1+1", f"how={how}", timeout=150, **variables)
        ended = time.time()
    finally:
        mps.stop()
        mps.start()
    assert done.returncode != 0
    left = next(json.loads(line)["left"] for line in done.stderr.splitlines() if line.startswith('{"left"'))
    assert "rank 2" in done.stderr, done.stderr
    assert ended - left < timeout + 30
