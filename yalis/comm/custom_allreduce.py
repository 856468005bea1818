"""Base classes of backends that implement their own all-reduce and use torch for all other collectives."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from yalis.comm.base import CommBackend, Communicator
from yalis.comm.topology import Topology
from yalis.comm.torch_dist import TorchBackend, TorchGroup
from yalis.comm.tuning import TuningTable
from yalis.launch.world import World


class CustomAllReduceGroup(Communicator):
    """A group with its own all-reduce; the other collectives are those of `torch_group`."""

    def __init__(self, torch_group: TorchGroup) -> None:
        self.torch_group = torch_group
        self.rank, self.size, self.capturable = torch_group.rank, torch_group.size, torch_group.capturable
        self.progress = torch_group.progress

    @property
    def gather_capturable(self) -> bool:
        return self.torch_group.capturable

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        return self.torch_group.all_gather(x, dim)

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        return self.torch_group.broadcast(x, source)

    def send(self, x: Tensor, to: int) -> None:
        self.torch_group.send(x, to)

    def recv(self, out: Tensor, source: int) -> Tensor:
        return self.torch_group.recv(out, source)

    def barrier(self) -> None:
        self.torch_group.barrier()


class CustomAllReduceBackend(CommBackend):
    """Creates groups on top of a TorchBackend. Several backends can share one, which then outlives them."""

    uses_table = True

    def __init__(
        self,
        world: World,
        device: torch.device,
        topology: Topology | None = None,
        table: TuningTable | None = None,
        torch_backend: TorchBackend | None = None,
    ) -> None:
        super().__init__(world, device, topology, table)
        self._owns_torch_backend = torch_backend is None
        self.torch_backend = torch_backend or TorchBackend(world, device, topology, table)
        self._initialize()

    def _initialize(self) -> None:
        """Prepare what the backend needs before its first group. Runs on every rank of the world."""

    @classmethod
    def unusable(cls, world: World, device: torch.device) -> str | None:
        return TorchBackend.unusable(world, device)

    def group(self, name: str, ranks: Sequence[int]) -> Communicator:
        torch_group = self.torch_backend.group(name, ranks)
        return self.wrap_group(torch_group, name, ranks) if isinstance(torch_group, TorchGroup) else torch_group

    @abstractmethod
    def wrap_group(self, torch_group: TorchGroup, name: str, ranks: Sequence[int]) -> Communicator:
        """Create the group of these world ranks on top of the torch group of the same ranks."""

    def close(self) -> None:
        if self._owns_torch_backend:
            self.torch_backend.close()
