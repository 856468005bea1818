"""Our own Triton kernels, which read the paged cache in place (yalis/kernels/paged_attention.py)."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from yalis import env
from yalis.attention.base import AttentionBackend, AttentionNeeds, AttentionParams, ForwardBatch, LayerCache


class TritonAttention(AttentionBackend):
    name = "triton"

    def __init__(self, needs: AttentionNeeds) -> None:
        super().__init__(needs)
        from yalis.kernels import paged_attention

        self.kernels: Any = paged_attention
        self.programs = 16
        if needs.device.type == "cuda":
            self.programs = 3 * torch.cuda.get_device_properties(needs.device).multi_processor_count

    @classmethod
    def unusable(cls, needs: AttentionNeeds) -> str | None:
        if find_spec("triton") is None:
            return "triton is not installed (pip install triton)"
        if needs.device.type == "cuda":
            return None
        if not env.triton_interpreted():
            return "it needs a GPU, or TRITON_INTERPRET=1 in the environment to run slowly on a CPU"
        if needs.dtype != torch.float32:
            return "on a CPU it computes in float32 only"
        return None

    def prepare(self, batch: ForwardBatch) -> Any:
        needs = self.needs
        return self.kernels.plan_launch(
            batch.query_start, batch.query_lens, batch.context_lens, needs.num_heads, needs.num_kv_heads,
            needs.head_dim, needs.dtype, self.programs,
        )  # fmt: skip

    def attend(self, q: Tensor, cache: LayerCache, batch: ForwardBatch, shared: Any, params: AttentionParams) -> Tensor:
        out: Tensor = self.kernels.paged_attention(
            q, cache.k, cache.v, batch.query_start, batch.context_len, batch.block_tables, shared,
            params.scale, params.window, params.softcap,
        )  # fmt: skip
        return out
