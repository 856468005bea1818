"""The hierarchical all-reduce between any ranks that can send to each other: `schedule.py` carried out on tensors."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor

from yalis.comm.base import Communicator
from yalis.comm.contiguous import LOW_PRECISION
from yalis.comm.over_torch import OverTorch, OverTorchBackend
from yalis.comm.schedule import BETWEEN, Nodes, Plan, Step, plan
from yalis.comm.torch_dist import TorchGroup
from yalis.comm.tuning import Choice, Tuned
from yalis.errors import YalisError

# Unless a table says otherwise: up to how many bytes of a message the fewest exchanges win over the fewest bytes.
DOUBLING_BYTES = 256 << 10
# And how many bytes go into one message between nodes, where the next one's way overlaps with adding it.
CHUNK_BYTES = 128 << 10
CHUNKS_TO_TRY = (64 << 10, 128 << 10, 512 << 10)
# Longer tensors are summed stretch by stretch, which bounds the memory that receives need.
STRETCH_BYTES = 16 << 20


class Pending(Protocol):
    def wait(self) -> object: ...


class Transport(Protocol):
    """Sends and receives between ranks; from one rank to another, messages arrive in the order they were sent."""

    #: whether a receive may be posted long before its message is sent, and without holding up what follows
    early: bool

    def begin(self, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]]) -> Sequence[Pending]:
        """Post these receives, then these sends; returns what is to be waited for before their tensors are touched."""


class Summing:
    """All-reduces of one rank over a transport.

    Low precisions travel as they are: the sum of each step is taken in float32 and rounded once.
    """

    def __init__(self, transport: Transport, nodes: Nodes, rank: int) -> None:
        self.transport = transport
        self._plan = lru_cache(256)(lambda *how: plan(nodes, rank, *how))
        self._kept: dict[torch.dtype, Tensor] = {}

    def all_reduce(self, x: Tensor, out: Tensor | None, between: str, chunk: int) -> Tensor:
        """The sum of every rank's `x`, in `out` if given, else in `x`; messages between nodes hold `chunk` bytes."""
        target = x if out is None else out
        fits = target.is_contiguous() and target.dtype == x.dtype
        buffer = target if fits else torch.empty(x.shape, dtype=x.dtype, device=x.device)
        if buffer is not x:
            buffer.copy_(x)
        if x.numel():
            for stretch in buffer.view(-1).split(STRETCH_BYTES // x.itemsize):
                self._carry_out(self._plan(between, stretch.numel(), chunk // x.itemsize), stretch)
        return target if buffer is target else target.copy_(buffer)

    def _carry_out(self, plan: Plan, x: Tensor) -> None:
        begin, early = self.transport.begin, self.transport.early
        inboxes = self._inboxes(plan, x)
        waits = [[*begin((), inbox)] if early else [] for inbox in inboxes]
        for turn in range(len(plan.moves) + plan.lanes):
            if turn >= plan.lanes:
                # The lane's step before: what it sends is out and what it receives is in before either is written.
                before = turn - plan.lanes
                for pending in waits[before]:
                    pending.wait()
                self._add(plan.moves[before], x, [received for received, _ in inboxes[before]])
            if turn < len(plan.moves):
                sends = [(x[slice(*message.span)], message.peer) for message in plan.moves[turn].sends]
                waits[turn] += begin(sends, () if early else inboxes[turn])

    def _inboxes(self, plan: Plan, x: Tensor) -> list[list[tuple[Tensor, int]]]:
        """For each move, where its messages are received and from whom: in place, or aside if they are to be added."""
        scratch = self._memory(plan.scratch, x.dtype, x.device)
        used = 0
        inboxes = []
        for step in plan.moves:
            inbox = []
            for message in step.receives:
                start, stop = message.span
                if step.own is None:
                    inbox.append((x[start:stop], message.peer))
                else:
                    inbox.append((scratch[used : used + stop - start], message.peer))
                    used += stop - start
            inboxes.append(inbox)
        return inboxes

    def _add(self, step: Step, x: Tensor, received: list[Tensor]) -> None:
        if step.own is None or not received:
            return
        own = x[slice(*step.receives[0].span)]
        before, after = received[: step.own], received[step.own :]
        if len(received) > 1 and x.dtype in LOW_PRECISION:
            terms = [*before, own, *after]
            total = self._memory(own.numel(), torch.float32, x.device).copy_(terms[0])
            for term in terms[1:]:
                total += term
            own.copy_(total)
            return
        for term in before[1:]:
            before[0] += term
        for term in (*before[:1], *after):
            own += term

    def _memory(self, elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Kept from call to call on a CPU. A GPU's allocator does that itself, and knows of CUDA graphs."""
        if device.type != "cpu":
            return torch.empty(elements, dtype=dtype, device=device)
        if dtype not in self._kept or self._kept[dtype].numel() < elements:
            with torch.inference_mode(False):  # else it could only be written inside that mode
                self._kept[dtype] = torch.empty(elements, dtype=dtype)
        return self._kept[dtype][:elements]


class HierarchicalGroup(OverTorch):
    def __init__(self, under: TorchGroup, nodes: Nodes, tuned: Tuned) -> None:
        super().__init__(under)
        self._summing = Summing(under, nodes, self.rank)
        self._options = lru_cache(256)(lambda size: options(tuned.best(size, "hierarchical"), size, under.early))

    def all_reduce(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        return self._summing.all_reduce(x, out, *self._options(x.nbytes))


class HierarchicalBackend(OverTorchBackend):
    name = "hierarchical"

    @staticmethod
    def options_to_try(size: int) -> list[dict[str, int | str]]:
        """What `yalis bench allreduce --tune` measures for messages of `size` bytes."""
        chunks = [chunk for chunk in CHUNKS_TO_TRY if chunk < size] or [CHUNK_BYTES]
        return [{"between": between, "chunk": chunk} for between in BETWEEN for chunk in chunks]

    def over(self, under: TorchGroup, name: str, ranks: Sequence[int]) -> Communicator:
        nodes = self.topology.by_node(ranks)
        place = {rank: index for index, rank in enumerate(ranks)}
        return HierarchicalGroup(under, [[place[rank] for rank in node] for node in nodes], self.table.of(nodes))


def options(choice: Choice | None, size: int, early: bool) -> tuple[str, int]:
    """The schedule between nodes and the bytes of a chunk, for a message of `size` bytes."""
    chosen = choice.options if choice is not None else {}
    between = chosen.get("between", "doubling" if size <= DOUBLING_BYTES else "direct")
    # Where receives cannot wait aside, nothing overlaps and chunks only cost.
    chunk = chosen.get("chunk", CHUNK_BYTES if early else STRETCH_BYTES)
    if between not in BETWEEN or not isinstance(chunk, int) or chunk < 1:
        raise YalisError(
            f"the table of `yalis bench allreduce --tune` asks for hierarchical with between={between!r}, "
            f"chunk={chunk!r}; accepted: {', '.join(BETWEEN)}, and a number of bytes; tune again"
        )
    return str(between), chunk
