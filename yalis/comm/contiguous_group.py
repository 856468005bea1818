"""The contract for backends whose calls take contiguous tensors: what comes otherwise is laid out for them here."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from yalis.comm.base import Communicator

LOW_PRECISION = (torch.bfloat16, torch.float16)


class ContiguousGroup(Communicator):
    """A backend supplies the calls at the end; they get contiguous tensors that it reaches, never empty ones."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def all_reduce(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        target = x if out is None else out
        if not x.numel():
            return target
        wide = self._wide(x.dtype)
        fits = target.dtype == wide and target.is_contiguous() and self._reaches(target)
        buffer = target if fits else self._buffer(x.shape, wide, x)
        if buffer is not x:
            buffer.copy_(x)
        self._sum(buffer)
        return target if buffer is target else target.copy_(buffer, non_blocking=True)

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        dim %= x.dim()
        gathered = self._buffer((self.size, *x.shape), x.dtype, x)
        if x.numel():
            self._gather(self._packed(x), gathered)
        return gathered.to(x.device, non_blocking=True).movedim(0, dim).flatten(dim, dim + 1)

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        if not x.numel():
            return x
        buffer = self._packed(x)
        self._spread(buffer, source)
        return x if buffer is x else x.copy_(buffer, non_blocking=True)

    def send(self, x: Tensor, to: int) -> None:
        if x.numel():
            self._post(self._packed(x), to)

    def recv(self, out: Tensor, source: int) -> Tensor:
        if not out.numel():
            return out
        fits = out.is_contiguous() and self._reaches(out)
        buffer = out if fits else self._buffer(out.shape, out.dtype, out)
        self._await(buffer, source)
        return out if buffer is out else out.copy_(buffer, non_blocking=True)

    def _packed(self, x: Tensor) -> Tensor:
        """`x` itself if the backend can take it, else a copy."""
        if x.is_contiguous() and self._reaches(x):
            return x
        return self._buffer(x.shape, x.dtype, x).copy_(x)

    def _buffer(self, shape: tuple[int, ...], dtype: torch.dtype, like: Tensor) -> Tensor:
        """Memory that the backend reaches, for the contents of a tensor like this one."""
        return torch.empty(shape, dtype=dtype, device=like.device)

    def _reaches(self, x: Tensor) -> bool:
        """Whether the backend can read and write this tensor where it is."""
        return True

    def _wide(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype of sums: low precisions are added in float32 and rounded once, not at every addition."""
        return torch.float32 if dtype in LOW_PRECISION else dtype

    @abstractmethod
    def _sum(self, x: Tensor) -> None:
        """Every rank's `x` becomes their sum."""

    @abstractmethod
    def _gather(self, x: Tensor, parts: Tensor) -> None:
        """Every rank's `x` goes to all ranks' `parts`, of shape [size, *x.shape]."""

    @abstractmethod
    def _spread(self, x: Tensor, source: int) -> None:
        """`x` of rank `source` goes to every rank's `x`."""

    @abstractmethod
    def _post(self, x: Tensor, to: int) -> None:
        """Begin to send `x`, and keep it until it is out."""

    @abstractmethod
    def _await(self, x: Tensor, source: int) -> None:
        """Receive into `x`."""
