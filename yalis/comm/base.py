"""The contract every communicator keeps, and the communicator of a group of one."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor


class Communicator(ABC):
    """Collectives over one explicit group of ranks, issued on the current stream.

    Every rank of the group ends an `all_reduce` with the same bits.
    """

    rank: int
    size: int
    #: whether a CUDA graph may capture these calls; where not, the step runs uncaptured
    capturable: bool

    @abstractmethod
    def all_reduce(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """The sum of every rank's `x`, in `out` if given, else in `x`."""

    @abstractmethod
    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        """Every rank's `x`, joined along `dim` in order of rank."""

    @abstractmethod
    def reduce_scatter(self, x: Tensor, dim: int = -1) -> Tensor:
        """This rank's equal part, along `dim`, of the sum of every rank's `x`."""

    @abstractmethod
    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        """`x` of rank `source`, written into every rank's `x`."""

    @abstractmethod
    def send(self, x: Tensor, to: int) -> None: ...

    @abstractmethod
    def recv(self, out: Tensor, source: int) -> Tensor: ...

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

    def reduce_scatter(self, x: Tensor, dim: int = -1) -> Tensor:
        return x

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        return x

    def send(self, x: Tensor, to: int) -> None:
        raise ValueError("a group of one has nobody to send to")

    def recv(self, out: Tensor, source: int) -> Tensor:
        raise ValueError("a group of one has nobody to receive from")

    def barrier(self) -> None:
        return None
