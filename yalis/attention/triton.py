"""Attention with our Triton kernels, which read the paged cache in place (kernels/paged_attention.py).

On a GPU, launch sizes depend only on the number of sequences and the maximum prompt length, so steps can be captured
in CUDA graphs.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from yalis import env
from yalis.attention.base import AttentionBackend, AttentionNeeds, AttentionParams, ForwardBatch, LayerCache
from yalis.kernels.gpu_limits import gpu_limits
from yalis.kernels.pdl import pdl_enabled


class TritonAttention(AttentionBackend):
    name = "triton"

    def __init__(self, needs: AttentionNeeds) -> None:
        super().__init__(needs)
        from yalis.kernels import paged_attention

        self.kernels: Any = paged_attention
        self.target_programs = paged_attention.PROGRAMS_PER_SM * gpu_limits(needs.device).num_sms
        self.capturable = needs.device.type == "cuda"

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
            batch.query_start, batch.query_lens, needs.num_heads, needs.num_kv_heads, needs.head_dim, needs.dtype,
            self.target_programs,
        )  # fmt: skip

    def attend(self, q: Tensor, cache: LayerCache, batch: ForwardBatch, shared: Any, params: AttentionParams) -> Tensor:
        return self.kernels.paged_attention(  # type: ignore[no-any-return]
            q, cache.k, cache.v, batch.query_start, batch.context_len, batch.block_tables, shared,
            params.scale, params.window, params.softcap, pdl_enabled(), params.sinks,
        )  # fmt: skip
