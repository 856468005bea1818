"""Our own Triton kernels, which read the paged cache in place (yalis/kernels/paged_attention.py).

On a GPU a decode step's launches depend on the number of sequences alone, so a CUDA graph may hold them. Prompts go to
flash where that can serve: its kernels want keys packed one after another, and are faster even with that copy.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from yalis import env
from yalis.attention.base import AttentionBackend, AttentionNeeds, AttentionParams, ForwardBatch, LayerCache
from yalis.attention.flash import FlashAttention, Packed
from yalis.kernels import dependent


@dataclass(frozen=True)
class Shared:
    launch: Any  # of our kernels
    packed: Packed | None  # the keys of prompts, where flash serves them


class TritonAttention(AttentionBackend):
    name = "triton"

    def __init__(self, needs: AttentionNeeds) -> None:
        super().__init__(needs)
        from yalis.kernels import paged_attention

        self.kernels: Any = paged_attention
        self.programs = 4
        self.capturable = needs.device.type == "cuda"
        if self.capturable:
            self.programs = 3 * torch.cuda.get_device_properties(needs.device).multi_processor_count
        self.prompts = FlashAttention(needs) if FlashAttention.unusable(needs) is None else None

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

    def prepare(self, batch: ForwardBatch) -> Shared:
        needs = self.needs
        packed = None
        if self.prompts is not None and not batch.decode_only:
            # Those that decode bring flash a single key each, and are then computed by our kernel.
            decodes = batch.query_start.diff() == 1
            keys = tuple(1 if n == 1 else c for n, c in zip(batch.query_lens, batch.context_lens, strict=True))
            few = replace(batch, context_len=batch.context_len.masked_fill(decodes, 1), context_lens=keys)
            packed = self.prompts.prepare(few)
        launch = self.kernels.plan_launch(
            batch.query_start, batch.query_lens, needs.num_heads, needs.num_kv_heads, needs.head_dim, needs.dtype,
            self.programs, prompts=packed is None,
        )  # fmt: skip
        return Shared(launch, packed)

    def attend(
        self, q: Tensor, cache: LayerCache, batch: ForwardBatch, shared: Shared, params: AttentionParams
    ) -> Tensor:
        out = None
        if self.prompts is not None and shared.packed is not None:
            out = self.prompts.attend(q, cache, batch, shared.packed, params)
        return self.kernels.paged_attention(  # type: ignore[no-any-return]
            q, cache.k, cache.v, batch.query_start, batch.context_len, batch.block_tables, shared.launch,
            params.scale, params.window, params.softcap, out, dependent.wanted(),
        )  # fmt: skip
