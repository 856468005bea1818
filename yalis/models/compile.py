"""torch.compile for the blocks of a model. Imported only if compilation is enabled."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import count
from types import FunctionType, MethodType
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from yalis.attention.base import AttentionBackend, AttentionParams, ForwardBatch, LayerCache
from yalis.attention.step import StepAttention
from yalis.kernels.opaque import opaque
from yalis.models.decoder import Block, Decoder

BlockForward = Callable[..., tuple[Tensor, Tensor]]

_model_ids = count()


def compile_blocks(model: Decoder, **options: Any) -> None:
    """Compile the blocks of a model with torch.compile and these options.

    Layers of the same type share one compiled graph for any number of tokens. Two more are compiled because torch
    specialises on a dimension of size one (a single token) and on None (the residual of the first block).

    torch keeps only a few compiled graphs per code object, so each model gets a code object of its own. A last layer
    that computes only some rows is left uncompiled: it would need graphs of its own.
    """
    model.prepare_attention = partial(CompiledStepAttention, next(_model_ids))
    shared = Block.forward
    own = FunctionType(shared.__code__.replace(), shared.__globals__, shared.__name__, shared.__defaults__)
    for block in model.layers:
        compiled = torch.compile(MethodType(own, block), fullgraph=True, **options)
        block.forward = _with_dynamic_length(compiled, MethodType(shared, block))


def _with_dynamic_length(compiled: BlockForward, eager: BlockForward) -> BlockForward:
    """Return a forward that marks the first dimension of its inputs as dynamic before it calls the compiled block."""

    def forward(
        x: Tensor,
        residual: Tensor | None,
        rope: tuple[Tensor, Tensor],
        cache: LayerCache,
        step: StepAttention,
        rows: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        if rows is not None:
            return eager(x, residual, rope, cache, step, rows)
        for tensor in (x, *(() if residual is None else (residual,)), *rope, step.batch.kv_slots):
            torch._dynamo.maybe_mark_dynamic(tensor, 0)
        return compiled(x, residual, rope, cache, step)

    return forward


class CompiledStepAttention(StepAttention):
    """The attention of one step, called from compiled code through the op yalis::attend.

    An op takes only tensors and numbers, so it finds the step by the id of the model. A model runs one step at a time.
    """

    def __init__(self, model_id: int, backend: AttentionBackend, batch: ForwardBatch) -> None:
        super().__init__(backend, batch)
        self.model_id = model_id
        _running_steps[model_id] = self

    def attend(self, q: Tensor, cache: LayerCache, params: AttentionParams) -> Tensor:
        window, softcap = params.window or 0, params.softcap or 0.0
        return attend(q, cache.k, cache.v, params.sinks, self.model_id, params.scale, window, softcap)


#: The step that each compiled model is running, by model id.
_running_steps: WeakValueDictionary[int, CompiledStepAttention] = WeakValueDictionary()


@opaque(
    "(Tensor q, Tensor k_cache, Tensor v_cache, Tensor? sinks, int model_id, float scale, int window, float softcap) "
    "-> Tensor",
    lambda q, *_: q.shape,
)
def attend(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    sinks: Tensor | None,
    model_id: int,
    scale: float,
    window: int,
    softcap: float,
) -> Tensor:
    """Call the attention backend of the step that this model is running. 0 means no window and no softcap."""
    step = _running_steps[model_id]
    params = AttentionParams(scale, window or None, softcap or None, sinks)
    return step.backend.attend(q, LayerCache(k_cache, v_cache), step.batch, step.shared, params)
