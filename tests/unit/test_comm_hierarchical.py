"""The hierarchical all-reduce between threads, over a transport with random delivery times."""

from __future__ import annotations

import itertools
import random
import socket
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.ranks import Memory, run_ranks
from yalis.comm import hierarchical
from yalis.comm.hierarchical import HierarchicalAllReduce, HierarchicalBackend, choose_options
from yalis.comm.schedule import INTER_NODE, MAX_CHUNKS, Nodes, split_evenly
from yalis.comm.shared_memory import SharedWindows
from yalis.comm.topology import Topology
from yalis.comm.tuning import Choice
from yalis.errors import PeerLost, YalisError

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64)


@dataclass
class Message:
    """A message. Its bytes are copied once both sides have posted it, or, if `late`, when one of them first waits."""

    late: bool
    sent: Tensor | None = None
    received: Tensor | None = None
    matched: threading.Event = field(default_factory=threading.Event)
    moved: bool = False

    def move(self) -> None:
        assert self.sent is not None
        assert self.received is not None
        assert (self.sent.shape, self.sent.dtype) == (self.received.shape, self.received.dtype), (
            "sender and receiver disagree"
        )
        if not self.moved:
            self.received.copy_(self.sent)
            self.moved = True


class Network:
    """The state shared by the transports of all ranks."""

    def __init__(self, seed: int, early_receives: bool) -> None:
        self.random, self.early_receives = random.Random(seed), early_receives
        self.lock = threading.Lock()
        self.half_posted: dict[tuple[int, int, int, str], deque[Message]] = {}

    def post(self, source: int, to: int, tag: int, end: str, x: Tensor) -> Message:
        other = "received" if end == "sent" else "sent"
        with self.lock:
            waiting = self.half_posted.get((source, to, tag, other))
            message = waiting.popleft() if waiting else Message(late=self.random.random() < 0.5)
            setattr(message, end, x)
            if message.sent is None or message.received is None:
                self.half_posted.setdefault((source, to, tag, end), deque()).append(message)
                return message
            if not message.late:
                message.move()
        message.matched.set()
        return message


class InMemory:
    """One rank's transport. Without early receives, `post` waits for all messages, as NCCL's stream order does."""

    def __init__(self, network: Network, rank: Memory) -> None:
        self.network, self.rank, self.early_receives = network, rank, network.early_receives
        self.log: list[tuple[str, int, int]] = []
        self.tags = itertools.count()

    def new_tag(self) -> int:
        return next(self.tags)

    def post(
        self, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]], tag: int
    ) -> list[Handle]:
        own_rank = self.rank.rank
        handles = [
            Handle(self, "received", peer, self.network.post(peer, own_rank, tag, "received", x))
            for x, peer in receives
        ]
        self.log += [("post", peer, x.nbytes) for x, peer in receives]
        for x, peer in sends:
            handles.append(Handle(self, "sent", peer, self.network.post(own_rank, peer, tag, "sent", x)))
            self.log.append(("send", peer, x.nbytes))
        if self.early_receives:
            return handles
        for handle in handles:
            handle.wait()
        return []


@dataclass
class Handle:
    transport: InMemory
    what: str
    peer: int
    message: Message

    def wait(self) -> None:
        while not self.message.matched.wait(0.2):
            if self.transport.rank.board.gate.broken:
                raise threading.BrokenBarrierError
        with self.transport.network.lock:
            self.message.move()
        self.transport.log.append((self.what, self.peer, self.message.sent.nbytes))


def reduce(
    nodes: Nodes,
    inputs: list[Tensor],
    inter: str,
    chunk: int,
    early_receives: bool = True,
    in_place: bool = True,
    seed: int = 0,
    times: int = 1,
    shared: bool = False,
) -> tuple[list[Tensor], list[InMemory]]:
    """Return every rank's sum of the inputs, and its transport.

    With several `times`, all-reduces of other sizes run in between. `shared`: the ranks of a node share memory.
    """
    network = Network(seed, early_receives)
    windows = share_memory(nodes, inputs[0].nbytes) if shared else {}

    def rank(index: int, comm: Memory) -> tuple[Tensor, InMemory]:
        transport = InMemory(network, comm)
        allreduce = HierarchicalAllReduce(transport, nodes, index, windows.get(index))
        for turn in range(times):
            if turn:
                allreduce.all_reduce(inputs[index][turn:].clone(), None, inter, chunk)
            x = inputs[index].clone()
            out = None if in_place else torch.full_like(x, 77)
            total = allreduce.all_reduce(x, out, inter, chunk)
        assert total is (x if in_place else out)
        assert in_place or torch.equal(x, inputs[index])
        return total, transport

    results = run_ranks(len(inputs), rank)
    return [total for total, _ in results], [transport for _, transport in results]


def share_memory(nodes: Nodes, size: int) -> dict[int, SharedWindows]:
    """Create windows of `size` bytes, and connections within each node."""
    found = {}
    for node in nodes:
        windows = {rank: torch.full((2, -(-size // 8) * 8), 99, dtype=torch.uint8) for rank in node}
        sockets: dict[int, dict[int, socket.socket]] = {rank: {} for rank in node}
        for one, other in itertools.combinations(node, 2):
            sockets[one][other], sockets[other][one] = socket.socketpair()
        for rank in node:
            for end in sockets[rank].values():
                end.settimeout(30)  # so that a failure of another rank ends the test
            others = {peer: window for peer, window in windows.items() if peer != rank}
            found[rank] = SharedWindows(windows[rank], others, sockets[rank])
    return found


@st.composite
def shapes(draw: st.DrawFn) -> tuple[tuple[int, ...], ...]:
    """1 to 9 nodes of 1 to 4 ranks, of equal or different size, with consecutive or shuffled ranks."""
    count = draw(st.integers(1, 9))
    even = draw(st.booleans())
    counts = [draw(st.integers(1, 4))] * count if even else [draw(st.integers(1, 4)) for _ in range(count)]
    node_of = [node for node, ranks in enumerate(counts) for _ in range(ranks)]
    return Topology(tuple(draw(st.permutations(node_of)) if draw(st.booleans()) else node_of)).by_node()


def roundings(nodes: Nodes, inter: str) -> int:
    """Return how often a low-precision value is rounded: once in the node and once per exchange."""
    power = len(nodes).bit_length() - 1
    return 2 if inter == "direct" else 1 + power + (len(nodes) > 1 << power)


@settings(max_examples=40, deadline=None)
@given(
    nodes=shapes(),
    elements=st.sampled_from([0, 1, 2, 7, 64, 129]) | st.integers(0, 500),
    dtype=st.sampled_from(DTYPES),
    inter=st.sampled_from(sorted(INTER_NODE)),
    chunk=st.sampled_from([1, 50, 200, 1 << 20]),
    how=st.fixed_dictionaries(
        {
            "early_receives": st.booleans(),
            "in_place": st.booleans(),
            "seed": st.integers(0, 1 << 20),
            "times": st.integers(1, 3),
            "shared": st.booleans(),
        }
    ),
)
def test_all_reduce_over_any_topology(
    nodes: Nodes, elements: int, dtype: torch.dtype, inter: str, chunk: int, how: dict[str, Any]
) -> None:
    size = sum(len(node) for node in nodes)
    chunk = max(chunk, elements * dtype.itemsize // 12)  # a few chunks, not hundreds
    generator = torch.Generator().manual_seed(how["seed"])

    whole = [torch.randint(0, 8, (elements,), generator=generator).to(dtype) for _ in range(size)]
    for total in reduce(nodes, whole, inter, chunk, **how)[0]:
        assert torch.equal(total, torch.stack(whole).double().sum(0).to(dtype))

    if dtype.is_floating_point:
        drawn = [torch.randn(elements, generator=generator).to(dtype) for _ in range(size)]
        totals, _ = reduce(nodes, drawn, inter, chunk, **how)
        assert len({bytes(total.view(torch.uint8).tolist()) for total in totals}) == 1
        exact = torch.stack(drawn).double()
        steps = roundings(nodes, inter) / 2 if dtype.itemsize == 2 else size
        bound = (steps * torch.finfo(dtype).eps + size * 2**-24) * exact.abs().sum(0)
        assert bool(((totals[0].double() - exact.sum(0)).abs() <= bound).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_result_does_not_depend_on_chunks_or_position(dtype: torch.dtype) -> None:
    """Halving and doubling agree bitwise too, because they add the same pairs."""
    nodes = ((0, 1, 2), (3, 4, 5), (6, 7, 8))
    drawn = [torch.randn(40, generator=torch.Generator().manual_seed(rank)).to(dtype) for rank in range(9)]
    twice = [torch.cat([x, x.flip(0)]) for x in drawn]
    for names in (("doubling", "halving"), ("direct",)):
        totals = [reduce(nodes, twice, name, chunk)[0][0] for name in names for chunk in (4, 13, 1000)]
        assert all(torch.equal(total, totals[0]) for total in totals)
        assert torch.equal(totals[0][:40], totals[0][40:].flip(0))


@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize(("count", "each"), [(1, 3), (2, 1), (4, 2), (8, 1), (3, 2), (5, 1), (7, 2)])
def test_message_and_byte_counts(count: int, each: int, chunks: int) -> None:
    nodes = split_evenly((0, count * each), count)
    ranks = [list(range(*span)) for span in nodes]
    power = 1 << (count.bit_length() - 1)
    extra, exchanges = count - power, power.bit_length() - 1
    # Divisible by the numbers of chunks, shards, parts and halves.
    shard = 4 * chunks * count * power
    inputs = [torch.ones(shard // 4 * each)] * (count * each)
    for inter in INTER_NODE:
        _, transports = reduce(ranks, inputs, inter, shard // chunks)
        for rank, transport in enumerate(transports):
            node = rank // each
            intra_node, inter_node = [], []
            for what, peer, size in transport.log:
                if what == "send":
                    (intra_node if peer // each == node else inter_node).append(size)
            assert intra_node == [shard // chunks] * (2 * (each - 1) * chunks)
            if inter == "direct":
                messages, moved = 2 * (count - 1), 2 * shard * (count - 1) // count
            elif node >= power:  # fold in; fold out is a receive
                messages, moved = 1, shard
            else:
                folds = int(node < extra)
                rounds = exchanges if inter == "doubling" else 2 * exchanges
                moved = shard * exchanges if inter == "doubling" else 2 * shard * (power - 1) // power
                messages, moved = rounds + folds, moved + shard * folds
            assert (len(inter_node), sum(inter_node)) == (messages * chunks, moved)


def test_shared_memory_replaces_intra_node_messages() -> None:
    inputs = [torch.arange(10.0) * rank for rank in range(5)]
    totals, transports = reduce(((0, 1), (2, 3, 4)), inputs, "doubling", 1 << 10, shared=True, times=4)
    assert all(torch.equal(total, torch.arange(10.0) * 10) for total in totals)
    for rank, transport in enumerate(transports):
        peers = {peer for what, peer, _ in transport.log if what == "send"}
        assert peers == [{2}, {3}, {0}, {1}, set()][rank]


def test_number_of_chunks_is_bounded() -> None:
    inputs = [torch.arange(4000.0) + rank for rank in range(4)]
    totals, transports = reduce(((0, 1), (2, 3)), inputs, "doubling", 4, shared=True, times=3)
    assert all(torch.equal(total, 4 * torch.arange(4000.0) + 6) for total in totals)
    assert sum(what == "send" for what, _, _ in transports[0].log) == 5 * MAX_CHUNKS


def test_dead_peer_of_shared_memory_is_reported() -> None:
    windows = share_memory(((0, 1),), 8)
    windows[1].close()
    with pytest.raises(PeerLost, match="rank 1 of this node is closed"):
        windows[0].wait_for(1)
    with pytest.raises(PeerLost, match="rank 1 of this node is lost"):
        windows[0].notify(1)


def test_ranks_without_a_shard_contribute_and_receive() -> None:
    _, transports = reduce(((0, 1, 2, 3), (4, 5)), [torch.ones(16)] * 6, "doubling", 1 << 10)
    sent = [[(peer, size) for what, peer, size in transport.log if what == "send"] for transport in transports]
    assert sent[3] == [(0, 32), (1, 32)]
    assert sent[0] == [(1, 32), (4, 32), (1, 32), (2, 32), (3, 32)]
    assert sent[5] == [(4, 32), (1, 32), (4, 32)]


def test_chunks_are_pipelined() -> None:
    _, transports = reduce(((0,), (1,), (2,), (3,)), [torch.ones(20)] * 4, "doubling", 40)
    log = [(what, peer) for what, peer, _ in transports[0].log if what in ("send", "received")]
    assert log[:4] == [("send", 1), ("send", 1), ("received", 1), ("send", 2)]
    assert log[4:] == [("received", 1), ("send", 2), ("received", 2), ("received", 2)]


def test_receives_are_posted_before_anything_is_sent() -> None:
    for inter in INTER_NODE:
        _, transports = reduce(((0, 1), (2, 3), (4, 5)), [torch.ones(20)] * 6, inter, 16)
        for transport in transports:
            log = [what for what, _, _ in transport.log]
            received = log.count("received")
            assert log[:received] == ["post"] * received


def test_repeated_all_reduces_have_persistent_receives() -> None:
    network = Network(0, early_receives=True)

    def rank(index: int, comm: Memory) -> list[str]:
        transport = InMemory(network, comm)
        allreduce = HierarchicalAllReduce(transport, ((0,), (1,)), index)
        for _ in range(3):
            assert bool((allreduce.all_reduce(torch.ones(9), None, "doubling", 64) == 2).all())
        return [what for what, _, _ in transport.log]

    once, persistent = ["post", "send", "received", "sent"], ["send", "received", "sent", "post"]
    assert run_ranks(2, rank) == [[*once, "post", *persistent, *persistent]] * 2


def test_number_of_persistent_receives_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hierarchical, "MAX_PERSISTENT", 2)
    monkeypatch.setattr(hierarchical, "MAX_PERSISTENT_BYTES", 400)
    network = Network(0, early_receives=True)

    def rank(index: int, comm: Memory) -> int:
        allreduce = HierarchicalAllReduce(InMemory(network, comm), ((0,), (1,)), index)
        for elements in (101, 5, 6, 7, 8, 5, 8, 101, 7, 6, 5, 101):
            assert bool((allreduce.all_reduce(torch.ones(elements), None, "direct", 64) == 2).all())
        return len(allreduce._persistent)

    assert run_ranks(2, rank) == [2, 2]


def test_long_tensors_are_split_into_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hierarchical, "SEGMENT_BYTES", 64)
    inputs = [torch.arange(100.0) + rank for rank in range(4)]
    totals, transports = reduce(((0, 1), (2, 3)), inputs, "halving", 1 << 10)
    assert all(torch.equal(total, 4 * torch.arange(100.0) + 6) for total in totals)
    assert max(size for _, _, size in transports[0].log) <= 64


def test_strided_tensors_and_output_dtypes() -> None:
    nodes = ((0,), (1,))
    network = Network(0, early_receives=True)

    def rank(index: int, comm: Memory) -> None:
        allreduce = HierarchicalAllReduce(InMemory(network, comm), nodes, index)
        whole = torch.zeros(6, 8)
        part = whole[:, ::2]
        part += index + 1
        assert allreduce.all_reduce(part, None, "doubling", 64) is part
        assert bool((whole[:, ::2] == 3).all())
        assert not whole[:, 1::2].any()
        wide = torch.zeros(4, 6, dtype=torch.float64).t()
        assert bool((allreduce.all_reduce(part, wide, "direct", 64) == 6).all())
        with torch.inference_mode():  # scratch memory allocated own_rank is also used outside, and vice versa
            allreduce.all_reduce(torch.ones(500), None, "direct", 64)
        assert bool((allreduce.all_reduce(torch.ones(500), None, "direct", 64) == 2).all())

    run_ranks(2, rank)


def test_options_come_from_the_table_or_from_the_size() -> None:
    assert choose_options(None, 1 << 10, 4, early_receives=True) == ("doubling", hierarchical.CHUNK_BYTES)
    assert choose_options(None, 1 << 23, 4, early_receives=True) == ("halving", hierarchical.CHUNK_BYTES)
    assert choose_options(None, 1 << 23, 6, early_receives=False) == ("direct", hierarchical.SEGMENT_BYTES)
    chosen = Choice("hierarchical", {"inter": "halving", "chunk": 4096})
    assert choose_options(chosen, 1 << 10, 4, early_receives=True) == ("halving", 4096)
    for wrong in ({"inter": "ring"}, {"chunk": 0}, {"chunk": "4096"}):
        with pytest.raises(YalisError, match="accepted: doubling, halving, direct, and a number of bytes; tune again"):
            choose_options(Choice("hierarchical", wrong), 1 << 10, 4, early_receives=True)


def test_candidate_options_are_valid() -> None:
    for size, count in ((1 << 10, 3), (1 << 20, 6), (1 << 24, 9)):
        offered = HierarchicalBackend.candidate_options(size)
        chosen = {choose_options(Choice("hierarchical", each), size, 4, early_receives=True) for each in offered}
        assert len(chosen) == len(offered) == count
        assert choose_options(None, size, 4, early_receives=True) in chosen
