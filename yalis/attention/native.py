"""Decoding in C over the paged cache in place (kernels/native.c), for float32 on a CPU; prompts go to sdpa."""

from __future__ import annotations

import torch
from torch import Tensor

from yalis.attention.base import AttentionBackend, AttentionNeeds, AttentionParams, ForwardBatch, LayerCache
from yalis.attention.sdpa import Group, SdpaAttention
from yalis.kernels import native


class NativeAttention(AttentionBackend):
    name = "native"
    capturable = True

    def __init__(self, needs: AttentionNeeds) -> None:
        super().__init__(needs)
        self._prompts = SdpaAttention(needs)

    @classmethod
    def unusable(cls, needs: AttentionNeeds) -> str | None:
        if needs.device.type != "cpu":
            return "it needs a CPU"
        if needs.dtype != torch.float32:
            return "it computes in float32 only"
        return native.reason()

    @staticmethod
    def _library() -> native.Library:
        library = native.load()
        assert library is not None  # unusable() was asked
        return library

    def prepare(self, batch: ForwardBatch) -> list[Group]:
        return self._prompts.prepare(batch)

    def attend(
        self, q: Tensor, cache: LayerCache, batch: ForwardBatch, shared: list[Group], params: AttentionParams
    ) -> Tensor:
        if shared[0].queries > 1 and len(shared) == 1:
            return self._prompts.attend(q, cache, batch, shared, params)
        if q.stride()[1:] != (q.shape[2], 1):
            q = q.contiguous()
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        for part in shared:
            if part.queries == 1:
                self._decode(out, q, cache, batch, part, params)
            else:
                rows = slice(part.row, part.row + part.size * part.queries)
                out[rows] = self._prompts.attend_group(q[rows], cache, batch, part, params)
        return out

    def _decode(
        self, out: Tensor, q: Tensor, cache: LayerCache, batch: ForwardBatch, part: Group, params: AttentionParams
    ) -> None:
        """The group's rows of q, into its rows of out."""
        _, heads, dim = q.shape
        _, block_size, kv_heads, _ = cache.k.shape
        step, table_step, size = q.stride(0), batch.block_tables.stride(0), q.element_size()
        self._library().attend(
            out.data_ptr() + part.row * heads * dim * size, q.data_ptr() + part.row * step * size, step,
            cache.k.data_ptr(), cache.v.data_ptr(),
            batch.block_tables.data_ptr() + part.first * table_step * 4, table_step,
            batch.context_len.data_ptr() + part.first * 4, part.size,
            heads, kv_heads, dim, block_size,
            params.window or 0, params.scale, params.softcap or 0.0, torch.get_num_threads(),
        )  # fmt: skip
