"""The contracts of communication: a Communicator speaks within one group of ranks, a CommBackend makes such groups."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from yalis.comm.topology import Topology
from yalis.comm.tuning import TuningTable
from yalis.launch.world import World
from yalis.registry import Registry


class Communicator(ABC):
    """Collectives over one explicit group of ranks, issued on the current stream.

    Every rank of the group ends an `all_reduce` with the same bits.
    """

    rank: int
    size: int
    #: whether a CUDA graph may capture an all_reduce; where not, the step runs uncaptured
    capturable: bool

    @property
    def gather_capturable(self) -> bool:
        """Whether it may capture the other collectives too."""
        return self.capturable

    @abstractmethod
    def all_reduce(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """The sum of every rank's `x`, in `out` if given, else in `x`."""

    @abstractmethod
    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        """Every rank's `x`, joined along `dim` in order of rank."""

    @abstractmethod
    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        """`x` of rank `source`, written into every rank's `x`."""

    @abstractmethod
    def send(self, x: Tensor, to: int) -> None:
        """Give `x` to rank `to`. Does not wait for it to arrive, so nobody may write into `x` afterwards."""

    @abstractmethod
    def recv(self, out: Tensor, source: int) -> Tensor:
        """What rank `source` sent, in `out`."""

    @abstractmethod
    def barrier(self) -> None: ...

    def workspace(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """A buffer this backend reduces without a copy, so that a matmul can write where the reduction reads."""
        return torch.empty(shape, dtype=dtype, device=device)


class SingleRank(Communicator):
    """A group of one: every collective is already done."""

    rank = 0
    size = 1
    capturable = True

    def all_reduce(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        return x if out is None else out.copy_(x)

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        return x

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        return x

    def send(self, x: Tensor, to: int) -> None:
        raise ValueError("a group of one has nobody to send to")

    def recv(self, out: Tensor, source: int) -> Tensor:
        raise ValueError("a group of one has nobody to receive from")

    def barrier(self) -> None:
        return None


class CommBackend(ABC):
    """One way of communicating between the ranks of a world on one kind of device."""

    name: ClassVar[str]
    #: whether what was measured of all-reduces matters to it
    uses_table: ClassVar[bool] = False

    def __init__(
        self, world: World, device: torch.device, topology: Topology | None = None, table: TuningTable | None = None
    ) -> None:
        """`table`: what was measured of all-reduces, equal on all ranks."""
        self.world, self.device = world, device
        self.topology, self.table = topology or Topology.of(world), table or TuningTable()

    @classmethod
    @abstractmethod
    def unusable(cls, world: World, device: torch.device) -> str | None:
        """Why this backend cannot join these ranks here, as a short clause; None when it can."""

    @abstractmethod
    def group(self, name: str, ranks: Sequence[int]) -> Communicator:
        """The group of these ranks of the world; each of them, and nobody else, calls this with the same arguments.

        A group of one is a SingleRank. Names are unique within a world.
        """

    def check(self) -> None:  # noqa: B027 - most backends raise where they fail
        """Raise if what was computed since may be wrong, because a device gave up waiting for another rank."""

    def close(self) -> None:  # noqa: B027 - not every backend holds something
        """Let go of every group."""


BACKENDS: Registry[type[CommBackend]] = Registry(
    "communication backend",
    {
        "torch": "yalis.comm.torch_dist:TorchBackend",
        "mpi": "yalis.comm.mpi:MpiBackend",
        "hierarchical": "yalis.comm.hierarchical:HierarchicalBackend",
        "nvrar": "yalis.comm.nvrar.group:NvrarBackend",
        "auto": "yalis.comm.auto:AutoBackend",
    },
)
