"""The attention of one step, as the layers of a model call it."""

from __future__ import annotations

from torch import Tensor

from yalis.attention.base import AttentionBackend, AttentionParams, ForwardBatch, LayerCache


class StepAttention:
    """A backend with the batch of one step and the state that all layers of the step share."""

    def __init__(self, backend: AttentionBackend, batch: ForwardBatch) -> None:
        self.backend, self.batch = backend, batch
        self.shared = backend.prepare(batch)

    def attend(self, q: Tensor, cache: LayerCache, params: AttentionParams) -> Tensor:
        """Causal attention of q [T, H, D] over the cached tokens of each sequence, this step's tokens included."""
        return self.backend.attend(q, cache, self.batch, self.shared, params)
