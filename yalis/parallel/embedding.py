"""Token embedding and lm_head, both split over the vocabulary, one matrix where they are tied."""

from __future__ import annotations

import torch
from torch import Tensor

from yalis.kernels import ops
from yalis.parallel.plan import Grid
from yalis.parallel.weights import DenseWeight, ParallelLayer, Piece, TensorSource


class VocabEmbedding(ParallelLayer):
    """Rows of the table for this rank's share of the vocabulary; other ranks' tokens arrive by the sum."""

    def __init__(
        self, grid: Grid, name: str, vocab: int, hidden: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.grid, self.hidden = grid, hidden
        self.part = grid.vocabulary(vocab)
        self.piece = Piece(name, vocab, self.part)
        self.weight = DenseWeight(len(self.part), hidden, dtype, device)

    def load(self, source: TensorSource) -> None:
        self.weight.fill(source, [self.piece], self.hidden, range(self.hidden))

    def forward(self, token_ids: Tensor) -> Tensor:
        """[T] ids to [T, hidden / c]."""
        if self.grid.tp_group.size == 1:
            return ops.gather_rows(self.weight.data, token_ids)
        local = token_ids - self.part.start
        mine = (local >= 0) & (local < len(self.part))
        rows = ops.gather_rows(self.weight.data, local.clamp(0, len(self.part) - 1)) * mine.unsqueeze(-1)
        columns = self.grid.hidden(self.hidden)
        return self.grid.tp_group.all_reduce(rows)[:, columns.start : columns.stop].contiguous()


class LMHead(ParallelLayer):
    """Hidden states to logits of this rank's share of the vocabulary."""

    def __init__(
        self, grid: Grid, name: str, vocab: int, hidden: int, dtype: torch.dtype, device: torch.device,
        tied: VocabEmbedding | None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.grid, self.hidden, self.tied = grid, hidden, tied is not None
        self.part = grid.vocabulary(vocab)
        self.piece = Piece(name, vocab, self.part)
        self.weight = DenseWeight(len(self.part), hidden, dtype, device) if tied is None else tied.weight

    def load(self, source: TensorSource) -> None:
        if not self.tied:
            self.weight.fill(source, [self.piece], self.hidden, range(self.hidden))

    def forward(self, x: Tensor) -> Tensor:
        """[R, hidden / c] to [R, vocabulary share]."""
        y: Tensor = self.weight(self.grid.col_group.all_gather(x) if self.grid.cols > 1 else x)
        return y
