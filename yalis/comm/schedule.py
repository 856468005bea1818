"""The messages of a hierarchical all-reduce: which rank sends which span to which peer, and what it adds. No tensors.

Three phases: a reduce-scatter within each node leaves each rank with one shard of the node's sum. An inter-node
all-reduce then sums that shard over the ranks of all nodes that own it. An all-gather within each node distributes the
finished shards. Only the middle phase uses inter-node links.

Results are bitwise identical on all ranks: each sum is computed either by one rank, in rank order, or by both partners
of an exchange from the same two terms.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

Span = tuple[int, int]  # element range of the tensor, [start, stop)
Nodes = Sequence[Sequence[int]]  # the ranks of each node


@dataclass(frozen=True)
class Message:
    peer: int
    span: Span


@dataclass(frozen=True)
class Step:
    """The messages that one rank sends and receives concurrently."""

    sends: tuple[Message, ...] = ()
    receives: tuple[Message, ...] = ()
    #: None: received data overwrites the span. Else it is added to it, and this rank's own data is the term at this
    #: index of the sum.
    own_term: int | None = None

    @property
    def peers(self) -> set[int]:
        return {message.peer for message in (*self.sends, *self.receives)}


# More chunks than this only add messages. It also bounds the notifications that wait in a shared-memory socket.
MAX_CHUNKS = 32

#: (peers, index of this rank among them, span) -> this rank's steps
InterNodeAlgorithm = Callable[[Sequence[int], int, Span], Iterator[Step]]


def steps(nodes: Nodes, rank: int, inter: str, span: Span) -> Iterator[Step]:
    """Yield this rank's steps in an all-reduce of `span`, with the inter-node algorithm `inter`.

    There are as many shards as the smallest node has ranks. On larger nodes, the ranks beyond own no shard.
    """
    peers = next(node for node in nodes if rank in node)
    local_rank = peers.index(rank)
    shards = split_evenly(span, min(len(node) for node in nodes))
    yield reduce_scatter_step(peers, local_rank, shards)
    if local_rank < len(shards):
        owners = [node[local_rank] for node in nodes]
        yield from INTER_NODE[inter](owners, nodes.index(peers), shards[local_rank])
    yield all_gather_step(peers, local_rank, shards)


def doubling(peers: Sequence[int], index: int, span: Span) -> Iterator[Step]:
    """Recursive doubling, the fewest rounds: partners at distance 1, 2, 4, ... exchange their whole partial sum."""
    distance = 1
    while distance < len(peers):
        exchange = (Message(peers[index ^ distance], span),)
        yield Step(exchange, exchange, own_term=0)
        distance *= 2


def halving(peers: Sequence[int], index: int, span: Span) -> Iterator[Step]:
    """Recursive halving and doubling: the fewest bytes, in 2 log2(n) rounds.

    Partners halve the span they add in each round of the reduce-scatter; the all-gather repeats them in reverse.
    """
    all_gather = []
    distance = 1
    while distance < len(peers):
        low, high = split_evenly(span, 2)
        keep, give = (high, low) if index & distance else (low, high)
        peer = peers[index ^ distance]
        yield Step((Message(peer, give),), (Message(peer, keep),), own_term=0)
        all_gather.append(Step((Message(peer, keep),), (Message(peer, give),)))
        span = keep
        distance *= 2
    yield from reversed(all_gather)


def direct(peers: Sequence[int], index: int, span: Span) -> Iterator[Step]:
    """Reduce-scatter and all-gather with all peers at once: the fewest bytes, in two rounds of n - 1 messages."""
    parts = split_evenly(span, len(peers))
    yield reduce_scatter_step(peers, index, parts)
    yield all_gather_step(peers, index, parts)


def fold_extra_peers(inner: InterNodeAlgorithm) -> InterNodeAlgorithm:
    """Extend an algorithm for 2^k peers to any number.

    Each peer beyond 2^k sends its sum to a partner first (fold in) and receives the result from it last (fold out).
    """

    def algorithm(peers: Sequence[int], index: int, span: Span) -> Iterator[Step]:
        power = 1 << (len(peers).bit_length() - 1)
        if index >= power:
            message = (Message(peers[index - power], span),)
            yield Step(sends=message)
            yield Step(receives=message)
            return
        folded = tuple(Message(peer, span) for peer in peers[index + power : index + power + 1])
        if folded:
            yield Step(receives=folded, own_term=0)
        yield from inner(peers[:power], index, span)
        if folded:
            yield Step(sends=folded)

    return algorithm


INTER_NODE: dict[str, InterNodeAlgorithm] = {
    "doubling": fold_extra_peers(doubling),
    "halving": fold_extra_peers(halving),
    "direct": direct,
}


def reduce_scatter_step(peers: Sequence[int], index: int, parts: Sequence[Span]) -> Step:
    """Send part i to the i-th peer, which adds all of them. There may be more peers than parts."""
    sends = tuple(Message(peer, part) for peer, part in zip(peers, parts, strict=False) if peer != peers[index])
    if index >= len(parts):
        return Step(sends)
    return Step(sends, tuple(Message(peer, parts[index]) for peer in peers if peer != peers[index]), own_term=index)


def all_gather_step(peers: Sequence[int], index: int, parts: Sequence[Span]) -> Step:
    """Receive part i from the i-th peer, and send this rank's part to all peers."""
    receives = tuple(Message(peer, part) for peer, part in zip(peers, parts, strict=False) if peer != peers[index])
    if index >= len(parts):
        return Step(receives=receives)
    return Step(tuple(Message(peer, parts[index]) for peer in peers if peer != peers[index]), receives)


def split_evenly(span: Span, count: int) -> list[Span]:
    """Split `span` into `count` parts whose sizes differ by at most one, longer ones first. Parts may be empty."""
    start, stop = span
    size, remainder = divmod(stop - start, count)
    edges = [start + i * size + min(i, remainder) for i in range(count + 1)]
    return list(pairwise(edges))


@dataclass(frozen=True)
class Schedule:
    """One rank's steps in an all-reduce, pipelined over chunks of the tensor.

    `steps` holds the first step of every chunk, then the second step of every chunk, and so on: while one chunk is in
    flight, another is added. Empty messages are left out.
    """

    steps: tuple[Step, ...]
    num_chunks: int
    #: elements received to be added, over all chunks and steps
    scratch: int


def make_schedule(nodes: Nodes, rank: int, inter: str, elements: int, chunk: int) -> Schedule:
    """Build the schedule of `rank`. `chunk`: elements per chunk and shard, raised if there were too many chunks."""
    num_shards = min(len(node) for node in nodes)
    num_chunks = min(max(1, -(-elements // (max(chunk, 1) * num_shards))), MAX_CHUNKS)
    steps_of_chunk = [list(steps(nodes, rank, inter, span)) for span in split_evenly((0, elements), num_chunks)]
    interleaved = tuple(_drop_empty(step) for same_step in zip(*steps_of_chunk, strict=True) for step in same_step)
    added = (message.span for step in interleaved if step.own_term is not None for message in step.receives)
    return Schedule(interleaved, num_chunks, sum(stop - start for start, stop in added))


def _drop_empty(step: Step) -> Step:
    sends, receives = (
        tuple(message for message in messages if message.span[0] < message.span[1])
        for messages in (step.sends, step.receives)
    )
    return Step(sends, receives, step.own_term)
