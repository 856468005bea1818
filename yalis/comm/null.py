"""A communication backend without communication, for measuring the computation of one rank alone (`yalis bench slice`).

Its groups have the rank and size of the real job and outputs of the real shapes, but every operation returns at once.
Results are wrong, so it is not in BACKENDS and `--allreduce` cannot select it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from yalis.comm.base import CommBackend, Communicator, SingleRank
from yalis.launch.world import World


class NullGroup(Communicator):
    """Returns from every operation at once, as if other ranks had added zeros to sums and sent copies to gathers.

    The values stay finite, so that the steps that follow compute on ordinary numbers.
    """

    def __init__(self, rank: int, size: int, capturable: bool) -> None:
        self.rank, self.size, self.capturable = rank, size, capturable
        self.calls: Counter[str] = Counter()  # by operation; a replayed CUDA graph does not count
        self.reduced_bytes = 0  # of all inputs of all_reduce

    def all_reduce(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        self.calls["all_reduce"] += 1
        self.reduced_bytes += x.nbytes
        return x if out is None else out.copy_(x)

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        self.calls["all_gather"] += 1
        repeats = [1] * x.dim()
        repeats[dim] = self.size
        return x.repeat(repeats)

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        self.calls["broadcast"] += 1
        return x

    def send(self, x: Tensor, to: int) -> None:
        self.calls["send"] += 1

    def recv(self, out: Tensor, source: int) -> Tensor:
        self.calls["recv"] += 1
        return out.normal_()  # zeros would draw less power, so a GPU would run at a higher clock than with a model

    def barrier(self) -> None:
        self.calls["barrier"] += 1


class NullBackend(CommBackend):
    name = "null"

    def __init__(self, world: World, device: torch.device, *settings: Any) -> None:
        super().__init__(world, device, *settings)
        self.groups: list[NullGroup] = []

    @classmethod
    def unusable(cls, world: World, device: torch.device) -> str | None:
        return None

    def group(self, name: str, ranks: Sequence[int]) -> Communicator:
        if len(ranks) == 1:
            return SingleRank()
        # As with NCCL and gloo: CUDA graphs capture the collectives, recorded steps of a CPU do not.
        group = NullGroup(list(ranks).index(self.world.rank), len(ranks), capturable=self.device.type == "cuda")
        self.groups.append(group)
        return group
