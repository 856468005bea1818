"""The base of backends that bring an all-reduce of their own and leave everything else to torch's groups."""

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
    """A group of torch's, under an all-reduce that is not."""

    def __init__(self, under: TorchGroup) -> None:
        self.torch_group = under
        self.rank, self.size, self.capturable = under.rank, under.size, under.capturable

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
    """Several of these may share one TorchBackend, which then outlives them."""

    uses_table = True

    def __init__(
        self,
        world: World,
        device: torch.device,
        topology: Topology | None = None,
        table: TuningTable | None = None,
        under: TorchBackend | None = None,
    ) -> None:
        super().__init__(world, device, topology, table)
        self._owns = under is None
        self.torch_backend = under or TorchBackend(world, device, topology, table)
        self._start()

    def _start(self) -> None:
        """What a backend needs before its first group; every rank of the world does it."""

    @classmethod
    def unusable(cls, world: World, device: torch.device) -> str | None:
        return TorchBackend.unusable(world, device)

    def group(self, name: str, ranks: Sequence[int]) -> Communicator:
        under = self.torch_backend.group(name, ranks)
        return self.wrap_group(under, name, ranks) if isinstance(under, TorchGroup) else under

    @abstractmethod
    def wrap_group(self, under: TorchGroup, name: str, ranks: Sequence[int]) -> Communicator:
        """The group of these ranks of the world, of which torch's is already made."""

    def close(self) -> None:
        if self._owns:
            self.torch_backend.close()
