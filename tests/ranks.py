"""Ranks as threads of one process, for what communicates but needs no processes to be tested."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import Empty, Queue
from typing import TypeVar

import torch
from torch import Tensor

from yalis.comm.base import Communicator

T = TypeVar("T")


class Board:
    """Where the ranks of one group lay their tensors down for each other."""

    def __init__(self, size: int, patience: float) -> None:
        self.size, self.patience = size, patience
        self.slots: list[tuple[str, Tensor] | None] = [None] * size
        self.gate = threading.Barrier(size)
        self.mail: dict[tuple[int, int], Queue[Tensor]] = {(a, b): Queue() for a in range(size) for b in range(size)}


class Memory(Communicator):
    """The whole contract in one process. Sums are taken in order of rank, low precisions in fp32."""

    capturable = False

    def __init__(self, board: Board, rank: int) -> None:
        self.board, self.rank, self.size = board, rank, board.size
        #: (collective, elements of this rank's tensor) of every call, for tests that count messages
        self.calls: list[tuple[str, int]] = []

    def _everyones(self, what: str, x: Tensor) -> list[Tensor]:
        """What every rank brought to this collective; all ranks must be in the same one."""
        self.calls.append((what, x.numel()))
        self.board.slots[self.rank] = (what, x.detach().clone())
        self.board.gate.wait(self.board.patience)
        slots = [slot for slot in self.board.slots if slot is not None]
        kinds = [(kind, tensor.shape, tensor.dtype) for kind, tensor in slots]
        self.board.gate.wait(self.board.patience)
        if len(set(kinds)) != 1:
            raise AssertionError(f"the ranks are in different collectives: {kinds}")
        return [tensor for _, tensor in slots]

    def _sum(self, what: str, x: Tensor) -> Tensor:
        parts = self._everyones(what, x)
        wide = torch.float32 if x.dtype in (torch.bfloat16, torch.float16) else x.dtype
        total = parts[0].to(wide, copy=True)
        for part in parts[1:]:
            total += part.to(wide)
        return total.to(x.dtype)

    def all_reduce(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        return (x if out is None else out).copy_(self._sum("all_reduce", x))

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        return torch.cat(self._everyones("all_gather", x), dim)

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        return x.copy_(self._everyones(f"broadcast from {source}", x)[source])

    def send(self, x: Tensor, to: int) -> None:
        self.calls.append(("send", x.numel()))
        self.board.mail[self.rank, to].put(x)

    def recv(self, out: Tensor, source: int) -> Tensor:
        self.calls.append(("recv", out.numel()))
        waited = 0.0
        while True:
            try:
                sent = self.board.mail[source, self.rank].get(timeout=0.05)
            except Empty:
                waited += 0.05
                if self.board.gate.broken or waited > self.board.patience:
                    raise threading.BrokenBarrierError from None
                continue
            if (sent.shape, sent.dtype) != (out.shape, out.dtype):
                raise AssertionError(f"sent {sent.dtype} {tuple(sent.shape)}, wanted {out.dtype} {tuple(out.shape)}")
            return out.copy_(sent)

    def barrier(self) -> None:
        self._everyones("barrier", torch.empty(0))


def memory_group(size: int, patience: float = 30) -> list[Memory]:
    """A communicator for each rank of one group; each belongs to one thread."""
    board = Board(size, patience)
    return [Memory(board, rank) for rank in range(size)]


def run_ranks(size: int, function: Callable[[int, Memory], T], patience: float = 30) -> list[T]:
    """What `function(rank, communicator)` returns on each of `size` threads; raises the first error of any.

    A function that makes groups of its own takes them from `memory_group`, called before.
    """
    ranks = memory_group(size, patience)
    results: dict[int, T] = {}
    errors: list[BaseException] = []

    def run(comm: Memory) -> None:
        try:
            results[comm.rank] = function(comm.rank, comm)
        except BaseException as error:
            errors.append(error)
            comm.board.gate.abort()

    threads = [threading.Thread(target=run, args=(comm,), daemon=True) for comm in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        # A rank that was let down says so only when nobody has a better reason.
        raise next((error for error in errors if not isinstance(error, threading.BrokenBarrierError)), errors[0])
    return [results[rank] for rank in range(size)]
