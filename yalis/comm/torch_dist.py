"""torch's own collectives: gloo between CPUs, NCCL between GPUs.

Every group is a process group object of ours. Nothing is registered with `torch.distributed`, so whoever uses its
default group in the same process is not disturbed.
"""

from __future__ import annotations

import itertools
import socket
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from yalis import env
from yalis.comm.base import CommBackend, Communicator, SingleRank
from yalis.comm.contiguous_group import ContiguousGroup
from yalis.comm.topology import Topology
from yalis.comm.tuning import TuningTable
from yalis.launch.world import World

dist: Any = torch.distributed  # whose stubs lack the process group classes

# Long: a rank may wait for another's slow work. A dead one breaks its connections, and the launch room's watch sees it.
PATIENCE = timedelta(minutes=30)
# How many sent tensors may be under way before a further send waits for the oldest.
BACKLOG = 8
# Up to how many bytes in all a rank sends the same message to every other one itself.
SHORT = 256 << 10
MESSAGE_TAG, EXCHANGE_TAG, FIRST_TAG = 0, 1, 2


class TorchGroup(ContiguousGroup):
    """The collectives, which gloo and NCCL share, and what an all-reduce of our own needs of them."""

    #: whether a receive may be posted long before its message is sent, and without holding up what follows
    early: bool

    def __init__(self, group: Any, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._group = group
        self._sent: deque[tuple[Any, Tensor]] = deque()
        self._tags = itertools.count(FIRST_TAG)

    def _sum(self, x: Tensor) -> None:
        _finish(self._group.allreduce([x], _here(dist.AllreduceOptions())))

    def _gather(self, x: Tensor, parts: Tensor) -> None:
        options = _here(dist.distributed_c10d.AllgatherOptions())
        _finish(self._group._allgather_base(parts.view(-1), x.view(-1), options))

    def _spread(self, x: Tensor, source: int) -> None:
        options = _here(dist.BroadcastOptions())
        options.rootRank, options.rootTensor = source, 0
        _finish(self._group.broadcast([x], options))

    def new_tag(self) -> int:
        """One that nothing else uses; the same on all ranks that ask in the same order."""
        return next(self._tags)

    @abstractmethod
    def begin(
        self, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]], tag: int
    ) -> Sequence[Any]:
        """Post these receives, then these sends; returns what is to be waited for before their tensors are touched."""

    def close(self, broken: bool) -> None:
        """Let go; `broken` when some rank is gone."""
        self._sent.clear()
        self._group = None


class GlooGroup(TorchGroup):
    """A group of CPU ranks.

    Gloo passes everything around a ring, which for short messages is mostly waiting for the next rank: those go from
    every rank to every rank at once. All have the same bits either way, since a short sum is taken in order of rank
    everywhere, and the ring sums each element on one rank and passes it on.
    """

    capturable = False
    early = True

    def _sum(self, x: Tensor) -> None:
        if not self._short(x):
            return super()._sum(x)
        parts = torch.empty((self.size, *x.shape), dtype=x.dtype)
        self._exchange(x, parts)
        torch.add(parts[0], parts[1], out=x)
        for part in parts[2:]:
            x += part

    def _gather(self, x: Tensor, parts: Tensor) -> None:
        (self._exchange if self._short(x) else super()._gather)(x, parts)

    def _short(self, x: Tensor) -> bool:
        return x.nbytes * (self.size - 1) <= SHORT

    def _exchange(self, x: Tensor, parts: Tensor) -> None:
        peers = [peer for peer in range(self.size) if peer != self.rank]
        works = [self._group.recv([parts[peer]], peer, EXCHANGE_TAG) for peer in peers]
        works += [self._group.send([x], peer, EXCHANGE_TAG) for peer in peers]
        parts[self.rank] = x
        for work in works:
            work.wait()

    def begin(
        self, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]], tag: int
    ) -> Sequence[Any]:
        works = [self._group.recv([out], source, tag) for out, source in receives]
        return works + [self._group.send([x], to, tag) for x, to in sends]

    def _post(self, x: Tensor, to: int) -> None:
        self._sent.append((self._group.send([x], to, MESSAGE_TAG), x))
        # Gloo's handles do not say whether they are complete; they can only be waited for.
        while len(self._sent) > BACKLOG:
            self._sent.popleft()[0].wait()

    def _await(self, x: Tensor, source: int) -> None:
        self._group.recv([x], source, MESSAGE_TAG).wait()

    def barrier(self) -> None:
        self._group.barrier().wait()


class NcclGroup(TorchGroup):
    """A group of GPU ranks. Collectives run on the current stream; CUDA graphs may capture them, not `send` and `recv`,
    and not where ranks share a GPU, between which NCCL uses sockets and the host's help.

    Each direction between two ranks is a channel with a communicator and a stream of its own: a send that waits for its
    receiver holds up neither computing, nor collectives, nor what comes the other way. A channel is made by its first
    message, for which the sender waits for the receiver.
    """

    early = False  # a receive takes its place on the stream

    def __init__(self, store: Any, device: torch.device, rank: int, size: int, shared: bool) -> None:
        super().__init__(_nccl(dist.PrefixStore("all", store), rank, size), rank, size)
        self._store, self._device, self.capturable = store, device, not shared
        self._channels: dict[tuple[int, int], Any] = {}
        # NCCL connects in the first collective: better here, where all ranks are, than inside a graph capture.
        self.barrier()

    def _wide(self, dtype: torch.dtype) -> torch.dtype:
        return dtype  # NCCL's kernels take low precisions as they are

    def begin(
        self, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]], tag: int
    ) -> Sequence[Any]:
        if not sends and not receives:
            return ()
        # As one call, NCCL runs them side by side, and on the communicator of the whole group.
        self._group._start_coalescing()
        for out, source in receives:
            self._group.recv([out], source, tag)
        for x, to in sends:
            self._group.send([x], to, tag)
        _finish(self._group._end_coalescing())
        return ()

    def _channel(self, source: int, to: int) -> Any:
        if (source, to) not in self._channels:
            store = dist.PrefixStore(f"{source} to {to}", self._store)
            self._channels[source, to] = _nccl(store, int(self.rank == to), 2)
        return self._channels[source, to]

    def _post(self, x: Tensor, to: int) -> None:
        self._sent.append((self._channel(self.rank, to).send([x], 1, 0), x))
        # Not `wait`, which would hold up the current stream.
        while self._sent:
            if self._sent[0][0].is_completed():
                self._sent.popleft()
            elif len(self._sent) > BACKLOG:
                time.sleep(1e-4)
            else:
                break

    def _await(self, x: Tensor, source: int) -> None:
        self._channel(source, self.rank).recv([x], 0, 0).wait()

    def barrier(self) -> None:
        self.all_reduce(torch.zeros(1, device=self._device))
        torch.cuda.current_stream(self._device).synchronize()

    def close(self, broken: bool) -> None:
        # Leaving waits for the others, so all go through the channels in one order, and nobody waits for a dead rank.
        for group in [*(self._channels[key] for key in sorted(self._channels)), self._group]:
            group.abort() if broken else group.shutdown()
        self._channels.clear()
        super().close(broken)


class TorchBackend(CommBackend):
    """Groups over gloo or NCCL. Every rank of the world makes one, at the same time."""

    name = "torch"

    def __init__(
        self, world: World, device: torch.device, topology: Topology | None = None, table: TuningTable | None = None
    ) -> None:
        super().__init__(world, device, topology, table)
        self._groups: list[TorchGroup] = []
        self._store: Any = None
        if world.size > 1:
            gpu = _bind(device) if device.type == "cuda" else None
            gpus = self._meet(gpu)
            self._shared = gpu is not None and len(set(gpus)) < len(gpus)
            if self._shared:
                one_host = all(member.node == 0 for member in world.members)
                env.allow_nccl_gpu_sharing(world.rank, one_host)
            if gpu is None:
                self._gloo_device = dist.ProcessGroupGloo.create_device(hostname=world.members[world.rank].address)

    def _meet(self, gpu: str | None) -> list[str | None]:
        """Make the store through which groups find each other, in rank 0; returns everyone's `gpu`."""
        address = self.world.members[0].address
        port = None
        if self.world.rank == 0:
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            server = socket.create_server((address, 0), family=family, backlog=self.world.size)
            port = server.getsockname()[1]
            self._store = dist.TCPStore(
                address,
                port,
                is_master=True,
                wait_for_workers=False,
                timeout=PATIENCE,
                master_listen_fd=server.detach(),
            )
        told = self.world.all_gather_object({"port": port, "gpu": gpu})
        if self.world.rank != 0:
            self._store = dist.TCPStore(address, told[0]["port"], wait_for_workers=False, timeout=PATIENCE)
        return [entry["gpu"] for entry in told]

    @classmethod
    def unusable(cls, world: World, device: torch.device) -> str | None:
        if device.type not in ("cpu", "cuda"):
            return f"torch joins CPUs and CUDA GPUs, not {device.type}"
        if device.type == "cpu" and not (dist.is_available() and dist.is_gloo_available()):
            return "this torch was built without gloo"
        if device.type == "cuda" and not (dist.is_available() and dist.is_nccl_available()):
            return "this torch was built without NCCL"
        return None

    def group(self, name: str, ranks: Sequence[int]) -> Communicator:
        if len(ranks) == 1:
            return SingleRank()
        rank = list(ranks).index(self.world.rank)
        store = dist.PrefixStore(name, self._store)
        group: TorchGroup
        if self.device.type == "cuda":
            group = NcclGroup(store, self.device, rank, len(ranks), self._shared)
        else:
            options = dist.ProcessGroupGloo._Options()
            options._devices, options._timeout = [self._gloo_device], PATIENCE
            group = GlooGroup(dist.ProcessGroupGloo(store, rank, len(ranks), options), rank, len(ranks))
        self._groups.append(group)
        return group

    def close(self) -> None:
        for group in self._groups:
            group.close(broken=self.world.failure is not None)
        self._groups.clear()
        self._store = None


def _nccl(store: Any, rank: int, size: int) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = PATIENCE
    return dist.ProcessGroupNCCL(store, rank, size, options)


def _bind(device: torch.device) -> str:
    """Make `device` the current one, which NCCL uses; returns what tells its GPU from every other."""
    torch.cuda.set_device(device)
    return str(torch.cuda.get_device_properties(device).uuid)


def _here(options: Any) -> Any:
    """Options that ask NCCL to run on the current stream, not on one of its own."""
    options.asyncOp = False
    return options


def _finish(work: Any) -> None:
    if work is not None:
        work.wait()
