"""The flash kernels inside torch, over keys and values packed one sequence after another. GPU, bf16 and fp16.

They read a paged cache themselves only in blocks of 256 tokens, so a step's keys are packed first. The kernel is called
where torch.nn.attention.varlen calls it: that wrapper's signature changes with every torch, not all sharing key heads.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from yalis.attention.base import AttentionBackend, AttentionNeeds, AttentionParams, ForwardBatch, LayerCache
from yalis.attention.spans import packed_context


@dataclass(frozen=True)
class Packed:
    slots: Tensor  # [P]
    key_start: Tensor  # [S + 1] int32
    longest: tuple[int, int]  # (queries, keys) of one sequence


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
        if needs.head_dim % 8 or needs.head_dim > 256:
            return f"it needs a head_dim that is a multiple of 8 and at most 256, not {needs.head_dim}"
        if not torch.backends.cuda.is_flash_attention_available():
            return "this torch was built without flash attention"
        if torch.cuda.get_device_capability(needs.device) < (8, 0):
            return "it needs a GPU of compute capability 8.0 or newer"
        return None

    def prepare(self, batch: ForwardBatch) -> Packed:
        _, _, slots = packed_context(batch, self.needs.block_size)
        ends = batch.context_len.cumsum(0, dtype=torch.int32)
        return Packed(slots, torch.nn.functional.pad(ends, (1, 0)), (max(batch.query_lens), max(batch.context_lens)))

    def attend(
        self, q: Tensor, cache: LayerCache, batch: ForwardBatch, shared: Packed, params: AttentionParams
    ) -> Tensor:
        k, v = (x.flatten(0, 1).index_select(0, shared.slots) for x in cache)
        # Causality and windows count from the last key of a sequence, as its last query does.
        causal = params.window is None
        left, right = (-1, -1) if params.window is None else (params.window - 1, 0)
        out: Tensor = torch.ops.aten._flash_attention_forward(
            q, k, v, batch.query_start, shared.key_start, *shared.longest, 0.0, causal, False,
            scale=params.scale, window_size_left=left, window_size_right=right,
        )[0]  # fmt: skip
        return out
