"""Communication interfaces: a Communicator runs collectives in one group, a CommBackend creates groups."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from yalis.comm.topology import Topology
from yalis.comm.tuning import TuningTable
from yalis.errors import PeerLost, first_line
from yalis.kernels import ops
from yalis.launch.heartbeat import Progress
from yalis.launch.world import World
from yalis.registry import Registry

_Method = TypeVar("_Method", bound=Callable[..., Any])


class Communicator(ABC):
    """Collectives over one explicit group of ranks, issued on the current stream.

    `all_reduce` returns bitwise identical results on every rank of the group.
    """

    rank: int
    size: int
    #: of the rank: counts the collectives entered and left
    progress: Progress
    #: whether `all_reduce` can be part of a recorded step (a CUDA graph or a CPU recording); if not, steps run eagerly
    capturable: bool
    #: whether the kernels of all collectives start after the previous kernel of the stream has finished and end before
    #: a kernel that waits for them reads anything, as programmatic dependent launch needs (kernels/pdl.py)
    pdl_safe = False

    @property
    def gather_capturable(self) -> bool:
        """Whether a CUDA graph can capture the other collectives too."""
        return self.capturable

    @abstractmethod
    def all_reduce(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Sum `x` over all ranks into `out`, or in place if `out` is None. Returns the tensor that holds the sum."""

    def all_reduce_add_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Sum `x` [T, C] over all ranks, in place, and add `residual` [T, C].

        Returns (the RMSNorm of that, that), as ops.add_rms_norm. A backend may do all of it in one kernel.
        """
        return ops.add_rms_norm(self.all_reduce(x), residual, weight, eps)

    @abstractmethod
    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        """Return every rank's `x`, concatenated along `dim` in rank order."""

    @abstractmethod
    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        """Copy `x` of rank `source` into every rank's `x`."""

    @abstractmethod
    def send(self, x: Tensor, to: int) -> None:
        """Send `x` to rank `to`. Returns before delivery, so the caller must not write to `x` afterwards."""

    @abstractmethod
    def recv(self, out: Tensor, source: int) -> Tensor:
        """Receive a tensor from rank `source` into `out`."""

    @abstractmethod
    def barrier(self) -> None: ...

    def workspace(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a buffer that this backend reduces without a copy, for example as the output of a matmul."""
        return torch.empty(shape, dtype=dtype, device=device)


def counted(method: _Method) -> _Method:
    """Count calls of a communicator's method as collectives entered and left, and raise PeerLost where it fails.

    Backends raise RuntimeError if a connection breaks, which is usually a consequence of an error on another rank.
    """

    @functools.wraps(method)
    def call(self: Communicator, *args: Any, **kwargs: Any) -> Any:
        self.progress.entered += 1
        try:
            result = method(self, *args, **kwargs)
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error):
                raise
            raise PeerLost(f"a collective failed ({type(error).__name__}: {first_line(error)})") from error
        self.progress.left += 1
        return result

    return call  # type: ignore[return-value]


class SingleRank(Communicator):
    """A group with one rank: collectives return their input."""

    rank = 0
    size = 1
    capturable = True
    pdl_safe = True

    def all_reduce(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        return x if out is None else out.copy_(x)

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        return x

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        return x

    def send(self, x: Tensor, to: int) -> None:
        raise ValueError("cannot send within a group of one rank")

    def recv(self, out: Tensor, source: int) -> Tensor:
        raise ValueError("cannot receive within a group of one rank")

    def barrier(self) -> None:
        return None


class CommBackend(ABC):
    """Creates communication groups between the ranks of a world, for one device type."""

    name: ClassVar[str]
    #: whether this backend reads the table of tuned all-reduces
    uses_table: ClassVar[bool] = False

    def __init__(
        self, world: World, device: torch.device, topology: Topology | None = None, table: TuningTable | None = None
    ) -> None:
        """`table`: measured all-reduce times, identical on all ranks."""
        self.world, self.device = world, device
        self.topology, self.table = topology or Topology.of(world), table or TuningTable()

    @classmethod
    @abstractmethod
    def unusable(cls, world: World, device: torch.device) -> str | None:
        """Return why this backend cannot be used on this rank, as a short clause, or None if it can."""

    @abstractmethod
    def group(self, name: str, ranks: Sequence[int]) -> Communicator:
        """Create the group of these world ranks. Exactly those ranks call this, with the same arguments.

        One rank gives a SingleRank. `name` must be unique within the world.
        """

    def check(self) -> None:  # noqa: B027 - most backends raise from the failing call
        """Raise if results may be wrong because a kernel timed out waiting for another rank."""

    def close(self) -> None:  # noqa: B027 - not every backend holds resources
        """Release all groups."""


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
