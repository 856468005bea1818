"""The interface of a peer engine. The worker process imports this file in another Python, so it needs only torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from yalis.errors import YalisError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Timing:
    """The times of one run of a batch, in seconds."""

    first_token: float  # until every sequence has its first token
    steps: list[float]  # each decode step after the first token
    total: float
    tokens: list[list[int]]  # [batch][output_len]
    host: float | None = None  # host time of a decode step, if known


@dataclass(frozen=True)
class PeerSetup:
    """The settings a peer must use for a fair comparison."""

    path: Path  # a checkpoint folder, or a .gguf file
    random_weights: bool
    dtype: torch.dtype
    device: torch.device
    max_model_len: int = 2048
    max_num_seqs: int = 64
    max_batch_tokens: int = 2048  # tokens in one step
    num_peers: int = 1  # peers that share the memory YALIS leaves free
    temperature: float = 0.0  # 0: greedy
    top_k: int = 0  # 0: all tokens
    top_p: float = 1.0
    routing: str = "model"  # uniform: experts are chosen at random


class Peer(Protocol):
    """An engine that generates `output_len` tokens for each prompt, past any end-of-sequence token."""

    name: str
    version: str

    def run(self, prompts: list[list[int]], output_len: int) -> Timing: ...


def explain_failure(error: Exception, pip: str | None = None) -> str:
    """Return why a peer failed, in one sentence. `pip` is the pip command of the peers' environment, if any."""
    if isinstance(error, YalisError):
        return str(error)
    if isinstance(error, ImportError):
        if error.name is None:
            return f"not installed ({error})"
        make = "make peers, or " if pip is None else ""
        return f"{error.name} is not installed: {make}{pip or 'pip'} install {error.name}"
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
