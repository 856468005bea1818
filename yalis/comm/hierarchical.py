"""The hierarchical all-reduce between any ranks that can send to each other: `schedule.py` carried out on tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor

from yalis.comm.base import Communicator
from yalis.comm.contiguous_group import LOW_PRECISION
from yalis.comm.custom_allreduce import CustomAllReduceBackend, CustomAllReduceGroup
from yalis.comm.schedule import INTER_NODE, Nodes, Plan, Span, Step, plan
from yalis.comm.shared_memory import LIMIT, SharedWindows, open_shared_windows
from yalis.comm.torch_dist import TorchGroup
from yalis.comm.tuning import Choice, ShapeTimings
from yalis.errors import YalisError

# Unless a table says otherwise: up to how many bytes of a message the fewest exchanges win over the fewest bytes.
DOUBLING_BYTES = 256 << 10
# And how many bytes go into one message between nodes at most, so that the next one's way overlaps with adding it. A
# message costs gloo a good deal, so short chunks have to be measured to be better.
CHUNK_BYTES = 4 << 20
SHORTER_CHUNKS = (256 << 10, 1 << 20)
# Longer tensors are summed stretch by stretch, which bounds the memory that receives need.
STRETCH_BYTES = 16 << 20
# Receives stand ready for this many kinds of all-reduces of at most so many bytes.
STANDING, STANDING_BYTES = 64, 1 << 20
MAX_SEEN = 1 << 16

Kind = tuple[torch.dtype, str, int, int]  # dtype, schedule, elements, elements of a chunk


class Pending(Protocol):
    def wait(self) -> object: ...


class Transport(Protocol):
    """Sends and receives between ranks; from one rank to another, those of one tag meet in the order of posting."""

    #: whether a receive may be posted long before its message is sent, and without holding up what follows
    early: bool

    def new_tag(self) -> int:
        """One that nothing else uses; the same on all ranks that ask in the same order."""

    def begin(
        self, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]], tag: int
    ) -> Sequence[Pending]:
        """Post these receives, then these sends; returns what is to be waited for before their tensors are touched."""


class Run:
    """A plan carried out on a transport, once or over and over; steps among neighbours go through shared memory.

    A message leaves when its receiver is known to be ready, and that word takes as long as a message. So where receives
    may be early, all of a run are posted at its beginning, and those into memory of its own again once that is free:
    the next run's first messages then wait for no word.
    """

    def __init__(
        self, transport: Transport, plan: Plan, tag: int, dtype: torch.dtype, device: torch.device,
        neighbours: SharedWindows | None = None,
    ) -> None:  # fmt: skip
        self.transport, self.plan, self.tag, self.neighbours = transport, plan, tag, neighbours
        self.near = [neighbours is not None and step.peers <= neighbours.theirs.keys() for step in plan.moves]
        with torch.inference_mode(False):  # else this memory could only be written inside that mode
            memory = torch.empty(plan.scratch, dtype=dtype, device=device)
            self._halves = self._near_halves(dtype)
        #: for each move, where the terms of its sum are received and from whom; empty where nothing is added
        self.terms: list[list[tuple[Tensor, int]]] = []
        used = 0
        for step, near in zip(plan.moves, self.near, strict=True):
            self.terms.append([])
            for message in step.receives if step.own is not None and not near else ():
                start, used = used, used + message.span[1] - message.span[0]
                self.terms[-1].append((memory[start:used], message.peer))
        self._posted = [self._post(terms) for terms in self.terms]

    def __call__(self, x: Tensor, again: bool) -> None:
        """Every rank's flat `x` becomes their sum; `again`: this will be called again."""
        moves, lanes, early = self.plan.moves, self.plan.lanes, self.transport.early
        half = self._halves[self.neighbours.next_half()] if self.neighbours is not None else []
        inboxes = [
            terms
            if step.own is not None or near
            else [(x[slice(*message.span)], message.peer) for message in step.receives]
            for step, near, terms in zip(moves, self.near, self.terms, strict=True)
        ]
        waits = [
            posted if step.own is not None else self._post(inbox)
            for step, posted, inbox in zip(moves, self._posted, inboxes, strict=True)
        ]
        for turn in range(len(moves) + lanes):
            before = turn - lanes  # the same lane's step before
            if before >= 0 and self.near[before]:
                self._take(moves[before], half[before], x)
            elif before >= 0:
                # What it sends is out and what it receives is in, before either is written.
                for pending in waits[before]:
                    pending.wait()
                _add(moves[before], x, [term for term, _ in self.terms[before]])
            if turn < len(moves) and self.near[turn]:
                self._give(moves[turn], half[turn], x)
            elif turn < len(moves):
                sends = [(x[slice(*message.span)], message.peer) for message in moves[turn].sends]
                begun = self.transport.begin(sends, () if early else inboxes[turn], self.tag)
                waits[turn] = [*waits[turn], *begun]
            if before >= 0 and again:
                self._posted[before] = self._post(self.terms[before])

    def _post(self, inbox: Sequence[tuple[Tensor, int]]) -> Sequence[Pending]:
        return self.transport.begin((), inbox, self.tag) if inbox and self.transport.early else ()

    def _near_halves(self, dtype: torch.dtype) -> list[list[Near | None]]:
        """For each half of the windows and each move: what of them it writes and reads."""
        if self.neighbours is None:
            return []
        mine, theirs = self.neighbours.mine, self.neighbours.theirs
        halves: list[list[Near | None]] = []
        for half in (0, 1):
            own = mine[half].view(dtype)
            others = {peer: window[half].view(dtype) for peer, window in theirs.items()}
            halves.append([
                Near(
                    {message.span: own[slice(*message.span)] for message in step.sends},
                    [others[message.peer][slice(*message.span)] for message in step.receives],
                )
                if near
                else None
                for step, near in zip(self.plan.moves, self.near, strict=True)
            ])  # fmt: skip
        return halves

    def _give(self, step: Step, near: Near | None, x: Tensor) -> None:
        assert near is not None
        assert self.neighbours is not None
        for span, place in near.written.items():
            place.copy_(x[slice(*span)])
        for message in step.sends:
            self.neighbours.tell(message.peer)

    def _take(self, step: Step, near: Near | None, x: Tensor) -> None:
        assert near is not None
        assert self.neighbours is not None
        for message in step.receives:
            self.neighbours.hear(message.peer)
        if step.own is not None:
            _add(step, x, near.read)
            return
        for message, place in zip(step.receives, near.read, strict=True):
            x[slice(*message.span)].copy_(place)


@dataclass(frozen=True)
class Near:
    """The parts of windows that a step among neighbours writes and reads."""

    written: dict[Span, Tensor]
    read: list[Tensor]


class Summing:
    """All-reduces of one rank over a transport.

    Low precisions travel as they are: the sum of each step is taken in float32 and rounded once.
    """

    def __init__(self, transport: Transport, nodes: Nodes, rank: int, neighbours: SharedWindows | None = None) -> None:
        self.transport, self._neighbours = transport, neighbours
        self._stretch = STRETCH_BYTES if neighbours is None else LIMIT
        self._plan = lru_cache(256)(lambda *how: plan(nodes, rank, *how))
        self._tag = transport.new_tag()
        self._standing: dict[Kind, Run] = {}
        self._seen: set[Kind] = set()

    def all_reduce(self, x: Tensor, out: Tensor | None, between: str, chunk: int) -> Tensor:
        """The sum of every rank's `x`, in `out` if given, else in `x`; messages between nodes hold `chunk` bytes."""
        target = x if out is None else out
        fits = target.is_contiguous() and target.dtype == x.dtype
        buffer = target if fits else torch.empty(x.shape, dtype=x.dtype, device=x.device)
        if buffer is not x:
            buffer.copy_(x)
        if x.numel():
            for stretch in buffer.view(-1).split(self._stretch // x.itemsize):
                self._sum(stretch, between, chunk // x.itemsize)
        return target if buffer is target else target.copy_(buffer)

    def _sum(self, x: Tensor, between: str, chunk: int) -> None:
        kind = x.dtype, between, x.numel(), chunk
        run = self._standing.get(kind)
        if run is not None:
            return run(x, again=True)
        plan = self._plan(between, x.numel(), chunk)
        # A kind that comes a second time will come again; a prompt's length may not.
        stands = kind in self._seen and len(self._standing) < STANDING
        if self.transport.early and x.nbytes <= STANDING_BYTES and len(self._seen) < MAX_SEEN:
            self._seen.add(kind)
        tag = self.transport.new_tag() if stands else self._tag
        run = Run(self.transport, plan, tag, x.dtype, x.device, self._neighbours)
        if stands:
            self._standing[kind] = run
        run(x, again=stands)


def _add(step: Step, x: Tensor, terms: list[Tensor]) -> None:
    """The sum of what this rank has and of `terms`, in order of ranks, where that belongs in `x`."""
    if not terms or step.own is None:
        return
    own = x[slice(*step.receives[0].span)]
    before, after = terms[: step.own], terms[step.own :]
    if len(terms) > 1 and x.dtype in LOW_PRECISION:
        first, others = (before[0], [*before[1:], own, *after]) if before else (own, after)
        total = first.float()
        for term in others:
            total += term
        own.copy_(total)
        return
    if before:
        first = before[0] + before[1] if len(before) > 1 else before[0]
        for term in before[2:]:
            first += term
        own += first
    for term in after:
        own += term


class HierarchicalGroup(CustomAllReduceGroup):
    """Sums over torch's sends and receives, each as the table says for its size."""

    def __init__(self, under: TorchGroup, nodes: Nodes, tuned: ShapeTimings, neighbours: SharedWindows | None) -> None:
        super().__init__(under)
        self.capturable = False  # made of sends and receives
        self._summing = Summing(under, nodes, self.rank, neighbours)
        self._options = lru_cache(256)(
            lambda size: options(tuned.best(size, "hierarchical"), size, len(nodes), under.early)
        )

    def all_reduce(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        return self._summing.all_reduce(x, out, *self._options(x.nbytes))

    def all_reduce_with(self, x: Tensor, out: Tensor, **options: int | str) -> Tensor:
        """For benchmarks: with these options."""
        return self._summing.all_reduce(x, out, str(options["between"]), int(options["chunk"]))


class HierarchicalBackend(CustomAllReduceBackend):
    name = "hierarchical"

    def _start(self) -> None:
        self._neighbours: list[SharedWindows] = []

    @staticmethod
    def candidate_options(size: int) -> list[dict[str, int | str]]:
        """What `yalis bench allreduce --tune` measures for messages of `size` bytes."""
        chunks = [*(chunk for chunk in SHORTER_CHUNKS if chunk < size), CHUNK_BYTES]
        return [{"between": between, "chunk": chunk} for between in INTER_NODE for chunk in chunks]

    def wrap_group(self, under: TorchGroup, name: str, ranks: Sequence[int]) -> Communicator:
        nodes = self.topology.by_node(ranks)
        place = {rank: index for index, rank in enumerate(ranks)}
        places = [[place[rank] for rank in node] for node in nodes]
        neighbours = None
        if self.device.type == "cpu" and any(len(node) > 1 for node in nodes):
            # A node may be a part of a machine, or, where a user says so, of several: those share no memory.
            mine = next(node for node in nodes if self.world.rank in node)
            one_machine = len({self.world.members[rank].node for rank in mine}) == 1
            neighbours = open_shared_windows(under, places[nodes.index(mine)], one_machine)
            if neighbours is not None:
                self._neighbours.append(neighbours)
        return HierarchicalGroup(under, places, self.table.for_nodes(nodes), neighbours)

    def close(self) -> None:
        for neighbours in self._neighbours:
            neighbours.close()
        super().close()


def options(choice: Choice | None, size: int, nodes: int, early: bool) -> tuple[str, int]:
    """The schedule between nodes and the bytes of a chunk, for a message of `size` bytes."""
    chosen = choice.options if choice is not None else {}
    long = "halving" if nodes.bit_count() == 1 else "direct"  # which needs no node to hand its part to another
    between = chosen.get("between", "doubling" if size <= DOUBLING_BYTES else long)
    # Where receives cannot wait aside, nothing overlaps and chunks only cost.
    chunk = chosen.get("chunk", CHUNK_BYTES if early else STRETCH_BYTES)
    if between not in INTER_NODE or not isinstance(chunk, int) or chunk < 1:
        raise YalisError(
            f"the table of `yalis bench allreduce --tune` asks for hierarchical with between={between!r}, "
            f"chunk={chunk!r}; accepted: {', '.join(INTER_NODE)}, and a number of bytes; tune again"
        )
    return str(between), chunk
