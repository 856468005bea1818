"""torch's flex_attention over one packed sequence of queries and keys, with a block mask that separates sequences.

It is compiled on a GPU. On a CPU it runs uncompiled, which is exact but slow for long contexts.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache as cached
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from yalis.attention.base import AttentionBackend, AttentionNeeds, AttentionParams, ForwardBatch, LayerCache
from yalis.attention.context_slots import packed_context

# Lengths are padded to a multiple of the mask's block size, so that the compiled kernel sees few different shapes.
MASK_BLOCK = 128


@dataclass
class PackedStep:
    """Sequence and position of every query and key of a step, padded to MASK_BLOCK."""

    slots: Tensor  # [keys] padded with slot 0
    query_sequence: Tensor  # [queries] padded with -1
    query_position: Tensor
    key_sequence: Tensor  # [keys] padded with -2
    key_position: Tensor
    masks: dict[int | None, Any] = field(default_factory=dict)  # by window


class FlexAttention(AttentionBackend):
    name = "flex"

    @classmethod
    def unusable(cls, needs: AttentionNeeds) -> str | None:
        if needs.device.type not in ("cpu", "cuda"):
            return "it needs a CPU or a GPU"
        if needs.device.type == "cuda" and needs.head_dim < 16:
            return f"it needs a head_dim of at least 16, not {needs.head_dim}"
        return None

    def prepare(self, batch: ForwardBatch) -> PackedStep:
        sequence, position, slots = packed_context(batch, self.needs.block_size)
        tokens, keys = batch.positions.shape[0], slots.shape[0]
        counts = batch.query_start.diff().long()
        sequences = torch.arange(counts.shape[0], device=counts.device)
        query_sequence = torch.repeat_interleave(sequences, counts, output_size=tokens)
        query_padding, key_padding = -tokens % MASK_BLOCK, -keys % MASK_BLOCK
        return PackedStep(
            pad(slots, (0, key_padding)),
            pad(query_sequence, (0, query_padding), value=-1),
            pad(batch.positions, (0, query_padding)),
            pad(sequence, (0, key_padding), value=-2),
            pad(position, (0, key_padding)),
        )

    def attend(
        self, q: Tensor, cache: LayerCache, batch: ForwardBatch, shared: PackedStep, params: AttentionParams
    ) -> Tensor:
        tokens, heads, _ = q.shape
        mask = shared.masks.get(params.window)
        if mask is None:
            mask = shared.masks[params.window] = make_mask(shared, params.window)
        k, v = (x.flatten(0, 1).index_select(0, shared.slots).transpose(0, 1)[None] for x in cache)
        q = pad(q, (0, 0, 0, 0, 0, shared.query_sequence.shape[0] - tokens)).transpose(0, 1)[None]
        arguments = {
            "score_mod": None if params.softcap is None else make_score_mod(params.softcap, q.device),
            "block_mask": mask,
            "scale": params.scale,
            "enable_gqa": heads != k.shape[1],
        }
        attention = load_flex_attention(q.device.type)
        if params.sinks is None:
            out: Tensor = attention(q, k, v, **arguments)
        else:
            from torch.nn.attention.flex_attention import AuxRequest

            out, aux = attention(q, k, v, return_aux=AuxRequest(lse=True), **arguments)
            # exp(lse) / (exp(lse) + exp(sink)) is the weight of all keys together.
            out = out * torch.sigmoid(aux.lse - params.sinks.float()[:, None]).unsqueeze(-1).to(out.dtype)
        return out[0].transpose(0, 1)[:tokens]


def make_mask(packed: PackedStep, window: int | None) -> Any:
    """Return the block mask: a query attends to the keys of its own sequence that causality and the window allow."""
    from torch.nn.attention.flex_attention import create_block_mask

    query_sequence, query_position = packed.query_sequence, packed.query_position
    key_sequence, key_position = packed.key_sequence, packed.key_position

    def causal(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        same_sequence = query_sequence[query] == key_sequence[key]
        return same_sequence & (key_position[key] <= query_position[query])

    def causal_window(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        assert window is not None
        return causal(batch, head, query, key) & (key_position[key] > query_position[query] - window)

    mask_mod = causal if window is None else causal_window
    sizes = query_sequence.shape[0], key_sequence.shape[0]
    return create_block_mask(mask_mod, None, None, *sizes, device=key_sequence.device, BLOCK_SIZE=MASK_BLOCK)


@cached
def make_score_mod(softcap: float, device: torch.device) -> Callable[..., Tensor]:
    """Return the score modification softcap * tanh(score / softcap), the same function for the same arguments.

    A new function for every step would be compiled again. The cap is a tensor on the device, because dynamo turns a
    Python float that differs between models into a symbol, which the compiled kernel cannot read.
    """
    limit = torch.tensor(softcap, dtype=torch.float32, device=device)

    def cap(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return limit * torch.tanh(score / limit)

    return cap


@cached
def load_flex_attention(device: str) -> Callable[..., Tensor]:
    """Return flex_attention, compiled for `device` "cuda" and forced to run eagerly for "cpu"."""
    from torch.nn.attention import flex_attention as module

    flex_attention: Any = module.flex_attention
    if device == "cuda":
        # Above this number of variants (models, windows, caps) dynamo silently falls back to slow eager execution.
        from torch._dynamo import config

        config.recompile_limit = max(config.recompile_limit, 64)
        compiled: Callable[..., Tensor] = torch.compile(flex_attention, dynamic=True)
        return compiled

    def uncompiled(*args: Tensor, **kwargs: Any) -> Tensor:
        # By itself, flex_attention traces anew for every shape and fails after a few.
        with torch.compiler.set_stance("force_eager"), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
            result: Tensor = flex_attention(*args, **kwargs)
            return result

    return uncompiled
