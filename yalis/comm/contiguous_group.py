"""Base class of groups whose backend accepts only contiguous tensors on certain devices.

The public collectives copy other tensors into buffers; backends implement the primitives at the end of the class.
"""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from yalis.comm.base import Communicator, counted
from yalis.launch.heartbeat import Progress

LOW_PRECISION = (torch.bfloat16, torch.float16)


class ContiguousGroup(Communicator):
    """The primitives that a backend implements get contiguous, non-empty tensors that `_can_access` accepts."""

    def __init__(self, rank: int, size: int, progress: Progress) -> None:
        self.rank, self.size, self.progress = rank, size, progress

    @counted
    def all_reduce(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        target = x if out is None else out
        if not x.numel():
            return target
        dtype = self._sum_dtype(x.dtype)
        in_place = target.dtype == dtype and target.is_contiguous() and self._can_access(target)
        buffer = target if in_place else self._buffer(x.shape, dtype, x)
        if buffer is not x:
            buffer.copy_(x)
        self._all_reduce(buffer)
        return target if buffer is target else target.copy_(buffer, non_blocking=True)

    @counted
    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        dim %= x.dim()
        gathered = self._buffer((self.size, *x.shape), x.dtype, x)
        if x.numel():
            self._all_gather(self._contiguous(x), gathered)
        return gathered.to(x.device, non_blocking=True).movedim(0, dim).flatten(dim, dim + 1)

    @counted
    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        if not x.numel():
            return x
        buffer = self._contiguous(x)
        self._broadcast(buffer, source)
        return x if buffer is x else x.copy_(buffer, non_blocking=True)

    @counted
    def send(self, x: Tensor, to: int) -> None:
        if x.numel():
            self._send(self._contiguous(x), to)

    @counted
    def recv(self, out: Tensor, source: int) -> Tensor:
        if not out.numel():
            return out
        in_place = out.is_contiguous() and self._can_access(out)
        buffer = out if in_place else self._buffer(out.shape, out.dtype, out)
        self._recv(buffer, source)
        return out if buffer is out else out.copy_(buffer, non_blocking=True)

    def _contiguous(self, x: Tensor) -> Tensor:
        """Return `x` itself if the backend can use it, else a contiguous copy."""
        if x.is_contiguous() and self._can_access(x):
            return x
        return self._buffer(x.shape, x.dtype, x).copy_(x)

    def _buffer(self, shape: tuple[int, ...], dtype: torch.dtype, like: Tensor) -> Tensor:
        """Allocate a tensor that the backend can access, to hold data of `like`."""
        return torch.empty(shape, dtype=dtype, device=like.device)

    def _can_access(self, x: Tensor) -> bool:
        """Return whether the backend can read and write this tensor directly."""
        return True

    def _sum_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype to sum in: low precisions use float32, so they are rounded once and not per addition."""
        return torch.float32 if dtype in LOW_PRECISION else dtype

    @abstractmethod
    def _all_reduce(self, x: Tensor) -> None:
        """Sum `x` over all ranks in place."""

    @abstractmethod
    def _all_gather(self, x: Tensor, parts: Tensor) -> None:
        """Gather every rank's `x` into `parts`, of shape [size, *x.shape]."""

    @abstractmethod
    def _broadcast(self, x: Tensor, source: int) -> None:
        """Copy `x` of rank `source` into every rank's `x`."""

    @abstractmethod
    def _send(self, x: Tensor, to: int) -> None:
        """Start sending `x` and keep a reference to it until it is sent."""

    @abstractmethod
    def _recv(self, x: Tensor, source: int) -> None:
        """Receive into `x`."""
