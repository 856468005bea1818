"""A cost model of all-reduce algorithms: rounds, messages and bytes by group shape and message size.

Sending over a link costs a latency for each round, an overhead for each message, and time for each byte. An algorithm's
`Cost` is its load on intra-node and inter-node links; the links turn that into seconds. Every cost is linear in the
message size. The time of the additions, and overlap of rounds by chunking, are not modelled here; planner/ adds what
depends on the library.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Link:
    latency: float  # seconds until the first byte of a message arrives
    seconds_per_byte: float
    overhead: float = 0.0  # seconds a rank spends on each message it sends

    def seconds(self, load: Load) -> float:
        return load.rounds * self.latency + load.messages * self.overhead + load.bytes * self.seconds_per_byte


@dataclass(frozen=True)
class Load:
    """Traffic over one type of link, of the rank that sends the most."""

    rounds: int = 0  # messages that each wait for the previous one
    messages: float = 0
    bytes: float = 0.0

    def __add__(self, other: Load) -> Load:
        return Load(self.rounds + other.rounds, self.messages + other.messages, self.bytes + other.bytes)


@dataclass(frozen=True)
class Cost:
    """The loads of an algorithm on intra-node and inter-node links."""

    intra: Load
    inter: Load

    def seconds(self, intra: Link, inter: Link) -> float:
        return intra.seconds(self.intra) + inter.seconds(self.inter)


@dataclass(frozen=True)
class Shape:
    """Nodes with the same number of ranks. Each rank has its own link to the network, or they share the node's."""

    nodes: int
    ranks_per_node: int
    shared_link: bool = False

    @property
    def size(self) -> int:
        return self.nodes * self.ranks_per_node

    def cost(self, intra: Load, inter: Load) -> Cost:
        sharing = self.ranks_per_node if self.shared_link else 1
        return Cost(intra, Load(inter.rounds, inter.messages, inter.bytes * sharing))


#: Returns the cost of an all-reduce of so many bytes.
Algorithm = Callable[[Shape, float], Cost]


def ring(shape: Shape, bytes: float) -> Cost:
    """Reduce-scatter and all-gather around a ring, in lock-step.

    With several nodes every round waits for the network. One ring per rank of a node uses all network links."""
    rounds = 2 * (shape.size - 1)
    sent = rounds * bytes / shape.size
    if shape.nodes == 1:
        return shape.cost(Load(rounds, rounds, sent), Load())
    return shape.cost(Load(), Load(rounds, rounds, sent / shape.ranks_per_node))


def gloo_ring(shape: Shape, bytes: float) -> Cost:
    """The ring of gloo: one ring, and a message leaves only after its receiver has reported a posted receive.

    So each round takes two latencies."""
    rounds = 2 * (shape.size - 1)
    load = Load(2 * rounds, rounds, rounds * bytes / shape.size)
    return Cost(load, Load()) if shape.nodes == 1 else Cost(Load(), load)


@dataclass(frozen=True)
class Exchange:
    """One round of an algorithm: every rank exchanges a message of so many bytes with a partner."""

    bytes: float
    inter: bool  # whether the partner is on another node


def rabenseifner(shape: Shape, bytes: float) -> list[Exchange]:
    """Recursive halving, then recursive doubling, over all ranks regardless of nodes, as in MPI libraries.

    Partners at distance 1, 2, 4, ... exchange a half, a quarter, ... of the message. Ranks beyond a power of two fold
    in and out."""
    depth = _log2(shape.size)
    halving = [
        Exchange(bytes / 2 ** (step + 1), inter=shape.ranks_per_node % (2 << step) != 0) for step in range(depth)
    ]
    fold = [Exchange(bytes, inter=shape.nodes > 1)] if 1 << depth != shape.size else []
    return [*fold, *halving, *reversed(halving), *fold]


def one_shot(shape: Shape, bytes: float) -> Cost:
    """Every rank sends its whole message to every other rank, and adds all of them itself."""
    near, far = shape.ranks_per_node - 1, shape.size - shape.ranks_per_node
    return shape.cost(Load(int(near > 0), near, near * bytes), Load(int(far > 0), far, far * bytes))


def hierarchical(shape: Shape, bytes: float, inter_node: str = "doubling", wire_factor: float = 1.0) -> Cost:
    """Reduce-scatter within nodes, all-reduce a share per rank between nodes, and all-gather within nodes.

    `inter_node` names the algorithm between nodes. `wire_factor` is the bytes sent per byte of data: 2 with the LL
    protocol, which sends a flag with every word of data."""
    wire = bytes * wire_factor
    others = shape.ranks_per_node - 1
    phase = Load(int(others > 0), others, others * wire / shape.ranks_per_node)
    return shape.cost(phase + phase, INTER_NODE[inter_node](shape.nodes, wire / shape.ranks_per_node))


def recursive_doubling(nodes: int, share: float) -> Load:
    """Partners at distance 1, 2, 4, ... exchange everything. Nodes beyond a power of two fold in and out."""
    rounds = _doubling_rounds(nodes)
    return Load(rounds, rounds, rounds * share)


def recursive_halving(nodes: int, share: float) -> Load:
    """Recursive halving reduces each share to one part per node; recursive doubling gathers the parts again."""
    rounds = 2 * _log2(nodes)
    power_of_two = 1 << _log2(nodes)
    folds = _doubling_rounds(nodes) - _log2(nodes)
    return Load(rounds + folds, rounds + folds, 2 * share * (1 - 1 / power_of_two) + folds * share)


def direct_exchange(nodes: int, share: float) -> Load:
    """Every node sends each other node its part at once, and then its reduced part to all of them."""
    others = nodes - 1
    return Load(2 * int(others > 0), 2 * others, 2 * share * others / nodes)


INTER_NODE: dict[str, Callable[[int, float], Load]] = {
    "doubling": recursive_doubling,
    "halving": recursive_halving,
    "direct": direct_exchange,
}


def fit(measured: Sequence[tuple[Load, float]]) -> Link:
    """Return the latency and time per byte that best explain measured seconds, by least squares of the relative error.

    The load of a single message of n bytes is Load(1, 1, n). The loads of a whole algorithm can be used too."""
    rows = [(load.rounds / seconds, load.bytes / seconds) for load, seconds in measured]
    aa = sum(a * a for a, _ in rows)
    ab = sum(a * b for a, b in rows)
    bb = sum(b * b for _, b in rows)
    a1, b1 = sum(a for a, _ in rows), sum(b for _, b in rows)
    determinant = aa * bb - ab * ab
    if len(measured) < 2 or determinant <= 1e-12 * aa * bb:
        raise ValueError("a latency and a bandwidth need at least two sizes")
    latency, per_byte = (a1 * bb - b1 * ab) / determinant, (b1 * aa - a1 * ab) / determinant
    # Neither is negative. If noise makes one so, set it to 0 and fit the other alone.
    if latency < 0:
        return Link(0.0, b1 / bb)
    return Link(a1 / aa, 0.0) if per_byte < 0 else Link(latency, per_byte)


def _doubling_rounds(count: int) -> int:
    """Return the rounds of recursive doubling: two more if ranks beyond a power of two fold in and out."""
    return _log2(count) + (0 if 1 << _log2(count) == count else 2)


def _log2(count: int) -> int:
    return count.bit_length() - 1
