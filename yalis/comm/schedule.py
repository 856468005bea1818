"""Who sends what to whom in a hierarchical all-reduce, and what is added: pure arithmetic, without tensors.

The ranks of one node add their contributions so that each owns a piece of the node's sum, the owners of the same piece
on all nodes add theirs, and every owner gives the finished piece to its node. Only the middle part crosses nodes.

Sums come out the same on all ranks: each is either taken by one rank, in order of ranks, or by both ends of a pair.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

Span = tuple[int, int]  # elements of the tensor: from, and up to before
Nodes = Sequence[Sequence[int]]  # the ranks of each node


@dataclass(frozen=True)
class Message:
    peer: int
    span: Span


@dataclass(frozen=True)
class Step:
    """What one rank sends and receives at once."""

    sends: tuple[Message, ...] = ()
    receives: tuple[Message, ...] = ()
    #: None: what comes is put in its place. Else it is added to what is there, which is the term of this index.
    own: int | None = None

    @property
    def peers(self) -> set[int]:
        return {message.peer for message in (*self.sends, *self.receives)}


# A lane is worth its messages only while others are on their way; and neighbours' words for it wait in a socket.
MAX_CHUNKS = 32

Between = Callable[[Sequence[int], int, Span], Iterator[Step]]


def steps(nodes: Nodes, rank: int, between: str, span: Span) -> Iterator[Step]:
    """This rank's part in an all-reduce of `span`. Ranks beyond the smallest node's number own no piece."""
    peers = next(node for node in nodes if rank in node)
    local = peers.index(rank)
    pieces = cut(span, min(len(node) for node in nodes))
    yield scatter(peers, local, pieces)
    if local < len(pieces):
        yield from INTER_NODE[between]([node[local] for node in nodes], nodes.index(peers), pieces[local])
    yield gather(peers, local, pieces)


def doubling(peers: Sequence[int], at: int, span: Span) -> Iterator[Step]:
    """Fewest exchanges: partners at distance 1, 2, 4, ... swap all they have."""
    distance = 1
    while distance < len(peers):
        swap = (Message(peers[at ^ distance], span),)
        yield Step(swap, swap, own=0)
        distance *= 2


def halving(peers: Sequence[int], at: int, span: Span) -> Iterator[Step]:
    """Fewest bytes in few exchanges: partners halve what they add, down to a share each, and then double it again."""
    back = []
    distance = 1
    while distance < len(peers):
        low, high = cut(span, 2)
        keep, give = (high, low) if at & distance else (low, high)
        peer = peers[at ^ distance]
        yield Step((Message(peer, give),), (Message(peer, keep),), own=0)
        back.append(Step((Message(peer, keep),), (Message(peer, give),)))
        span = keep
        distance *= 2
    yield from reversed(back)


def direct(peers: Sequence[int], at: int, span: Span) -> Iterator[Step]:
    """Fewest bytes in two exchanges, each with everyone at once."""
    parts = cut(span, len(peers))
    yield scatter(peers, at, parts)
    yield gather(peers, at, parts)


def folded(inner: Between) -> Between:
    """Makes a schedule for 2^k peers one for any number: those beyond hand theirs to another, and wait for the sum."""

    def schedule(peers: Sequence[int], at: int, span: Span) -> Iterator[Step]:
        power = 1 << (len(peers).bit_length() - 1)
        if at >= power:
            message = (Message(peers[at - power], span),)
            yield Step(sends=message)
            yield Step(receives=message)
            return
        behind = tuple(Message(peer, span) for peer in peers[at + power : at + power + 1])
        if behind:
            yield Step(receives=behind, own=0)
        yield from inner(peers[:power], at, span)
        if behind:
            yield Step(sends=behind)

    return schedule


INTER_NODE: dict[str, Between] = {"doubling": folded(doubling), "halving": folded(halving), "direct": direct}


def scatter(peers: Sequence[int], at: int, parts: Sequence[Span]) -> Step:
    """Everyone sends part i to the i-th peer, which adds them; more peers than parts may send."""
    sends = tuple(Message(peer, part) for peer, part in zip(peers, parts, strict=False) if peer != peers[at])
    if at >= len(parts):
        return Step(sends)
    return Step(sends, tuple(Message(peer, parts[at]) for peer in peers if peer != peers[at]), own=at)


def gather(peers: Sequence[int], at: int, parts: Sequence[Span]) -> Step:
    """The i-th peer sends part i to everyone."""
    receives = tuple(Message(peer, part) for peer, part in zip(peers, parts, strict=False) if peer != peers[at])
    if at >= len(parts):
        return Step(receives=receives)
    return Step(tuple(Message(peer, parts[at]) for peer in peers if peer != peers[at]), receives)


def cut(span: Span, count: int) -> list[Span]:
    """`span` in parts as even as can be, the longer ones first; some are empty where there is too little."""
    start, stop = span
    each, longer = divmod(stop - start, count)
    edges = [start + i * each + min(i, longer) for i in range(count + 1)]
    return list(pairwise(edges))


@dataclass(frozen=True)
class Plan:
    """A whole all-reduce in lanes, each a stretch of the tensor that passes through the same steps by itself.

    `moves` holds the first step of every lane, then the second of every lane, and so on: while one lane's bytes are on
    their way, another's are added. Messages of nothing are left out.
    """

    moves: tuple[Step, ...]
    lanes: int
    #: how many elements are received to be added, all lanes and steps together
    scratch: int


def plan(nodes: Nodes, rank: int, between: str, elements: int, chunk: int) -> Plan:
    """`chunk`: about how many elements of a lane each owner has; more, where that would make too many lanes."""
    owners = min(len(node) for node in nodes)
    lanes = min(max(1, -(-elements // (max(chunk, 1) * owners))), MAX_CHUNKS)
    columns = [list(steps(nodes, rank, between, span)) for span in cut((0, elements), lanes)]
    moves = tuple(_without_nothing(step) for row in zip(*columns, strict=True) for step in row)
    added = (message.span for step in moves if step.own is not None for message in step.receives)
    return Plan(moves, lanes, sum(stop - start for start, stop in added))


def _without_nothing(step: Step) -> Step:
    sends, receives = (
        tuple(message for message in messages if message.span[0] < message.span[1])
        for messages in (step.sends, step.receives)
    )
    return Step(sends, receives, step.own)
