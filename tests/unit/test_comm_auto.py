"""Tuning tables and the `auto` backend's choice; ranks are threads that communicate over real sockets."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch

from tests.ranks import Memory, run_ranks
from yalis.comm import tuning
from yalis.comm.auto import AutoBackend, AutoGroup
from yalis.comm.hierarchical import HierarchicalBackend, HierarchicalGroup
from yalis.comm.shared_memory import HALF_BYTES
from yalis.comm.topology import Topology
from yalis.comm.torch_dist import GlooGroup
from yalis.comm.tuning import Choice, ShapeTimings, TableKey, Timing, TuningTable
from yalis.errors import YalisError
from yalis.launch.auth import JobKey, Method
from yalis.launch.world import RankInfo, World

CPU = torch.device("cpu")
HERE = TableKey("cpu", tuning.ONE_HOST)
NODES = ((0, 1), (2, 3))
HALVING = Choice("hierarchical", {"inter": "halving", "chunk": 4096})
TUNED = ShapeTimings(
    (
        Timing(1 << 10, Choice("torch"), 100.0),
        Timing(1 << 10, Choice("hierarchical", {"inter": "doubling", "chunk": 1024}), 120.0),
        Timing(1 << 16, Choice("torch"), 900.0),
        Timing(1 << 16, HALVING, 300.0),
        Timing(1 << 16, Choice("hierarchical", {"inter": "direct", "chunk": 4096}), 301.0),
    )
)
T = TypeVar("T")


class ThreadWorld(World):
    """A rank of a world of threads."""

    def __init__(self, comm: Memory, values: list[Any]) -> None:
        members = tuple(RankInfo(rank, "here", 0, rank, "127.0.0.1", 1) for rank in range(comm.size))
        super().__init__(comm.rank, members, key=JobKey(Method.GIVEN, "job", b"0123456789abcdef"))
        self.gate, self.values = comm.board.gate, values

    def all_gather_object(self, value: Any) -> list[Any]:
        self.values[self.rank] = json.loads(json.dumps(value))
        self.gate.wait(30)
        values = list(self.values)
        self.gate.wait(30)
        return values

    def reduce_object(self, value: Any, combine: Callable[[list[Any]], Any]) -> Any:
        return combine(self.all_gather_object(value))


def in_worlds(size: int, function: Callable[[World], T]) -> list[T]:
    values: list[Any] = [None] * size
    return run_ranks(size, lambda rank, comm: function(ThreadWorld(comm, values)))


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("YALIS_CACHE", str(tmp_path))
    return tmp_path / "tuning"


def test_best_choice_at_the_nearest_measured_size() -> None:
    both = {"torch", "hierarchical"}
    assert [TUNED.best(size, both) for size in (1, 1 << 10, 1 << 13)] == [Choice("torch")] * 3
    assert [TUNED.best(size, both) for size in ((1 << 13) + 1, 1 << 16, 1 << 30)] == [HALVING] * 3
    assert TUNED.best(1 << 16, "torch") == Choice("torch")
    assert TUNED.best(1 << 10, {"nvrar"}) is None
    assert ShapeTimings().best(1 << 10, both) is None
    assert TUNED.backends == both
    assert ShapeTimings(TUNED.timings[2:]).backends == {"hierarchical"}
    assert str(HALVING) == "hierarchical inter=halving chunk=4096"


def test_shape_names() -> None:
    assert tuning.shape_of([[0, 1], [2, 3], [4, 5]]) == "3x2"
    assert tuning.shape_of([[0, 1], [2, 3], [4]]) == "2+2+1"
    assert TuningTable({"2x2": TUNED}).for_nodes(NODES) is TUNED
    assert TuningTable({"2x2": TUNED}).for_nodes([[0], [1], [2], [3]]) == ShapeTimings()


def test_save_and_load(cache: Path) -> None:
    assert tuning.load(HERE) == TuningTable()
    path = tuning.save(HERE, NODES, TUNED.timings, "yalis bench allreduce --tune")
    tuning.save(HERE, [[0], [1]], TUNED.timings[:1], "yalis bench allreduce --tune")
    assert path == cache / "cpu-2x2.json"
    assert tuning.load(HERE) == TuningTable({"2x2": TUNED, "2x1": ShapeTimings(TUNED.timings[:1])})
    tuning.save(HERE, NODES, TUNED.timings[1:], "again")
    assert tuning.load(HERE).for_nodes(NODES) == ShapeTimings(TUNED.timings[1:])
    assert [file.name for file in sorted(cache.iterdir())] == ["cpu-2x1.json", "cpu-2x2.json"]


def test_tables_of_other_versions_are_ignored(cache: Path) -> None:
    path = tuning.save(HERE, NODES, TUNED.timings, "")
    path.write_text(path.read_text().replace('"schema_version": 2', '"schema_version": 99'))
    assert tuning.load(HERE) == TuningTable()


def test_a_table_of_ranks_that_share_a_gpu_is_refused_on_a_cluster(caplog: pytest.LogCaptureFixture) -> None:
    shared = TableKey("nvidia-h200", "shared-gpu", "", "3.4.5", "2.27.7", 8)
    cluster = TableKey("nvidia-h200", "ibgda", "8 infiniband", "3.4.5", "2.27.7", 1)
    path = tuning.save(shared, NODES, TUNED.timings, "")
    assert tuning.load(shared) == TuningTable({"2x2": TUNED})
    table = tuning.load(cluster)
    assert table.shapes == {}
    for _ in range(2):
        assert table.for_nodes(NODES) == ShapeTimings()
    (notice,) = (record.getMessage() for record in caplog.records)  # once
    assert notice == (
        f"{path} is not used: it was measured over shared-gpu, not ibgda; run `yalis bench allreduce --tune` here for "
        "fast all-reduces"
    )
    tuning.save(cluster, NODES, TUNED.timings[:1], "")
    assert tuning.load(cluster) == TuningTable({"2x2": ShapeTimings(TUNED.timings[:1])})  # and no notice
    assert tuning.load(shared) == TuningTable({"2x2": TUNED})


@pytest.mark.parametrize(
    ("part", "reason"),
    [
        ({"ranks_per_gpu": 2}, "with ranks per GPU: 1, not 2"),
        ({"nic": "1 infiniband"}, "with the NICs 8 infiniband, not 1 infiniband"),
        ({"nvshmem": "3.5.19"}, "with NVSHMEM 3.4.5, not 3.5.19"),
        ({"nccl": "2.30.1"}, "with NCCL 2.27.7, not 2.30.1"),
        ({"transport": "ibrc", "nic": ""}, "over ibgda, not ibrc"),
        ({"nvshmem": ""}, "with NVSHMEM 3.4.5, not none"),
    ],
)
def test_every_part_of_the_key_counts(part: dict[str, Any], reason: str) -> None:
    measured = TableKey("nvidia-h200", "ibgda", "8 infiniband", "3.4.5", "2.27.7", 1)
    tuning.save(measured, NODES, TUNED.timings, "")
    table = tuning.load(replace(measured, **part))
    assert table.shapes == {}
    assert table.refused["2x2"].endswith(f"it was measured {reason}")


def test_old_tables_are_used_only_on_cpus_of_one_host(cache: Path) -> None:
    cache.mkdir()
    old = {"schema": tuning.SCHEMA, "schema_version": 1, "shape": "2x2", "command": ""}
    timings = [asdict(timing) for timing in TUNED.timings]
    for device in ("cpu", "nvidia-h200"):
        (cache / f"{device}-2x2.json").write_text(json.dumps({**old, "device": device, "timings": timings}))
    assert tuning.load(HERE) == TuningTable({"2x2": TUNED})
    for key in (TableKey("cpu", tuning.TCP), TableKey("nvidia-h200", "shared-gpu", ranks_per_gpu=8)):
        table = tuning.load(key)
        assert table.shapes == {}
        assert "by an older version, which did not record the transport" in table.refused["2x2"]


@pytest.mark.parametrize(
    "contents", ["", "[]", "{}", '{"schema": "yalis-tuning", "schema_version": 1, "device": "cpu"}']
)
def test_invalid_table_is_an_error(cache: Path, contents: str) -> None:
    cache.mkdir()
    (cache / "cpu-2x2.json").write_text(contents)
    with pytest.raises(YalisError, match=r"cpu-2x2.json is not a table .*; remove it, or tune again"):
        tuning.load(HERE)


def test_invalid_timing_is_an_error() -> None:
    tuning.save(HERE, NODES, [Timing(1 << 10, Choice("torch"), 0.0)], "")
    with pytest.raises(YalisError, match="a timing without bytes or time"):
        tuning.load(HERE)


def test_old_name_of_the_inter_node_option_is_accepted() -> None:
    """Tables written before the option was renamed have `between`."""
    path = tuning.save(HERE, NODES, TUNED.timings, "")
    path.write_text(path.read_text().replace('"inter"', '"between"'))
    assert tuning.load(HERE) == TuningTable({"2x2": TUNED})


def test_every_rank_has_the_table_of_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    tuning.save(HERE, NODES, TUNED.timings, "")
    loads: list[TableKey] = []
    load = tuning.load
    monkeypatch.setattr(tuning, "load", lambda key: loads.append(key) or load(key))
    assert in_worlds(3, lambda world: tuning.load_on_all_ranks(world, CPU)) == [TuningTable({"2x2": TUNED})] * 3
    assert loads == [HERE]


def test_auto_defaults_to_hierarchical_on_cpus() -> None:
    def rank(world: World) -> None:
        backend = AutoBackend(world, CPU, Topology((0, 0, 1, 1)))
        group = backend.group("all", range(4))
        assert isinstance(group, AutoGroup)
        assert [group.pick(size) for size in (1, 1 << 30)] == ["hierarchical"] * 2
        for elements in (0, 1, 1001, HALF_BYTES // 4 + 1):
            assert bool((group.all_reduce(torch.full((elements,), float(world.rank))) == 6).all())
        assert group.all_gather(torch.tensor([world.rank])).tolist() == [0, 1, 2, 3]
        half = backend.group(f"half {world.rank // 2}", NODES[world.rank // 2])
        assert half.all_reduce(torch.ones(3)).tolist() == [2, 2, 2]
        group.barrier()
        backend.close()

    in_worlds(4, rank)


def test_auto_follows_the_table() -> None:
    def rank(world: World) -> None:
        backend = AutoBackend(world, CPU, Topology((0, 0, 1, 1)), TuningTable({"2x2": TUNED}))
        group = backend.group("all", range(4))
        assert isinstance(group, AutoGroup)
        assert [group.pick(size) for size in (0, 1 << 13, 1 << 14, 1 << 30)] == ["torch"] * 2 + ["hierarchical"] * 2
        for elements in (1, 20000):
            assert bool((group.all_reduce(torch.ones(elements)) == 4).all())
        group.barrier()
        backend.close()

    in_worlds(4, rank)


def test_auto_skips_backends_that_one_rank_cannot_use(monkeypatch: pytest.MonkeyPatch) -> None:
    unusable = classmethod(lambda cls, world, device: "not available" if world.rank == 1 else None)
    monkeypatch.setattr(HierarchicalBackend, "unusable", unusable)

    def rank(world: World) -> None:
        backend = AutoBackend(world, CPU, Topology((0, 1)))
        group = backend.group("all", range(2))
        assert type(group) is GlooGroup
        group.barrier()
        backend.close()

    in_worlds(2, rank)


def test_hierarchical_takes_its_options_from_the_table() -> None:
    def rank(world: World) -> None:
        backend = HierarchicalBackend(world, CPU, Topology((0, 1, 0, 1)), TuningTable({"2x2": TUNED}))
        group = backend.group("all", [3, 2, 1, 0])
        assert isinstance(group, HierarchicalGroup)
        assert group._options(1 << 10) == ("doubling", 1024)
        assert group._options(1 << 20) == ("halving", 4096)
        for elements in (1, 100, 30000):
            total = group.all_reduce(torch.arange(elements) * 4 + world.rank)
            assert torch.equal(total, torch.arange(elements) * 16 + 6)
        group.barrier()
        backend.close()

    in_worlds(4, rank)
