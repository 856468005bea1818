"""A rank's stage of the pipeline: its layers, and the ranks before and behind it."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from yalis.comm.base import CommBackend, Communicator, SingleRank
from yalis.parallel.plan import Place, Split, share


@dataclass(frozen=True)
class Stage:
    """Contiguous layers. Hidden states arrive from the stage before, laid out as they leave: split over the columns."""

    index: int = 0
    count: int = 1
    line: Communicator = field(default_factory=SingleRank)  # ranks of the same cell, one per stage

    @classmethod
    def open(cls, split: Split, rank: int, comm: CommBackend) -> Stage:
        """The stage of `rank`, its line made: every rank of the world calls this."""
        place = split.place(rank)
        line = [split.rank(Place(place.replica, stage, place.row, place.col)) for stage in range(split.stages)]
        return cls(place.stage, split.stages, comm.group(f"replica{place.replica}.line{line[0]}", line))

    @property
    def first(self) -> bool:
        return self.index == 0

    @property
    def last(self) -> bool:
        return self.index == self.count - 1

    def layers(self, total: int) -> range:
        return share(total, self.count, self.index)

    @torch.inference_mode()
    def receive(self, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Tensor | None:
        """What the stage before gives; None on the first."""
        return None if self.first else self.line.recv(torch.empty(shape, dtype=dtype, device=device), self.index - 1)

    def pass_on(self, hidden: Tensor) -> None:
        self.line.send(hidden, self.index + 1)
