"""MPI's collectives, through mpi4py, between ranks that mpirun started."""

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
from yalis.comm.base import CommBackend, Communicator, SingleRank
from yalis.comm.contiguous_group import ContiguousGroup
from yalis.comm.topology import Topology
from yalis.comm.tuning import TuningTable
from yalis.errors import first_line
from yalis.launch.launchers import OPEN_MPI, launch_command
from yalis.launch.world import World

# How many messages may be under way before a further send waits for one of them.
BACKLOG = 8
# Tags of group creation must be small; the same groups are made in the same order everywhere, so equal ones do no harm.
TAGS = 32749
# For what is only moved, integers of the same size stand for numbers that MPI does not know.
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Outbox:
    """Messages under way. MPI may move a large one only while somebody calls it, so a thread does until it is out."""

    def __init__(self) -> None:
        self._under_way: list[tuple[Any, Tensor]] = []
        self._changed = threading.Condition()
        self._error: Exception | None = None
        self._thread: threading.Thread | None = None

    def add(self, request: Any, x: Tensor) -> None:
        if request.Test():
            return
        with self._changed:
            self._under_way.append((request, x))
            self._changed.notify_all()
            if self._thread is None:
                self._thread = threading.Thread(target=self._push, name="yalis-mpi-outbox", daemon=True)
                self._thread.start()
            while len(self._under_way) > BACKLOG and self._error is None:
                self._changed.wait()
            if self._error is not None:
                raise self._error

    def _push(self) -> None:
        while True:
            with self._changed:
                while not self._under_way:
                    self._changed.wait()
                try:
                    self._under_way = [(request, x) for request, x in self._under_way if not request.Test()]
                except Exception as error:
                    self._error = error
                self._changed.notify_all()
                if self._error is not None:
                    return
            time.sleep(1e-4)


class MpiGroup(ContiguousGroup):
    """A group over one MPI communicator. What is on a GPU goes through pinned memory of its host.

    MPI promises that all ranks receive identical results from a reduction.
    """

    capturable = False

    def __init__(self, mpi: Any, comm: Any, outbox: Outbox) -> None:
        super().__init__(comm.Get_rank(), comm.Get_size())
        self._mpi, self._comm, self._outbox = mpi, comm, outbox

    def _buffer(self, shape: tuple[int, ...], dtype: torch.dtype, like: Tensor) -> Tensor:
        return torch.empty(shape, dtype=dtype, pin_memory=like.is_cuda)

    def _reaches(self, x: Tensor) -> bool:
        return x.device.type == "cpu"

    def _sum(self, x: Tensor) -> None:
        self._comm.Allreduce(self._mpi.IN_PLACE, x.detach().numpy(), op=self._mpi.SUM)

    def _gather(self, x: Tensor, parts: Tensor) -> None:
        self._comm.Allgather(_bits(x), _bits(parts))

    def _spread(self, x: Tensor, source: int) -> None:
        self._comm.Bcast(_bits(x), root=source)

    def _post(self, x: Tensor, to: int) -> None:
        self._outbox.add(self._comm.Isend(_bits(x), dest=to), x)

    def _await(self, x: Tensor, source: int) -> None:
        self._comm.Recv(_bits(x), source=source)

    def barrier(self) -> None:
        self._comm.Barrier()


class MpiBackend(CommBackend):
    """Groups cut out of the ranks of one mpirun, which are numbered as the world's."""

    name = "mpi"

    def __init__(
        self, world: World, device: torch.device, topology: Topology | None = None, table: TuningTable | None = None
    ) -> None:
        super().__init__(world, device, topology, table)
        self._outbox = Outbox()

    @classmethod
    def unusable(cls, world: World, device: torch.device) -> str | None:
        if find_spec("mpi4py") is None:
            return "mpi4py is not installed (pip install mpi4py)"
        if world.size == 1:
            return None
        if not env.variables().keys() & {"OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "PMI_RANK"}:
            # MPI is not even asked: a process that no mpirun started would become an MPI job of its own.
            if shutil.which(OPEN_MPI.name) is None:
                return "mpirun did not start these ranks, and is not installed (on Debian: apt install openmpi-bin)"
            command = " ".join(launch_command(OPEN_MPI.name, world.size))
            return f"mpirun did not start these ranks (type {command} before the same command)"
        try:
            from mpi4py import MPI
        except (ImportError, RuntimeError) as error:
            return f"mpi4py found no MPI library ({first_line(error)})"
        place = MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()
        if place != (world.rank, world.size):
            return (
                f"MPI says rank {place[0]} of {place[1]} where the job has rank {world.rank} of {world.size}, "
                "so mpi4py uses another MPI than the launcher's"
            )
        if MPI.Query_thread() != MPI.THREAD_MULTIPLE:
            return "this MPI cannot be called from several threads"
        return None

    def group(self, name: str, ranks: Sequence[int]) -> Communicator:
        if len(ranks) == 1:
            return SingleRank()
        from mpi4py import MPI

        members = MPI.COMM_WORLD.group.Incl(list(ranks))
        comm = MPI.COMM_WORLD.Create_group(members, tag=zlib.crc32(name.encode()) % TAGS)
        return MpiGroup(MPI, comm, self._outbox)


def _bits(x: Tensor) -> Any:
    return x.detach().view(INTEGERS[x.element_size()]).numpy()
