"""Pipeline parallelism: the layers of a rank's stage, and sending hidden states from stage to stage."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from yalis.comm.base import CommBackend, Communicator, SingleRank
from yalis.parallel.plan import Split, shard


@dataclass(frozen=True)
class Stage:
    """A contiguous range of layers. Hidden states are split over the grid's columns on entry and on exit."""

    index: int = 0
    count: int = 1
    pp_group: Communicator = field(default_factory=SingleRank)  # one rank per stage, at the same row and column

    @classmethod
    def open(cls, split: Split, rank: int, comm: CommBackend) -> Stage:
        """Create the pipeline group of `rank` and return its stage. Collective: every rank of the world calls this."""
        coords = split.coords(rank)
        ranks = [split.rank(replace(coords, stage=stage)) for stage in range(split.stages)]
        return cls(coords.stage, split.stages, comm.group(f"replica{coords.replica}.pipeline{ranks[0]}", ranks))

    @property
    def first(self) -> bool:
        return self.index == 0

    @property
    def last(self) -> bool:
        return self.index == self.count - 1

    def layers(self, total: int) -> range:
        """Return this stage's layers out of `total`."""
        return shard(total, self.count, self.index)

    @torch.inference_mode()
    def receive(self, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Tensor | None:
        """Receive hidden states from the previous stage; returns None on the first stage."""
        if self.first:
            return None
        return self.pp_group.recv(torch.empty(shape, dtype=dtype, device=device), self.index - 1)

    def send(self, hidden: Tensor) -> None:
        """Send hidden states to the next stage."""
        self.pp_group.send(hidden, self.index + 1)
