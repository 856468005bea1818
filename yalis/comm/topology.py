"""Which ranks share a node. This is the logical shape only; link types are not modelled here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from yalis.errors import YalisError
from yalis.launch.world import World


@dataclass(frozen=True)
class Topology:
    #: the node of each rank of the world; nodes may have different numbers of ranks
    node_of: tuple[int, ...]

    @classmethod
    def of(cls, world: World, ranks_per_node: int | None = None) -> Topology:
        """Return the nodes found at rendezvous, or nodes of `ranks_per_node` consecutive ranks."""
        if ranks_per_node is None:
            return cls(tuple(member.node for member in world.members))
        if not 1 <= ranks_per_node <= world.size:
            raise YalisError(
                f"ranks_per_node is {ranks_per_node}; accepted: 1 to {world.size}, the number of ranks in this job"
            )
        return cls(tuple(rank // ranks_per_node for rank in range(world.size)))

    @property
    def nodes(self) -> int:
        return len(set(self.node_of))

    def by_node(self, ranks: Sequence[int] | None = None) -> tuple[tuple[int, ...], ...]:
        """Group these ranks (default: all) by node; nodes are ordered by their first rank."""
        nodes: dict[int, list[int]] = {}
        for rank in range(len(self.node_of)) if ranks is None else ranks:
            nodes.setdefault(self.node_of[rank], []).append(rank)
        return tuple(tuple(node) for node in nodes.values())

    def ranks_per_node(self, ranks: Sequence[int] | None = None) -> int | None:
        """Return how many of these ranks each of their nodes has, or None if nodes differ."""
        counts = {len(node) for node in self.by_node(ranks)}
        return counts.pop() if len(counts) == 1 else None

    def __str__(self) -> str:
        each = self.ranks_per_node()
        counts = str(each) if each is not None else "+".join(str(len(node)) for node in self.by_node())
        return f"{self.nodes} node{'s' * (self.nodes != 1)} x {counts} rank{'s' * (counts != '1')}"
