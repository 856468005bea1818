"""Ranks as threads of one process, for tests of code that communicates."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import Empty, Queue
from typing import TypeVar

import torch
from torch import Tensor

from yalis.comm.base import Communicator
from yalis.launch.heartbeat import Progress

T = TypeVar("T")


class Board:
    """The shared memory through which the ranks of one group exchange tensors."""

    def __init__(self, size: int, timeout: float) -> None:
        self.size, self.timeout = size, timeout
        self.slots: list[tuple[str, Tensor] | None] = [None] * size
        self.gate = threading.Barrier(size)
        self.mail: dict[tuple[int, int], Queue[Tensor]] = {(a, b): Queue() for a in range(size) for b in range(size)}


class Memory(Communicator):
    """A complete communicator in one process. Sums are computed in order of rank, 16-bit types in fp32."""

    capturable = False

    def __init__(self, board: Board, rank: int) -> None:
        self.board, self.rank, self.size, self.progress = board, rank, board.size, Progress()
        #: (collective, elements of this rank's tensor) of every call, for tests that count messages
        self.calls: list[tuple[str, int]] = []

    def _exchange(self, name: str, x: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks; raises if they are not in the same collective."""
        self.calls.append((name, x.numel()))
        self.board.slots[self.rank] = (name, x.detach().clone())
        self.board.gate.wait(self.board.timeout)
        slots = [slot for slot in self.board.slots if slot is not None]
        calls = [(name, tensor.shape, tensor.dtype) for name, tensor in slots]
        self.board.gate.wait(self.board.timeout)
        if len(set(calls)) != 1:
            raise AssertionError(f"the ranks are in different collectives: {calls}")
        return [tensor for _, tensor in slots]

    def _sum(self, name: str, x: Tensor) -> Tensor:
        tensors = self._exchange(name, x)
        wide = torch.float32 if x.dtype in (torch.bfloat16, torch.float16) else x.dtype
        total = tensors[0].to(wide, copy=True)
        for tensor in tensors[1:]:
            total += tensor.to(wide)
        return total.to(x.dtype)

    def all_reduce(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        return (x if out is None else out).copy_(self._sum("all_reduce", x))

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        return torch.cat(self._exchange("all_gather", x), dim)

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        return x.copy_(self._exchange(f"broadcast from {source}", x)[source])

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
                if self.board.gate.broken or waited > self.board.timeout:
                    raise threading.BrokenBarrierError from None
                continue
            if (sent.shape, sent.dtype) != (out.shape, out.dtype):
                raise AssertionError(f"sent {sent.dtype} {tuple(sent.shape)}, expected {out.dtype} {tuple(out.shape)}")
            return out.copy_(sent)

    def barrier(self) -> None:
        self._exchange("barrier", torch.empty(0))


def memory_group(size: int, timeout: float = 30) -> list[Memory]:
    """Return a communicator for each rank of one group; each is used by one thread."""
    board = Board(size, timeout)
    return [Memory(board, rank) for rank in range(size)]


def run_ranks(size: int, function: Callable[[int, Memory], T], timeout: float = 30) -> list[T]:
    """Run `function(rank, communicator)` on `size` threads; returns all results, or raises the first error.

    A function that needs further groups uses `memory_group`, called beforehand.
    """
    ranks = memory_group(size, timeout)
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
        # A broken barrier is only the consequence of another rank's error.
        raise next((error for error in errors if not isinstance(error, threading.BrokenBarrierError)), errors[0])
    return [results[rank] for rank in range(size)]
