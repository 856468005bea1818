"""torch's flex_attention: the step is one packed sequence of queries and keys, and a mask says who sees whom.

Compiled on a GPU. On a CPU the same call runs uncompiled: exact, and slow for long contexts.
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
from yalis.attention.spans import packed_context

# Lengths are padded to the mask's tile, so that the compiled kernel meets few shapes and no ragged edge.
TILE = 128


@dataclass
class Packed:
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

    def prepare(self, batch: ForwardBatch) -> Packed:
        sequence, position, slots = packed_context(batch, self.needs.block_size)
        tokens, keys = batch.positions.shape[0], slots.shape[0]
        counts = batch.query_start.diff().long()
        everyone = torch.arange(counts.shape[0], device=counts.device)
        owner = torch.repeat_interleave(everyone, counts, output_size=tokens)
        more_tokens, more_keys = -tokens % TILE, -keys % TILE
        return Packed(
            pad(slots, (0, more_keys)),
            pad(owner, (0, more_tokens), value=-1),
            pad(batch.positions, (0, more_tokens)),
            pad(sequence, (0, more_keys), value=-2),
            pad(position, (0, more_keys)),
        )

    def attend(
        self, q: Tensor, cache: LayerCache, batch: ForwardBatch, shared: Packed, params: AttentionParams
    ) -> Tensor:
        tokens, heads, _ = q.shape
        mask = shared.masks.get(params.window)
        if mask is None:
            mask = shared.masks[params.window] = make_mask(shared, params.window)
        k, v = (x.flatten(0, 1).index_select(0, shared.slots).transpose(0, 1)[None] for x in cache)
        q = pad(q, (0, 0, 0, 0, 0, shared.query_sequence.shape[0] - tokens)).transpose(0, 1)[None]
        arguments = {
            "score_mod": None if params.softcap is None else make_cap(params.softcap, q.device),
            "block_mask": mask,
            "scale": params.scale,
            "enable_gqa": heads != k.shape[1],
        }
        out: Tensor = flex_call(q.device.type)(q, k, v, **arguments)
        return out[0].transpose(0, 1)[:tokens]


def make_mask(packed: Packed, window: int | None) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    query_sequence, query_position = packed.query_sequence, packed.query_position
    key_sequence, key_position = packed.key_sequence, packed.key_position

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        own = query_sequence[query] == key_sequence[key]
        return own & (key_position[key] <= query_position[query])

    def sees_near(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        assert window is not None
        return sees(batch, head, query, key) & (key_position[key] > query_position[query] - window)

    rule = sees if window is None else sees_near
    sizes = query_sequence.shape[0], key_sequence.shape[0]
    return create_block_mask(rule, None, None, *sizes, device=key_sequence.device, BLOCK_SIZE=TILE)


@cached
def make_cap(softcap: float, device: torch.device) -> Callable[..., Tensor]:
    """One function for each cap: a new one for every step would be compiled again.

    The cap is a tensor on the device: dynamo turns a Python float that differs between models into a symbol, which the
    compiled kernel cannot read.
    """
    limit = torch.tensor(softcap, dtype=torch.float32, device=device)

    def cap(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return limit * torch.tanh(score / limit)

    return cap


@cached
def flex_call(device: str) -> Callable[..., Tensor]:
    from torch.nn.attention import flex_attention as module

    flex_attention: Any = module.flex_attention
    if device == "cuda":
        # Past this number of variants (models, windows, caps) dynamo would silently run the slow, uncompiled way.
        from torch._dynamo import config

        config.recompile_limit = max(config.recompile_limit, 64)
        compiled: Callable[..., Tensor] = torch.compile(flex_attention, dynamic=True)
        return compiled

    def uncompiled(*args: Tensor, **kwargs: Any) -> Tensor:
        # Called plainly, flex_attention traces itself anew for every shape, and gives up after a few.
        with torch.compiler.set_stance("force_eager"), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
            result: Tensor = flex_attention(*args, **kwargs)
            return result

    return uncompiled
