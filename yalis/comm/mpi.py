"""The `mpi` backend: MPI collectives through mpi4py, between ranks started by mpirun."""

from __future__ import annotations

import shutil
import threading
import time
import zlib
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from yalis import env
from yalis.comm.base import CommBackend, Communicator, SingleRank, counted
from yalis.comm.contiguous_group import ContiguousGroup
from yalis.comm.topology import Topology
from yalis.comm.tuning import TuningTable
from yalis.errors import first_line
from yalis.launch.heartbeat import Progress
from yalis.launch.launchers import OPEN_MPI, launch_command
from yalis.launch.world import World

# A send blocks while more messages than this are in flight.
MAX_PENDING_SENDS = 8
# Tags for group creation must be small. Collisions are harmless: all ranks create groups in the same order.
NUM_TAGS = 32749
# MPI lacks some dtypes (bfloat16). For collectives that only copy, use an integer type of the same size.
INTEGER_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class PendingSends:
    """Sends in flight. MPI may progress a large message only inside MPI calls, so a thread polls until it is sent."""

    def __init__(self) -> None:
        self._requests: list[tuple[Any, Tensor]] = []
        self._changed = threading.Condition()
        self._error: Exception | None = None
        self._thread: threading.Thread | None = None

    def add(self, request: Any, x: Tensor) -> None:
        if request.Test():
            return
        with self._changed:
            self._requests.append((request, x))
            self._changed.notify_all()
            if self._thread is None:
                self._thread = threading.Thread(target=self._poll, name="yalis-mpi-sends", daemon=True)
                self._thread.start()
            while len(self._requests) > MAX_PENDING_SENDS and self._error is None:
                self._changed.wait()
            if self._error is not None:
                raise self._error

    def _poll(self) -> None:
        while True:
            with self._changed:
                while not self._requests:
                    self._changed.wait()
                try:
                    self._requests = [(request, x) for request, x in self._requests if not request.Test()]
                except Exception as error:
                    self._error = error
                self._changed.notify_all()
                if self._error is not None:
                    return
            time.sleep(1e-4)


class MpiGroup(ContiguousGroup):
    """A group over one MPI communicator. GPU tensors are staged through pinned host memory.

    The MPI standard requires that all ranks receive identical results from an all-reduce.
    """

    capturable = False

    def __init__(self, mpi: Any, comm: Any, pending_sends: PendingSends, progress: Progress) -> None:
        super().__init__(comm.Get_rank(), comm.Get_size(), progress)
        self._mpi, self._comm, self._pending_sends = mpi, comm, pending_sends

    def _buffer(self, shape: tuple[int, ...], dtype: torch.dtype, like: Tensor) -> Tensor:
        return torch.empty(shape, dtype=dtype, pin_memory=like.is_cuda)

    def _can_access(self, x: Tensor) -> bool:
        return x.device.type == "cpu"

    def _all_reduce(self, x: Tensor) -> None:
        self._comm.Allreduce(self._mpi.IN_PLACE, x.detach().numpy(), op=self._mpi.SUM)

    def _all_gather(self, x: Tensor, parts: Tensor) -> None:
        self._comm.Allgather(_as_numpy(x), _as_numpy(parts))

    def _broadcast(self, x: Tensor, source: int) -> None:
        self._comm.Bcast(_as_numpy(x), root=source)

    def _send(self, x: Tensor, to: int) -> None:
        self._pending_sends.add(self._comm.Isend(_as_numpy(x), dest=to), x)

    def _recv(self, x: Tensor, source: int) -> None:
        self._comm.Recv(_as_numpy(x), source=source)

    @counted
    def barrier(self) -> None:
        self._comm.Barrier()


class MpiBackend(CommBackend):
    """Groups of the ranks of one mpirun job; MPI ranks must equal the world's ranks."""

    name = "mpi"

    def __init__(
        self, world: World, device: torch.device, topology: Topology | None = None, table: TuningTable | None = None
    ) -> None:
        super().__init__(world, device, topology, table)
        self._pending_sends = PendingSends()

    @classmethod
    def unusable(cls, world: World, device: torch.device) -> str | None:
        if find_spec("mpi4py") is None:
            return "mpi4py is not installed (pip install mpi4py)"
        if world.size == 1:
            return None
        if not env.variables().keys() & {"OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "PMI_RANK"}:
            # Do not initialize MPI here: without mpirun, each process would become an MPI job of its own.
            if shutil.which(OPEN_MPI.name) is None:
                return "mpirun did not start these ranks, and is not installed (on Debian: apt install openmpi-bin)"
            command = " ".join(launch_command(OPEN_MPI.name, world.size))
            return f"mpirun did not start these ranks (type {command} before the same command)"
        try:
            from mpi4py import MPI
        except (ImportError, RuntimeError) as error:
            return f"mpi4py found no MPI library ({first_line(error)})"
        mpi_rank, mpi_size = MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()
        if (mpi_rank, mpi_size) != (world.rank, world.size):
            return (
                f"MPI reports rank {mpi_rank} of {mpi_size}, but this is rank {world.rank} of {world.size}, "
                "so mpi4py uses a different MPI library than the launcher"
            )
        if MPI.Query_thread() != MPI.THREAD_MULTIPLE:
            return "this MPI library does not support calls from several threads (MPI_THREAD_MULTIPLE)"
        return None

    def group(self, name: str, ranks: Sequence[int]) -> Communicator:
        if len(ranks) == 1:
            return SingleRank()
        from mpi4py import MPI

        members = MPI.COMM_WORLD.group.Incl(list(ranks))
        comm = MPI.COMM_WORLD.Create_group(members, tag=zlib.crc32(name.encode()) % NUM_TAGS)
        return MpiGroup(MPI, comm, self._pending_sends, self.world.progress)


def _as_numpy(x: Tensor) -> Any:
    """Return a NumPy view of the bits of `x`, as integers of the same size."""
    return x.detach().view(INTEGER_OF_SIZE[x.element_size()]).numpy()
