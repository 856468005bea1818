"""The contract of an attention backend, and the batch it works on.

Shapes: T tokens of all sequences of a step, packed · S sequences · H query heads · K key/value heads · D head_dim ·
N blocks in the pool · B tokens a block holds.
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
    """The tokens of one step, on the device, with the lengths also known on the host."""

    token_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64, place in its own sequence
    rope_rows: Tensor  # [T] int64, row of the rotary table (the position, or past it for a second set of factors)
    kv_slots: Tensor  # [T] int64, where a token's key and value go: block * B + place in the block
    query_start: Tensor  # [S + 1] int32, where each sequence's tokens begin among the T; in a recorded step or int64
    context_len: Tensor  # [S] int32, tokens of the sequence after this step, these included
    block_tables: Tensor  # [S, most blocks] int32, padded with 0; in a recorded step int64 like lengths, of any strides
    logit_rows: Tensor  # [R] int64, which of the T tokens get logits: ascending, each once
    query_lens: tuple[int, ...]  # the same lengths on the host
    context_lens: tuple[int, ...]
    hidden: Tensor | None = None  # [T, hidden] from the pipeline stage before this one

    @property
    def decode_only(self) -> bool:
        """Every sequence brings exactly one token."""
        return len(self.query_lens) == int(self.token_ids.shape[0])


class LayerCache(NamedTuple):
    """One layer's keys and values, in blocks."""

    k: Tensor  # [N, B, K, D]
    v: Tensor  # [N, B, K, D]


@dataclass(frozen=True)
class AttentionNeeds:
    """What a model asks of a backend on this rank; enough to say whether a backend can serve it."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    block_size: int
    window: bool = False  # some layer has a sliding window
    softcap: bool = False  # scores are capped by tanh


@dataclass(frozen=True)
class AttentionParams:
    """What may differ from layer to layer."""

    scale: float
    window: int | None = None  # a token sees itself and the window - 1 tokens before it
    softcap: float | None = None


class AttentionBackend(ABC):
    """Reads the paged cache. One object serves all layers of a rank."""

    name: ClassVar[str]
    #: whether steps can be recorded and replayed: all it reads is in the batch's tensors, and the lengths on the host
    #: are but the most that may come
    capturable: bool = False

    def __init__(self, needs: AttentionNeeds) -> None:
        self.needs = needs

    @classmethod
    @abstractmethod
    def unusable(cls, needs: AttentionNeeds) -> str | None:
        """Why this backend cannot serve these needs here, as a short clause; None when it can."""

    def prepare(self, batch: ForwardBatch) -> Any:
        """What all layers of one step share (index tensors, masks): made once a step, handed to every attend()."""
        return None

    @abstractmethod
    def attend(self, q: Tensor, cache: LayerCache, batch: ForwardBatch, shared: Any, params: AttentionParams) -> Tensor:
        """Causal attention of q [T, H, D] over each sequence's own cached tokens, as [T, H, D].

        The step's own keys and values are already written. Query head h reads key/value head h // (H // K).
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
