"""What was measured of all-reduces, and auto's choice by it; ranks are threads that speak over real sockets."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch

from tests.ranks import Memory, run_ranks
from yalis.comm import tuning
from yalis.comm.auto import AutoBackend, AutoGroup
from yalis.comm.hierarchical import HierarchicalBackend, HierarchicalGroup
from yalis.comm.shared_memory import LIMIT
from yalis.comm.topology import Topology
from yalis.comm.torch_dist import GlooGroup
from yalis.comm.tuning import Choice, ShapeTimings, Timing, TuningTable
from yalis.errors import YalisError
from yalis.launch.world import RankInfo, World

CPU = torch.device("cpu")
NODES = ((0, 1), (2, 3))
HALVING = Choice("hierarchical", {"between": "halving", "chunk": 4096})
TUNED = ShapeTimings(
    (
        Timing(1 << 10, Choice("torch"), 100.0),
        Timing(1 << 10, Choice("hierarchical", {"between": "doubling", "chunk": 1024}), 120.0),
        Timing(1 << 16, Choice("torch"), 900.0),
        Timing(1 << 16, HALVING, 300.0),
        Timing(1 << 16, Choice("hierarchical", {"between": "direct", "chunk": 4096}), 301.0),
    )
)
T = TypeVar("T")


class Thread(World):
    """A rank of a world of threads."""

    def __init__(self, comm: Memory, told: list[Any]) -> None:
        super().__init__(comm.rank, tuple(RankInfo(rank, "here", 0, rank, "127.0.0.1", 1) for rank in range(comm.size)))
        self.gate, self.told = comm.board.gate, told

    def all_gather_object(self, value: Any) -> list[Any]:
        self.told[self.rank] = json.loads(json.dumps(value))
        self.gate.wait(30)
        told = list(self.told)
        self.gate.wait(30)
        return told


def in_worlds(size: int, function: Callable[[World], T]) -> list[T]:
    told: list[Any] = [None] * size
    return run_ranks(size, lambda rank, comm: function(Thread(comm, told)))


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("YALIS_CACHE", str(tmp_path))
    return tmp_path / "tuning"


def test_the_best_of_the_nearest_size() -> None:
    both = {"torch", "hierarchical"}
    assert [TUNED.best(size, both) for size in (1, 1 << 10, 1 << 13)] == [Choice("torch")] * 3
    assert [TUNED.best(size, both) for size in ((1 << 13) + 1, 1 << 16, 1 << 30)] == [HALVING] * 3
    assert TUNED.best(1 << 16, "torch") == Choice("torch")
    assert TUNED.best(1 << 10, {"nvrar"}) is None
    assert ShapeTimings().best(1 << 10, both) is None
    assert TUNED.backends == both
    assert ShapeTimings(TUNED.timings[2:]).backends == {"hierarchical"}
    assert str(HALVING) == "hierarchical between=halving chunk=4096"


def test_shapes_have_names() -> None:
    assert tuning.shape_of([[0, 1], [2, 3], [4, 5]]) == "3x2"
    assert tuning.shape_of([[0, 1], [2, 3], [4]]) == "2+2+1"
    assert TuningTable({"2x2": TUNED}).for_nodes(NODES) is TUNED
    assert TuningTable({"2x2": TUNED}).for_nodes([[0], [1], [2], [3]]) == ShapeTimings()


def test_a_table_comes_back_as_it_was_saved(cache: Path) -> None:
    assert tuning.load(CPU) == TuningTable()
    path = tuning.save(CPU, NODES, TUNED.timings, "yalis bench allreduce --tune")
    tuning.save(CPU, [[0], [1]], TUNED.timings[:1], "yalis bench allreduce --tune")
    assert path == cache / "cpu-2x2.json"
    assert tuning.load(CPU) == TuningTable({"2x2": TUNED, "2x1": ShapeTimings(TUNED.timings[:1])})
    tuning.save(CPU, NODES, TUNED.timings[1:], "again")
    assert tuning.load(CPU).for_nodes(NODES) == ShapeTimings(TUNED.timings[1:])
    assert [file.name for file in sorted(cache.iterdir())] == ["cpu-2x1.json", "cpu-2x2.json"]


def test_tables_of_other_versions_are_left_alone(cache: Path) -> None:
    path = tuning.save(CPU, NODES, TUNED.timings, "")
    path.write_text(path.read_text().replace('"schema_version": 1', '"schema_version": 99'))
    assert tuning.load(CPU) == TuningTable()


@pytest.mark.parametrize("held", ["", "[]", "{}", '{"schema": "yalis-tuning", "schema_version": 1, "device": "cpu"}'])
def test_a_broken_table_is_refused_in_one_sentence(cache: Path, held: str) -> None:
    cache.mkdir()
    (cache / "cpu-2x2.json").write_text(held)
    with pytest.raises(YalisError, match=r"cpu-2x2.json is not a table .*; remove it, or tune again"):
        tuning.load(CPU)


def test_a_timing_that_cannot_be_is_refused() -> None:
    tuning.save(CPU, NODES, [Timing(1 << 10, Choice("torch"), 0.0)], "")
    with pytest.raises(YalisError, match="a timing without bytes or time"):
        tuning.load(CPU)


def test_every_rank_has_the_table_of_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    tuning.save(CPU, NODES, TUNED.timings, "")
    loads: list[torch.device] = []
    load = tuning.load
    monkeypatch.setattr(tuning, "load", lambda device: loads.append(device) or load(device))
    assert in_worlds(3, lambda world: tuning.load_on_all_ranks(world, CPU)) == [TuningTable({"2x2": TUNED})] * 3
    assert loads == [CPU]


def test_auto_without_a_table_is_hierarchical_between_cpus() -> None:
    def rank(world: World) -> None:
        backend = AutoBackend(world, CPU, Topology((0, 0, 1, 1)))
        group = backend.group("all", range(4))
        assert isinstance(group, AutoGroup)
        assert [group.pick(size) for size in (1, 1 << 30)] == ["hierarchical"] * 2
        for elements in (0, 1, 1001, LIMIT // 4 + 1):
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


def test_auto_goes_without_what_one_rank_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    lacks = classmethod(lambda cls, world, device: "no such thing here" if world.rank == 1 else None)
    monkeypatch.setattr(HierarchicalBackend, "unusable", lacks)

    def rank(world: World) -> None:
        backend = AutoBackend(world, CPU, Topology((0, 1)))
        group = backend.group("all", range(2))
        assert type(group) is GlooGroup
        group.barrier()
        backend.close()

    in_worlds(2, rank)


def test_hierarchical_asks_the_table_how() -> None:
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
