"""The interface of attention backends, and the batch of a step.

Shapes: T tokens of all sequences of a step, concatenated · S sequences · R rows that get logits · H query heads ·
K key/value heads · D head_dim · N KV blocks · B block_size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from yalis.registry import Registry


@dataclass(frozen=True)
class ForwardBatch:
    """The input of one step on the device, with the sequence lengths also on the host.

    In a CUDA graph, context_len and block_tables are int64 views of the input buffer, with any strides.
    """

    token_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64, position of the token in its sequence
    rope_rows: Tensor  # [T] int64, row of the rotary table: the position, plus an offset for LongRoPE's long factors
    kv_slots: Tensor  # [T] int64, KV slot that the token is written to: block * B + offset in the block
    query_start: Tensor  # [S + 1] int32, index of the first token of each sequence, then T
    context_len: Tensor  # [S] int32, tokens of the sequence, those of this step included
    block_tables: Tensor  # [S, max blocks] int32, padded with 0
    logit_rows: Tensor  # [R] int64, tokens that get logits, ascending and distinct
    query_lens: tuple[int, ...]  # tokens of each sequence in this step, on the host; upper bounds in a recorded step
    context_lens: tuple[int, ...]  # context_len on the host; not valid in a recorded step
    hidden: Tensor | None = None  # [T, hidden], the output of the previous pipeline stage

    @property
    def decode_only(self) -> bool:
        """Whether every sequence has exactly one token."""
        return len(self.query_lens) == int(self.token_ids.shape[0])


class LayerCache(NamedTuple):
    """The KV cache of one layer."""

    k: Tensor  # [N, B, K, D]
    v: Tensor  # [N, B, K, D]


@dataclass(frozen=True)
class AttentionNeeds:
    """What a model needs from an attention backend on this rank."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    block_size: int
    window: bool = False  # some layer has a sliding window
    softcap: bool = False  # scores are soft-capped with tanh
    sinks: bool = False  # the softmax has a learned logit per query head (AttentionParams.sinks)


@dataclass(frozen=True)
class AttentionParams:
    """Attention parameters that may differ between layers."""

    scale: float
    window: int | None = None  # a token attends to itself and the window - 1 tokens before it
    softcap: float | None = None
    #: [H], a logit of each query head that takes part in the softmax of its scores, with a value of zero
    sinks: Tensor | None = None


class AttentionBackend(ABC):
    """Attention over the paged KV cache. One object serves all layers of a rank."""

    name: ClassVar[str]
    #: whether steps can be recorded and replayed: results depend on the tensors of the batch alone. Of the lengths on
    #: the host, context_lens is not used; query_lens is exact for several sequences, an upper bound for a single one.
    capturable: bool = False

    def __init__(self, needs: AttentionNeeds) -> None:
        self.needs = needs

    @classmethod
    @abstractmethod
    def unusable(cls, needs: AttentionNeeds) -> str | None:
        """Return why this backend cannot meet these needs, as a short clause, or None if it can."""

    def prepare(self, batch: ForwardBatch) -> Any:
        """Return state that all layers of a step share, such as index tensors and masks. attend() receives it."""
        return None

    @abstractmethod
    def attend(self, q: Tensor, cache: LayerCache, batch: ForwardBatch, shared: Any, params: AttentionParams) -> Tensor:
        """Return the causal attention of q [T, H, D] over the cached tokens of each sequence, as [T, H, D].

        The keys and values of this step are already in the cache. Query head h reads key/value head h // (H // K).
        """


BACKENDS: Registry[type[AttentionBackend]] = Registry(
    "attention backend",
    {
        "sdpa": "yalis.attention.sdpa:SdpaAttention",
        "flex": "yalis.attention.flex:FlexAttention",
        "triton": "yalis.attention.triton:TritonAttention",
        "flash": "yalis.attention.flash:FlashAttention",
        "native": "yalis.attention.native:NativeAttention",
    },
)
