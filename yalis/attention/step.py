"""Attention within one step, as the layers of a model see it."""

from __future__ import annotations

from weakref import WeakValueDictionary

from torch import Tensor

from yalis.attention.base import AttentionBackend, AttentionParams, ForwardBatch, LayerCache
from yalis.kernels.opaque import opaque


class StepAttention:
    """A batch in the hands of a backend: what all layers of a step share.

    Compiled code knows tensors and numbers only, so a model computes its steps one after the other under one number.
    """

    def __init__(self, backend: AttentionBackend, batch: ForwardBatch, model: int) -> None:
        self.backend, self.batch, self.model = backend, batch, model
        self.shared = backend.prepare(batch)
        _STEPS[model] = self

    def attend(self, q: Tensor, cache: LayerCache, params: AttentionParams) -> Tensor:
        """Causal attention of q [T, H, D] over each sequence's own cached tokens, the step's among them."""
        return attend(q, cache.k, cache.v, self.model, params.scale, params.window or 0, params.softcap or 0.0)


# By the number of their model, while they last.
_STEPS: WeakValueDictionary[int, StepAttention] = WeakValueDictionary()


@opaque(
    "(Tensor q, Tensor k_cache, Tensor v_cache, int model, float scale, int window, float softcap) -> Tensor",
    lambda q, *_: q.shape,
)
def attend(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, model: int, scale: float, window: int, softcap: float
) -> Tensor:
    """What the backend of the step that this model computes makes of q; 0 is no window, and no softcap."""
    step = _STEPS[model]
    params = AttentionParams(scale, window or None, softcap or None)
    return step.backend.attend(q, LayerCache(k_cache, v_cache), step.batch, step.shared, params)
