"""The `hierarchical` backend: executes the schedules of `schedule.py` on tensors, over any point-to-point transport."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor

from yalis.comm.base import Communicator, counted
from yalis.comm.contiguous_group import LOW_PRECISION
from yalis.comm.custom_allreduce import CustomAllReduceBackend, CustomAllReduceGroup
from yalis.comm.schedule import INTER_NODE, Nodes, Schedule, Span, Step, make_schedule
from yalis.comm.shared_memory import HALF_BYTES, SharedWindows, open_shared_windows
from yalis.comm.torch_dist import TorchGroup
from yalis.comm.tuning import Choice, ShapeTimings
from yalis.errors import YalisError

# Without a tuning table: recursive doubling (fewest rounds) up to this message size, fewest bytes above.
DOUBLING_BYTES = 256 << 10
# Without a tuning table: bytes per inter-node message. Chunks overlap transfers with additions, but gloo's cost per
# message is high, so shorter chunks are used only if tuning measured them to be faster.
CHUNK_BYTES = 4 << 20
SHORTER_CHUNKS = (256 << 10, 1 << 20)
# Longer tensors are reduced segment by segment, which bounds the memory for receives.
SEGMENT_BYTES = 16 << 20
# Receives are persistent for up to this many distinct all-reduces of up to this many bytes.
MAX_PERSISTENT, MAX_PERSISTENT_BYTES = 64, 1 << 20
MAX_SEEN = 1 << 16

CallKey = tuple[torch.dtype, str, int, int]  # dtype, inter-node algorithm, elements, elements per chunk


class Pending(Protocol):
    def wait(self) -> object: ...


class Transport(Protocol):
    """Point-to-point messages. Between two ranks, messages of one tag match in the order they are posted."""

    #: whether a receive can be posted long before its send without blocking later operations
    early_receives: bool

    def new_tag(self) -> int:
        """Return an unused tag. Ranks that call this in the same order get the same tags."""

    def post(
        self, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]], tag: int
    ) -> Sequence[Pending]:
        """Post these receives, then these sends. Returns handles to wait for before their tensors are reused."""


class ScheduleRunner:
    """Runs one schedule on a transport, once or repeatedly. Intra-node steps use shared memory if `windows` is given.

    Gloo sends a message only after the receiver has reported a matching receive, which costs a network latency. So
    with `early_receives`, all receives are posted at the start of a run. Receives into scratch memory are persistent:
    they are posted again as soon as that memory is free, so the next run finds them ready.
    """

    def __init__(
        self, transport: Transport, schedule: Schedule, tag: int, dtype: torch.dtype, device: torch.device,
        windows: SharedWindows | None = None,
    ) -> None:  # fmt: skip
        self.transport, self.schedule, self.tag, self.windows = transport, schedule, tag, windows
        #: for each step, whether it goes through shared memory
        self.shared = [windows is not None and step.peers <= windows.peers.keys() for step in schedule.steps]
        with torch.inference_mode(False):  # inference tensors could not be written outside of inference mode
            memory = torch.empty(schedule.scratch, dtype=dtype, device=device)
            self._views = self._make_window_views(dtype)
        #: for each step, the scratch tensors that receive the terms to add, and their senders
        self.terms: list[list[tuple[Tensor, int]]] = []
        used = 0
        for step, shared in zip(schedule.steps, self.shared, strict=True):
            self.terms.append([])
            for message in step.receives if step.own_term is not None and not shared else ():
                start, used = used, used + message.span[1] - message.span[0]
                self.terms[-1].append((memory[start:used], message.peer))
        self._posted = [self._post_early(terms) for terms in self.terms]

    def __call__(self, x: Tensor, again: bool) -> None:
        """Sum the flat tensor `x` over all ranks in place. `again`: another call follows, so post its receives."""
        steps, num_chunks, early = self.schedule.steps, self.schedule.num_chunks, self.transport.early_receives
        views = self._views[self.windows.next_half()] if self.windows is not None else []
        receives = [
            terms
            if step.own_term is not None or shared
            else [(x[slice(*message.span)], message.peer) for message in step.receives]
            for step, shared, terms in zip(steps, self.shared, self.terms, strict=True)
        ]
        pending = [
            posted if step.own_term is not None else self._post_early(received)
            for step, posted, received in zip(steps, self._posted, receives, strict=True)
        ]
        for turn in range(len(steps) + num_chunks):
            done = turn - num_chunks  # the previous step of the same chunk, to be completed first
            if done >= 0 and self.shared[done]:
                self._read_shared(steps[done], views[done], x)
            elif done >= 0:
                # Its sends have left and its receives have arrived before either tensor is written.
                for handle in pending[done]:
                    handle.wait()
                _add(steps[done], x, [term for term, _ in self.terms[done]])
            if turn < len(steps) and self.shared[turn]:
                self._write_shared(steps[turn], views[turn], x)
            elif turn < len(steps):
                sends = [(x[slice(*message.span)], message.peer) for message in steps[turn].sends]
                handles = self.transport.post(sends, () if early else receives[turn], self.tag)
                pending[turn] = [*pending[turn], *handles]
            if done >= 0 and again:
                self._posted[done] = self._post_early(self.terms[done])

    def _post_early(self, receives: Sequence[tuple[Tensor, int]]) -> Sequence[Pending]:
        return self.transport.post((), receives, self.tag) if receives and self.transport.early_receives else ()

    def _make_window_views(self, dtype: torch.dtype) -> list[list[WindowViews | None]]:
        """Return, for each half of the windows and each step, the views it uses; None for steps of the transport."""
        if self.windows is None:
            return []
        views: list[list[WindowViews | None]] = []
        for half in (0, 1):
            own = self.windows.own[half].view(dtype)
            peers = {peer: window[half].view(dtype) for peer, window in self.windows.peers.items()}
            views.append([
                WindowViews(
                    {message.span: own[slice(*message.span)] for message in step.sends},
                    [peers[message.peer][slice(*message.span)] for message in step.receives],
                )
                if shared
                else None
                for step, shared in zip(self.schedule.steps, self.shared, strict=True)
            ])  # fmt: skip
        return views

    def _write_shared(self, step: Step, views: WindowViews | None, x: Tensor) -> None:
        assert views is not None
        assert self.windows is not None
        for span, view in views.sent.items():
            view.copy_(x[slice(*span)])
        for message in step.sends:
            self.windows.notify(message.peer)

    def _read_shared(self, step: Step, views: WindowViews | None, x: Tensor) -> None:
        assert views is not None
        assert self.windows is not None
        for message in step.receives:
            self.windows.wait_for(message.peer)
        if step.own_term is not None:
            _add(step, x, views.received)
            return
        for message, view in zip(step.receives, views.received, strict=True):
            x[slice(*message.span)].copy_(view)


@dataclass(frozen=True)
class WindowViews:
    """The parts of the shared-memory windows that a step writes and reads."""

    sent: dict[Span, Tensor]
    received: list[Tensor]


class HierarchicalAllReduce:
    """All-reduces of one rank over a transport.

    Low precisions are sent as they are. The sum of each step is computed in float32 and rounded once.
    """

    def __init__(self, transport: Transport, nodes: Nodes, rank: int, windows: SharedWindows | None = None) -> None:
        self.transport, self._windows = transport, windows
        self._segment = SEGMENT_BYTES if windows is None else HALF_BYTES
        self._schedule = lru_cache(256)(lambda *how: make_schedule(nodes, rank, *how))
        self._tag = transport.new_tag()
        self._persistent: dict[CallKey, ScheduleRunner] = {}
        self._seen: set[CallKey] = set()

    def all_reduce(self, x: Tensor, out: Tensor | None, inter: str, chunk: int) -> Tensor:
        """Sum `x` over all ranks into `out`, or in place if None, with inter-node messages of `chunk` bytes."""
        target = x if out is None else out
        in_place = target.is_contiguous() and target.dtype == x.dtype
        buffer = target if in_place else torch.empty(x.shape, dtype=x.dtype, device=x.device)
        if buffer is not x:
            buffer.copy_(x)
        if x.numel():
            for segment in buffer.view(-1).split(self._segment // x.itemsize):
                self._all_reduce(segment, inter, chunk // x.itemsize)
        return target if buffer is target else target.copy_(buffer)

    def _all_reduce(self, x: Tensor, inter: str, chunk: int) -> None:
        key = x.dtype, inter, x.numel(), chunk
        runner = self._persistent.get(key)
        if runner is not None:
            return runner(x, again=True)
        schedule = self._schedule(inter, x.numel(), chunk)
        # Sizes seen twice are expected to repeat (decode steps). A prompt's length may never occur again.
        persistent = key in self._seen and len(self._persistent) < MAX_PERSISTENT
        if self.transport.early_receives and x.nbytes <= MAX_PERSISTENT_BYTES and len(self._seen) < MAX_SEEN:
            self._seen.add(key)
        tag = self.transport.new_tag() if persistent else self._tag
        runner = ScheduleRunner(self.transport, schedule, tag, x.dtype, x.device, self._windows)
        if persistent:
            self._persistent[key] = runner
        runner(x, again=persistent)


def _add(step: Step, x: Tensor, terms: list[Tensor]) -> None:
    """Add `terms` to this rank's data in the step's span of `x`, in rank order."""
    if not terms or step.own_term is None:
        return
    own = x[slice(*step.receives[0].span)]
    before, after = terms[: step.own_term], terms[step.own_term :]
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
    """All-reduce over torch's sends and receives, with the tuned options for each message size."""

    def __init__(
        self, torch_group: TorchGroup, nodes: Nodes, timings: ShapeTimings, windows: SharedWindows | None
    ) -> None:
        super().__init__(torch_group)
        self.capturable = False  # CUDA graphs cannot capture sends and receives
        self._impl = HierarchicalAllReduce(torch_group, nodes, self.rank, windows)
        self._options = lru_cache(256)(
            lambda size: choose_options(
                timings.best(size, "hierarchical"), size, len(nodes), torch_group.early_receives
            )
        )

    @counted
    def all_reduce(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        return self._impl.all_reduce(x, out, *self._options(x.nbytes))

    def all_reduce_with(self, x: Tensor, out: Tensor, **options: int | str) -> Tensor:
        """Run an all-reduce with these options, for benchmarks."""
        return self._impl.all_reduce(x, out, str(options["inter"]), int(options["chunk"]))


class HierarchicalBackend(CustomAllReduceBackend):
    name = "hierarchical"

    def _initialize(self) -> None:
        self._windows: list[SharedWindows] = []

    @staticmethod
    def candidate_options(size: int) -> list[dict[str, int | str]]:
        """Return the options that `yalis bench allreduce --tune` measures for messages of `size` bytes."""
        chunks = [*(chunk for chunk in SHORTER_CHUNKS if chunk < size), CHUNK_BYTES]
        return [{"inter": inter, "chunk": chunk} for inter in INTER_NODE for chunk in chunks]

    def wrap_group(self, torch_group: TorchGroup, name: str, ranks: Sequence[int]) -> Communicator:
        nodes = self.topology.by_node(ranks)
        group_rank = {rank: index for index, rank in enumerate(ranks)}
        group_nodes = [[group_rank[rank] for rank in node] for node in nodes]
        windows = None
        if self.device.type == "cpu" and any(len(node) > 1 for node in nodes):
            # With --ranks-per-node, a logical node can span several machines, which share no memory.
            own_node = next(node for node in nodes if self.world.rank in node)
            same_machine = len({self.world.members[rank].node for rank in own_node}) == 1
            windows = open_shared_windows(torch_group, group_nodes[nodes.index(own_node)], same_machine)
            if windows is not None:
                self._windows.append(windows)
        return HierarchicalGroup(torch_group, group_nodes, self.table.for_nodes(nodes), windows)

    def close(self) -> None:
        for windows in self._windows:
            windows.close()
        super().close()


def choose_options(choice: Choice | None, size: int, num_nodes: int, early_receives: bool) -> tuple[str, int]:
    """Return the inter-node algorithm and the bytes per chunk for a message of `size` bytes."""
    options = choice.options if choice is not None else {}
    fewest_bytes = "halving" if num_nodes.bit_count() == 1 else "direct"  # direct needs no folding
    inter = options.get("inter", "doubling" if size <= DOUBLING_BYTES else fewest_bytes)
    # Without early receives nothing overlaps, so chunks would only add messages.
    chunk = options.get("chunk", CHUNK_BYTES if early_receives else SEGMENT_BYTES)
    if inter not in INTER_NODE or not isinstance(chunk, int) or chunk < 1:
        raise YalisError(
            f"the table of `yalis bench allreduce --tune` has hierarchical with inter={inter!r}, chunk={chunk!r}; "
            f"accepted: {', '.join(INTER_NODE)}, and a number of bytes; tune again"
        )
    return str(inter), chunk
