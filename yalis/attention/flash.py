"""torch's built-in flash attention in its variable-length form, for bfloat16 and float16 on a GPU.

It reads a paged cache only with blocks of 256 tokens, so the keys and values of a step are packed first, one sequence
after another. The aten op is called directly, not through torch.nn.attention.varlen: the signature of that wrapper
differs between torch versions, and some do not support grouped-query heads.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from yalis.attention.base import AttentionBackend, AttentionNeeds, AttentionParams, ForwardBatch, LayerCache
from yalis.attention.context_slots import packed_context


@dataclass(frozen=True)
class PackedKeys:
    """Index tensors of the packed keys: S sequences, P keys of all of them."""

    slots: Tensor  # [P] cache slot of each key
    key_start: Tensor  # [S + 1] int32, first key of each sequence
    max_lens: tuple[int, int]  # (queries, keys) per sequence


class FlashAttention(AttentionBackend):
    name = "flash"

    @classmethod
    def unusable(cls, needs: AttentionNeeds) -> str | None:
        if needs.device.type != "cuda":
            return "it needs a GPU"
        if needs.dtype not in (torch.bfloat16, torch.float16):
            return "it computes in bfloat16 and float16 only"
        if needs.softcap:
            return "it cannot cap scores (softcap)"
        if needs.sinks:
            return "it has no attention sinks"
        if needs.head_dim % 8 or needs.head_dim > 256:
            return f"it needs a head_dim that is a multiple of 8 and at most 256, not {needs.head_dim}"
        if not torch.backends.cuda.is_flash_attention_available():
            return "this torch was built without flash attention"
        if torch.cuda.get_device_capability(needs.device) < (8, 0):
            return "it needs a GPU of compute capability 8.0 or newer"
        return None

    def prepare(self, batch: ForwardBatch) -> PackedKeys:
        _, _, slots = packed_context(batch, self.needs.block_size)
        ends = batch.context_len.cumsum(0, dtype=torch.int32)
        max_lens = max(batch.query_lens), max(batch.context_lens)
        return PackedKeys(slots, torch.nn.functional.pad(ends, (1, 0)), max_lens)

    def attend(
        self, q: Tensor, cache: LayerCache, batch: ForwardBatch, shared: PackedKeys, params: AttentionParams
    ) -> Tensor:
        k, v = (x.flatten(0, 1).index_select(0, shared.slots) for x in cache)
        # The kernel aligns the last query of a sequence with its last key, for the causal mask and for the window.
        causal = params.window is None
        left, right = (-1, -1) if params.window is None else (params.window - 1, 0)
        out: Tensor = torch.ops.aten._flash_attention_forward(
            q, k, v, batch.query_start, shared.key_start, *shared.max_lens, 0.0, causal, False,
            scale=params.scale, window_size_left=left, window_size_right=right,
        )[0]  # fmt: skip
        return out
