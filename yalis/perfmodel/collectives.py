"""What an all-reduce should take, by algorithm, shape of the group and message size. Pure arithmetic.

A link takes a latency for each round that waits for another, an overhead for each message, and time for each byte.
What an algorithm asks of the links inside and between nodes is its Cost; links turn that into seconds. Every cost is a
straight line in the message's bytes. Additions, and overlap of rounds by chunks, are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Link:
    latency: float  # seconds until the first byte of a message is there
    seconds_per_byte: float
    overhead: float = 0.0  # seconds that a rank spends on each message it sends

    def seconds(self, load: Load) -> float:
        return load.rounds * self.latency + load.messages * self.overhead + load.bytes * self.seconds_per_byte


@dataclass(frozen=True)
class Load:
    """What goes over one kind of link, of the rank that has the most to do."""

    rounds: int = 0  # messages of which each waits for the one before
    messages: int = 0
    bytes: float = 0.0

    def __add__(self, other: Load) -> Load:
        return Load(self.rounds + other.rounds, self.messages + other.messages, self.bytes + other.bytes)


@dataclass(frozen=True)
class Cost:
    inside: Load
    between: Load

    def seconds(self, inside: Link, between: Link) -> float:
        return inside.seconds(self.inside) + between.seconds(self.between)


@dataclass(frozen=True)
class Shape:
    """Nodes of the same number of ranks. Ranks have a link to the network each, or share their node's."""

    nodes: int
    ranks: int
    shared_link: bool = False

    @property
    def size(self) -> int:
        return self.nodes * self.ranks

    def cost(self, inside: Load, between: Load) -> Cost:
        sharing = self.ranks if self.shared_link else 1
        return Cost(inside, Load(between.rounds, between.messages, between.bytes * sharing))


Algorithm = Callable[[Shape, float], Cost]


def ring(shape: Shape, bytes: float) -> Cost:
    """Each rank passes a part to the next, once around to add and once around to share.

    Every round waits for the network, where there is one. As many rings as a node has ranks use all of their links.
    """
    rounds = 2 * (shape.size - 1)
    passed = rounds * bytes / shape.size
    if shape.nodes == 1:
        return shape.cost(Load(rounds, rounds, passed), Load())
    return shape.cost(Load(), Load(rounds, rounds, passed / shape.ranks))


def double_tree(shape: Shape, bytes: float) -> Cost:
    """Up and down a tree of nodes, with a chain inside each; two trees, spread over the links of a node's ranks."""
    chain, depth = 2 * (shape.ranks - 1), 2 * _log2_up(shape.nodes)
    if shape.nodes == 1:
        return shape.cost(Load(chain, chain, 2 * bytes if chain else 0), Load())
    return shape.cost(Load(chain, chain), Load(depth, depth, 2 * bytes / shape.ranks))


def one_shot(shape: Shape, bytes: float) -> Cost:
    """Everybody sends everybody everything, and adds it up alone."""
    near, far = shape.ranks - 1, shape.size - shape.ranks
    return shape.cost(Load(int(near > 0), near, near * bytes), Load(int(far > 0), far, far * bytes))


def doubling(shape: Shape, bytes: float) -> Cost:
    """Recursive doubling over all ranks as if there were no nodes; with 2^k ranks a node, k rounds stay inside."""
    rounds = _exchanges(shape.size)
    near = _exchanges(shape.ranks) if _log2(shape.ranks) == _log2_up(shape.ranks) else 0
    far = rounds - near
    return shape.cost(Load(near, near, near * bytes), Load(far, far, far * bytes))


def hierarchical(shape: Shape, bytes: float, between: str = "doubling", word_factor: float = 1.0) -> Cost:
    """Reduce-scatter inside nodes, then `between` them with a share of the message for each rank, then all-gather.

    Low-latency words have a `word_factor` of 2: as many bytes of flags as of data.
    """
    wire = bytes * word_factor
    others = shape.ranks - 1
    phase = Load(int(others > 0), others, others * wire / shape.ranks)
    return shape.cost(phase + phase, BETWEEN[between](shape.nodes, wire / shape.ranks))


def between_by_doubling(nodes: int, share: float) -> Load:
    """Partners at distance 1, 2, 4, ... swap all they have; nodes beyond a power of two fold in and out."""
    rounds = _exchanges(nodes)
    return Load(rounds, rounds, rounds * share)


def between_by_halving(nodes: int, share: float) -> Load:
    """Partners halve what they add down to a part each, and double it again."""
    rounds = 2 * _log2(nodes)
    even = 1 << _log2(nodes)
    folds = _exchanges(nodes) - _log2(nodes)
    return Load(rounds + folds, rounds + folds, 2 * share * (1 - 1 / even) + folds * share)


def between_directly(nodes: int, share: float) -> Load:
    """Everybody sends each other node its part at once, and then everybody what became of its own."""
    others = nodes - 1
    return Load(2 * int(others > 0), 2 * others, 2 * share * others / nodes)


BETWEEN: dict[str, Callable[[int, float], Load]] = {
    "doubling": between_by_doubling,
    "halving": between_by_halving,
    "direct": between_directly,
}


def crossover(few_rounds: Algorithm, few_bytes: Algorithm, shape: Shape, inside: Link, between: Link) -> float | None:
    """The message size from which the second is faster than the first; None if it never is, 0 if it always is."""

    def more(bytes: float) -> float:
        """Seconds by which the second is slower."""
        return few_bytes(shape, bytes).seconds(inside, between) - few_rounds(shape, bytes).seconds(inside, between)

    huge = 1e15
    at_nothing, per_byte = more(0), (more(huge) - more(0)) / huge
    if at_nothing <= 0:
        return 0.0
    gains = per_byte < -1e-9 * few_rounds(shape, huge).seconds(inside, between) / huge  # more than rounding errors
    return at_nothing / -per_byte if gains else None


def fit(measured: Sequence[tuple[Load, float]]) -> Link:
    """The latency and time per byte that best explain these seconds, by least squares of the relative error.

    A single message of n bytes is Load(1, 1, n); the loads of a whole algorithm serve as well.
    """
    rows = [(load.rounds / seconds, load.bytes / seconds) for load, seconds in measured]
    aa = sum(a * a for a, _ in rows)
    ab = sum(a * b for a, b in rows)
    bb = sum(b * b for _, b in rows)
    a1, b1 = sum(a for a, _ in rows), sum(b for _, b in rows)
    determinant = aa * bb - ab * ab
    if len(measured) < 2 or determinant <= 1e-12 * aa * bb:
        raise ValueError("a latency and a bandwidth need at least two sizes")
    latency, per_byte = (a1 * bb - b1 * ab) / determinant, (b1 * aa - a1 * ab) / determinant
    # Neither is ever negative: where noise says so, the other explains all.
    if latency < 0:
        return Link(0.0, b1 / bb)
    return Link(a1 / aa, 0.0) if per_byte < 0 else Link(latency, per_byte)


def _exchanges(count: int) -> int:
    """Of recursive doubling: two more where those beyond a power of two fold in and out."""
    return _log2(count) + (0 if 1 << _log2(count) == count else 2)


def _log2(count: int) -> int:
    return count.bit_length() - 1


def _log2_up(count: int) -> int:
    return (count - 1).bit_length()
