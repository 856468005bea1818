"""Topology: which ranks share a node."""

from __future__ import annotations

import pytest

from yalis.comm.topology import Topology
from yalis.errors import YalisError
from yalis.launch.world import RankInfo, World


def world_of(*nodes: int) -> World:
    return World(0, tuple(RankInfo(rank, f"host{node}", node, 0, "127.0.0.1", 1) for rank, node in enumerate(nodes)))


def test_nodes_of_the_rendezvous() -> None:
    found = Topology.of(world_of(0, 0, 1, 1))
    assert (found.nodes, found.ranks_per_node(), str(found)) == (2, 2, "2 nodes x 2 ranks")
    assert found.by_node() == ((0, 1), (2, 3))
    assert found.by_node([0, 2]) == ((0,), (2,))
    assert found.by_node([3, 1, 2]) == ((3, 2), (1,))
    assert found.ranks_per_node([0, 2]) == 1
    assert str(Topology.of(World.single_process())) == "1 node x 1 rank"


def test_uneven_and_scattered_nodes() -> None:
    found = Topology.of(world_of(0, 1, 0, 0, 1))
    assert found.by_node() == ((0, 2, 3), (1, 4))
    assert found.ranks_per_node() is None
    assert found.ranks_per_node([0, 2, 1, 4]) == 2
    assert str(found) == "2 nodes x 3+2 ranks"


def test_ranks_per_node_given() -> None:
    world = world_of(0, 0, 0, 0, 0)
    assert Topology.of(world, 1).nodes == 5
    assert Topology.of(world, 2).by_node() == ((0, 1), (2, 3), (4,))
    assert Topology.of(world, 5) == Topology.of(world)
    for wrong in (0, -1, 6):
        with pytest.raises(YalisError, match=f"ranks_per_node is {wrong}; accepted: 1 to 5"):
            Topology.of(world, wrong)
