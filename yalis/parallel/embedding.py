"""Token embedding and lm_head, both split over the vocabulary; they share one matrix where they are tied."""

from __future__ import annotations

import torch
from torch import Tensor

from yalis.parallel.plan import Grid
from yalis.parallel.weights import ParallelLayer, RowShard, TensorSource, make_weight


class VocabEmbedding(ParallelLayer):
    """The rows of the embedding table for this rank's shard of the vocabulary, combined by an all-reduce."""

    def __init__(
        self, grid: Grid, name: str, vocab: int, hidden: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.grid, self.hidden = grid, hidden
        self.vocab_shard = grid.vocabulary(vocab)
        self.weight = make_weight([RowShard(name, vocab, self.vocab_shard)], hidden, range(hidden), dtype, device)

    def load(self, source: TensorSource) -> None:
        self.weight.load(source)

    def forward(self, token_ids: Tensor) -> Tensor:
        """[T] token ids to [T, hidden / c]."""
        if self.grid.tp_group.size == 1:
            return self.weight.gather_rows(token_ids)
        local = token_ids - self.vocab_shard.start
        here = (local >= 0) & (local < len(self.vocab_shard))
        rows = self.weight.gather_rows(local.clamp(0, len(self.vocab_shard) - 1)) * here.unsqueeze(-1)
        columns = self.grid.hidden(self.hidden)
        return self.grid.tp_group.all_reduce(rows)[:, columns.start : columns.stop].contiguous()


class LMHead(ParallelLayer):
    """Computes the logits of this rank's shard of the vocabulary."""

    def __init__(
        self, grid: Grid, name: str, vocab: int, hidden: int, dtype: torch.dtype, device: torch.device,
        tied: VocabEmbedding | None,
    ) -> None:  # fmt: skip
        """`tied`: the embedding on this rank whose matrix is used, and loaded there; None to hold a matrix."""
        super().__init__()
        self.grid, self.hidden, self.tied = grid, hidden, tied is not None
        self.vocab_shard = grid.vocabulary(vocab)
        if tied is None:
            self.weight = make_weight([RowShard(name, vocab, self.vocab_shard)], hidden, range(hidden), dtype, device)
        else:
            self.weight = tied.weight

    def load(self, source: TensorSource) -> None:
        if not self.tied:
            self.weight.load(source)

    def forward(self, x: Tensor) -> Tensor:
        """[R, hidden / c] to [R, vocabulary shard]."""
        y: Tensor = self.weight(self.grid.col_group.all_gather(x) if self.grid.cols > 1 else x)
        return y
