"""The load of the experts on each rank with expert parallelism, counted on the device by the layers of the model."""

from __future__ import annotations

import time

import torch

from yalis.layers.mlp import MoE
from yalis.models.decoder import Decoder
from yalis.parallel.plan import Grid, shard


class ExpertLoad:
    """Pairs of a token and an expert, summed over the layers of this pipeline stage. Padding is not counted.

    All ranks of a grid have the same counts. Reading them does not wait for steps that run: on a GPU they are copied on
    a stream of their own, so a copy may have some layers of a step and not the others.
    """

    def __init__(self, model: Decoder, grid: Grid, device: torch.device) -> None:
        layers = [module for module in model.modules() if isinstance(module, MoE)]
        self._counts = [layer.counts for layer in layers if layer.counts is not None]
        self._grid = grid
        self._stream = torch.cuda.Stream(device) if self._counts and device.type == "cuda" else None
        self._by_rank: list[int] = []
        self._read_at = -float("inf")

    def reset(self) -> None:
        """Forget what was counted, such as warm-up steps."""
        for counts in self._counts:
            counts.zero_()

    def by_expert(self) -> list[int]:
        """Return the pairs of each expert; empty if they are not counted."""
        if not self._counts:
            return []
        with torch.cuda.stream(self._stream):  # does nothing without a stream
            found: list[int] = torch.stack(self._counts).sum(0)[:-1].tolist()
        return found

    def by_rank(self, max_age: float = 0.0) -> list[int]:
        """Return the pairs that each rank of this grid multiplied; empty if they are not counted.

        `max_age`: seconds for which an earlier answer is still returned.
        """
        now = time.monotonic()
        if self._counts and now - self._read_at >= max_age:
            grid, pairs = self._grid, self.by_expert()
            rows = (shard(len(pairs), grid.rows, row) for row in range(grid.rows))
            self._by_rank = [sum(pairs[held.start : held.stop]) for held in rows for _ in range(grid.cols)]
            self._read_at = now
        return self._by_rank

    def own_pairs(self) -> int:
        """Return the pairs that this rank multiplied; 0 if they are not counted."""
        return self.by_rank()[self._grid.row * self._grid.cols] if self._counts else 0
