"""The `torch` backend: gloo between CPUs, NCCL between GPUs.

Process groups are created directly and not registered with `torch.distributed`, so a default process group that other
code in the same process uses is not affected.
"""

from __future__ import annotations

import itertools
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from yalis import env
from yalis.comm.base import CommBackend, Communicator, SingleRank, counted
from yalis.comm.contiguous_group import ContiguousGroup
from yalis.comm.link_store import LinkStore
from yalis.comm.topology import Topology
from yalis.comm.tuning import TuningTable
from yalis.launch.heartbeat import Progress
from yalis.launch.link import listen
from yalis.launch.secret import new_secret, private_folder
from yalis.launch.world import World

dist: Any = torch.distributed  # its type stubs lack the process group classes

# Long, because a rank may wait for slow work of another. Dead ranks are found by the launcher's liveness check.
TIMEOUT = timedelta(minutes=30)
# A send blocks while more tensors than this are in flight.
MAX_PENDING_SENDS = 8
# Up to this many bytes sent per rank, gloo groups exchange messages directly instead of around a ring.
DIRECT_BYTES = 256 << 10
MESSAGE_TAG, EXCHANGE_TAG, FIRST_FREE_TAG = 0, 1, 2


class TorchGroup(ContiguousGroup):
    """Collectives shared by gloo and NCCL groups, and the point-to-point operations that custom all-reduces use."""

    #: whether a receive can be posted long before its send without blocking later operations
    early_receives: bool

    def __init__(self, group: Any, rank: int, size: int, progress: Progress) -> None:
        super().__init__(rank, size, progress)
        self._group = group
        self._pending_sends: deque[tuple[Any, Tensor]] = deque()
        self._tags = itertools.count(FIRST_FREE_TAG)

    def _all_reduce(self, x: Tensor) -> None:
        _wait(self._group.allreduce([x], _on_current_stream(dist.AllreduceOptions())))

    def _all_gather(self, x: Tensor, parts: Tensor) -> None:
        options = _on_current_stream(dist.distributed_c10d.AllgatherOptions())
        _wait(self._group._allgather_base(parts.view(-1), x.view(-1), options))

    def _broadcast(self, x: Tensor, source: int) -> None:
        options = _on_current_stream(dist.BroadcastOptions())
        options.rootRank, options.rootTensor = source, 0
        _wait(self._group.broadcast([x], options))

    def new_tag(self) -> int:
        """Return an unused tag. Ranks that call this in the same order get the same tags."""
        return next(self._tags)

    @abstractmethod
    def post(
        self, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]], tag: int
    ) -> Sequence[Any]:
        """Post these receives, then these sends. Returns handles to wait for before their tensors are reused."""

    def close(self, broken: bool) -> None:
        """Release the group; `broken`: a rank has died, so do not wait for others."""
        self._pending_sends.clear()
        self._group = None


class GlooGroup(TorchGroup):
    """A group of CPU ranks.

    Gloo's collectives use a ring, whose latency dominates for short messages. Those are sent from every rank to every
    other rank directly instead. Results are bitwise identical on all ranks either way: short sums are computed in rank
    order everywhere, and the ring sums each element on one rank.
    """

    capturable = False
    early_receives = True

    def _all_reduce(self, x: Tensor) -> None:
        if not self._is_short(x):
            return super()._all_reduce(x)
        parts = torch.empty((self.size, *x.shape), dtype=x.dtype)
        self._all_to_all(x, parts)
        torch.add(parts[0], parts[1], out=x)
        for part in parts[2:]:
            x += part

    def _all_gather(self, x: Tensor, parts: Tensor) -> None:
        (self._all_to_all if self._is_short(x) else super()._all_gather)(x, parts)

    def _is_short(self, x: Tensor) -> bool:
        return x.nbytes * (self.size - 1) <= DIRECT_BYTES

    def _all_to_all(self, x: Tensor, parts: Tensor) -> None:
        peers = [peer for peer in range(self.size) if peer != self.rank]
        works = [self._group.recv([parts[peer]], peer, EXCHANGE_TAG) for peer in peers]
        works += [self._group.send([x], peer, EXCHANGE_TAG) for peer in peers]
        parts[self.rank] = x
        for work in works:
            work.wait()

    def post(
        self, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]], tag: int
    ) -> Sequence[Any]:
        works = [self._group.recv([out], source, tag) for out, source in receives]
        return works + [self._group.send([x], to, tag) for x, to in sends]

    def _send(self, x: Tensor, to: int) -> None:
        self._pending_sends.append((self._group.send([x], to, MESSAGE_TAG), x))
        # Gloo's handles cannot be tested for completion, only waited for.
        while len(self._pending_sends) > MAX_PENDING_SENDS:
            self._pending_sends.popleft()[0].wait()

    def _recv(self, x: Tensor, source: int) -> None:
        self._group.recv([x], source, MESSAGE_TAG).wait()

    @counted
    def barrier(self) -> None:
        self._group.barrier().wait()


class NcclGroup(TorchGroup):
    """A group of GPU ranks. Collectives run on the current stream.

    CUDA graphs can capture the collectives, but not `send` and `recv`, and nothing if ranks share a GPU: there NCCL
    uses sockets and the host's help. Each direction between two ranks is a channel with its own communicator and
    stream, so a send that waits for its receiver blocks neither compute, nor collectives, nor the reverse direction.
    A channel is created by its first message, for which the sender waits for the receiver.
    """

    early_receives = False  # a receive occupies the stream until its message arrives

    def __init__(
        self, store: Any, device: torch.device, rank: int, size: int, progress: Progress, gpu_shared: bool
    ) -> None:
        super().__init__(_create_nccl(dist.PrefixStore("all", store), rank, size), rank, size, progress)
        self._store, self._device, self.capturable = store, device, not gpu_shared
        self._channels: dict[tuple[int, int], Any] = {}
        # NCCL connects in the first collective. Do that here, not inside a graph capture.
        self.barrier()

    def _sum_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return dtype  # NCCL sums low precisions itself

    def post(
        self, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]], tag: int
    ) -> Sequence[Any]:
        if not sends and not receives:
            return ()
        # Coalesced, so that NCCL runs them concurrently and on the communicator of the whole group.
        self._group._start_coalescing()
        for out, source in receives:
            self._group.recv([out], source, tag)
        for x, to in sends:
            self._group.send([x], to, tag)
        _wait(self._group._end_coalescing())
        return ()

    def _channel(self, source: int, to: int) -> Any:
        if (source, to) not in self._channels:
            store = dist.PrefixStore(f"{source} to {to}", self._store)
            self._channels[source, to] = _create_nccl(store, int(self.rank == to), 2)
        return self._channels[source, to]

    def _send(self, x: Tensor, to: int) -> None:
        self._pending_sends.append((self._channel(self.rank, to).send([x], 1, 0), x))
        # Not `wait`, which would block the current stream.
        while self._pending_sends:
            if self._pending_sends[0][0].is_completed():
                self._pending_sends.popleft()
            elif len(self._pending_sends) > MAX_PENDING_SENDS:
                time.sleep(1e-4)
            else:
                break

    def _recv(self, x: Tensor, source: int) -> None:
        self._channel(source, self.rank).recv([x], 0, 0).wait()

    def barrier(self) -> None:
        self.all_reduce(torch.zeros(1, device=self._device))
        torch.cuda.current_stream(self._device).synchronize()

    def close(self, broken: bool) -> None:
        # Shutdown waits for the other ranks, so all use the same order. Abort does not wait for dead ranks.
        for group in [*(self._channels[key] for key in sorted(self._channels)), self._group]:
            group.abort() if broken else group.shutdown()
        self._channels.clear()
        super().close(broken)


class TorchBackend(CommBackend):
    """Groups over gloo or NCCL. Every rank of the world creates one at the same time."""

    name = "torch"

    def __init__(
        self, world: World, device: torch.device, topology: Topology | None = None, table: TuningTable | None = None
    ) -> None:
        super().__init__(world, device, topology, table)
        self._groups: list[TorchGroup] = []
        self._store: Any = None
        self._store_path: Path | None = None  # of a FileStore
        if world.size > 1:
            gpu = _set_device(device) if device.type == "cuda" else None
            gpus = self._create_store(gpu)
            self._share_gpu = gpu is not None and len(set(gpus)) < len(gpus)
            if self._share_gpu:
                one_host = all(member.node == 0 for member in world.members)
                env.allow_nccl_gpu_sharing(world.rank, one_host)
            if gpu is None:
                self._gloo_device = dist.ProcessGroupGloo.create_device(hostname=world.members[world.rank].address)

    def _create_store(self, gpu: str | None) -> list[str | None]:
        """Create the key-value store for group rendezvous. Returns every rank's `gpu`."""
        if gpu is None:
            self._store = LinkStore(self.world)
            return [None] * self.world.size
        # Threads of NCCL's process groups read the store at any time, even while the interpreter exits, so this one
        # must not be written in Python.
        first = self.world.members[0]
        if all(member.node == first.node for member in self.world.members):
            path = str(private_folder() / f"{new_secret()}.store") if self.world.rank == 0 else ""
            exchanged = self.world.all_gather_object({"path": path, "gpu": gpu})
            self._store_path = Path(exchanged[0]["path"])
            self._store = dist.FileStore(exchanged[0]["path"], self.world.size)
            return [entry["gpu"] for entry in exchanged]
        port = None
        if self.world.rank == 0:
            # On the job's network only, but anyone there can read and write it: see docs/security.md.
            server = listen(first.address, 0)
            port = server.getsockname()[1]
            self._store = dist.TCPStore(
                first.address,
                port,
                is_master=True,
                wait_for_workers=False,
                timeout=TIMEOUT,
                master_listen_fd=server.detach(),
            )
        exchanged = self.world.all_gather_object({"port": port, "gpu": gpu})
        if self.world.rank != 0:
            self._store = dist.TCPStore(first.address, exchanged[0]["port"], wait_for_workers=False, timeout=TIMEOUT)
        return [entry["gpu"] for entry in exchanged]

    @classmethod
    def unusable(cls, world: World, device: torch.device) -> str | None:
        if device.type not in ("cpu", "cuda"):
            return f"the torch backend supports CPUs and CUDA GPUs, not {device.type}"
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
            group = NcclGroup(store, self.device, rank, len(ranks), self.world.progress, self._share_gpu)
        else:
            options = dist.ProcessGroupGloo._Options()
            options._devices, options._timeout = [self._gloo_device], TIMEOUT
            gloo = dist.ProcessGroupGloo(store, rank, len(ranks), options)
            group = GlooGroup(gloo, rank, len(ranks), self.world.progress)
        self._groups.append(group)
        return group

    def close(self) -> None:
        for group in self._groups:
            group.close(broken=self.world.failure is not None)
        self._groups.clear()
        if isinstance(self._store, LinkStore):
            self._store.close()
        self._store = None
        if self._store_path is not None and self.world.failure is not None:
            self._store_path.unlink(missing_ok=True)  # otherwise the last rank to drop its FileStore removes the file


def _create_nccl(store: Any, rank: int, size: int) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = TIMEOUT
    return dist.ProcessGroupNCCL(store, rank, size, options)


def _set_device(device: torch.device) -> str:
    """Make `device` the current one, as NCCL expects. Returns the UUID of its GPU."""
    torch.cuda.set_device(device)
    return str(torch.cuda.get_device_properties(device).uuid)


def _on_current_stream(options: Any) -> Any:
    """Set the options so that NCCL runs on the current stream instead of an internal one."""
    options.asyncOp = False
    return options


def _wait(work: Any) -> None:
    if work is not None:
        work.wait()
