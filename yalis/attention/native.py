"""Decode attention in C, which reads the paged cache in place (kernels/native.c), for float32 on a CPU.

Sequences with several new tokens use the sdpa backend.
"""

from __future__ import annotations

import torch
from torch import Tensor

from yalis.attention.base import AttentionBackend, AttentionNeeds, AttentionParams, ForwardBatch, LayerCache
from yalis.attention.sdpa import SdpaAttention, SequenceGroup
from yalis.kernels import native


class NativeAttention(AttentionBackend):
    name = "native"
    capturable = True

    def __init__(self, needs: AttentionNeeds) -> None:
        super().__init__(needs)
        self._prefill = SdpaAttention(needs)

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
        assert library is not None  # unusable() was checked
        return library

    def prepare(self, batch: ForwardBatch) -> list[SequenceGroup]:
        return self._prefill.prepare(batch)

    def attend(
        self, q: Tensor, cache: LayerCache, batch: ForwardBatch, shared: list[SequenceGroup], params: AttentionParams
    ) -> Tensor:
        if shared[0].queries > 1 and len(shared) == 1:
            return self._prefill.attend(q, cache, batch, shared, params)
        if q.stride()[1:] != (q.shape[2], 1):
            q = q.contiguous()
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        for group in shared:
            if group.queries == 1:
                self._decode(out, q, cache, batch, group, params)
            else:
                rows = slice(group.row, group.row + group.size * group.queries)
                out[rows] = self._prefill.attend_group(q[rows], cache, batch, group, params)
        return out

    def _decode(
        self,
        out: Tensor,
        q: Tensor,
        cache: LayerCache,
        batch: ForwardBatch,
        group: SequenceGroup,
        params: AttentionParams,
    ) -> None:
        """Compute the rows of one group and write them to `out`."""
        _, heads, dim = q.shape
        _, block_size, kv_heads, _ = cache.k.shape
        q_stride, table_stride, size = q.stride(0), batch.block_tables.stride(0), q.element_size()
        self._library().attend(
            out.data_ptr() + group.row * heads * dim * size, q.data_ptr() + group.row * q_stride * size, q_stride,
            cache.k.data_ptr(), cache.v.data_ptr(),
            batch.block_tables.data_ptr() + group.first * table_stride * 4, table_stride,
            batch.context_len.data_ptr() + group.first * 4, group.size,
            heads, kv_heads, dim, block_size,
            params.window or 0, params.scale, params.softcap or 0.0, torch.get_num_threads(),
            None if params.sinks is None else params.sinks.data_ptr(),
        )  # fmt: skip
