"""One trial: a backend with its options summing messages of one size, timed and checked.

Before every operation the input is written again, and for the first check the output is filled with NaN. So an
operation that does nothing cannot pass with the sum of an earlier one.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

from yalis.comm.base import Communicator
from yalis.errors import YalisError, YalisFailure
from yalis.launch.world import World
from yalis.study import bandwidth
from yalis.study.allreduce.links import GRAPH_OPERATIONS, capture_operations
from yalis.study.allreduce.timing import Operation, SynchronizedTimer

_CHECK_CHUNK = 1 << 20  # elements that are checked at a time


@dataclass(frozen=True)
class ExpectedSum:
    """This rank's input, and the sum over all ranks, whose inputs every rank can draw."""

    input: Tensor
    total: Tensor  # float64
    bound: Tensor  # largest error from rounding at every addition

    @classmethod
    def draw(cls, seed: str, rank: int, ranks: int, length: int, dtype: torch.dtype) -> ExpectedSum:
        total = torch.zeros(length, dtype=torch.float64)
        magnitude = torch.zeros(length, dtype=torch.float64)
        own_input = torch.empty(0)
        for other in range(ranks):
            digest = hashlib.blake2b(f"{seed}/{other}".encode(), digest_size=7).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
            values = torch.randn(length, generator=generator).to(dtype)
            total += values
            magnitude += values.abs()
            if other == rank:
                own_input = values
        return cls(own_input, total, magnitude * (ranks * torch.finfo(dtype).eps / 2))

    def find_error(self, out: Tensor) -> str | None:
        """Return what is wrong with a result of this rank; None if it is the sum within rounding errors."""
        chunks = zip(*(each.split(_CHECK_CHUNK) for each in (out.cpu(), self.total, self.bound)), strict=True)
        bad = sum(int((~((chunk.double() - total).abs() <= bound)).sum()) for chunk, total, bound in chunks)
        return f"{bad} of {len(self.total)} elements are not the sum" if bad else None


class Trial:
    """A group summing messages of one size in one mode: "eager", or "graph" for replay from a CUDA graph.

    `bitwise_equal`: the backend promises the same bits on all ranks, which is checked."""

    def __init__(
        self, world: World, timer: SynchronizedTimer, group: Communicator, expected: ExpectedSum, mode: str,
        device: torch.device, bitwise_equal: bool,
    ) -> None:  # fmt: skip
        self._bitwise_equal = bitwise_equal
        self._world, self._timer, self._group, self._expected, self._device = world, timer, group, expected, device
        self._input = expected.input.to(device)
        shape, dtype = tuple(self._input.shape), self._input.dtype
        self._x, self._out = (group.workspace(shape, dtype, device) for _ in range(2))
        self._operation: Operation = self._all_reduce
        # In place, as models do it, except for NVSHMEM's own all-reduce, which is wrong in place with 4 ranks or more.
        self._result, self._operations = self._x if bitwise_equal else self._out, 1
        self.seconds: list[float] = []
        self.checked = 0
        self.ranks_equal = True  # all ranks had the same bits so far
        self.error: str | None = None  # the same on all ranks
        self._check_first()
        if mode == "graph" and not self.error:
            self._prepare()
            self._operation = capture_operations(lambda: self._group.all_reduce(self._x, self._out), device)
            self._result, self._operations = self._out, GRAPH_OPERATIONS

    def measure(self, warmup: int, count: int) -> None:
        """Measure `count` more operations, and check the last result. A trial with a wrong result is not continued."""
        if self.error or not count:
            return
        times = self._timer.measure_paced(self._prepare, self._operation, warmup, count)
        self.seconds += [seconds / self._operations for seconds in times]
        self._check(self._result)

    def _check_first(self) -> None:
        self._prepare()
        self._group.all_reduce(self._x, self._out)
        bandwidth.synchronize(self._device)
        self._check(self._out)

    def _prepare(self) -> None:
        self._x.copy_(self._input)
        self._out.fill_(float("nan"))
        bandwidth.synchronize(self._device)

    def _all_reduce(self) -> None:
        self._group.all_reduce(self._x, None if self._result is self._x else self._result)
        bandwidth.synchronize(self._device)

    def _check(self, out: Tensor) -> None:
        """Compare the result of every rank with the expected sum, and its bits with those of rank 0."""
        self.checked += 1
        bits = hashlib.blake2b(out.cpu().view(torch.uint8).numpy().tobytes()).hexdigest()
        all_ranks = self._world.all_gather_object([self._expected.find_error(out), bits])
        for rank, (error, rank_bits) in enumerate(all_ranks):
            differs = rank_bits != all_ranks[0][1]
            if error or (differs and self._bitwise_equal):
                self.error = f"wrong: {error or 'not the bits of rank 0'} on rank {rank}"
                return
            self.ranks_equal = self.ranks_equal and not differs


def start_trial(
    world: World, timer: SynchronizedTimer, group: Communicator, expected: ExpectedSum, mode: str,
    device: torch.device, bitwise_equal: bool,
) -> Trial | str:  # fmt: skip
    """Return a trial, or why the backend cannot sum such messages, which all ranks find at the same point."""
    try:
        return Trial(world, timer, group, expected, mode, device, bitwise_equal)
    except YalisFailure:  # a rank died
        raise
    except YalisError as error:
        return str(error)
