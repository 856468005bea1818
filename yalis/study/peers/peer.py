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
    """One greedy run of a batch: when each token of the whole batch was there, in seconds from the start."""

    first_token: float
    steps: list[float]  # seconds of each decode step after the first token
    total: float
    tokens: list[list[int]]  # [batch][output_len]
    host: float | None = None  # seconds of the host's own work for a decode step, where they are known


@dataclass(frozen=True)
class PeerSetup:
    """What a peer must match to be compared."""

    path: Path  # a folder, or a .gguf file
    random_weights: bool
    dtype: torch.dtype
    device: torch.device
    longest: int = 2048  # tokens of a sequence
    batch: int = 64  # sequences at a time
    max_batch_tokens: int = 2048  # tokens of a step
    peers: int = 1  # that share what memory we leave


class Peer(Protocol):
    name: str
    version: str

    def run(self, prompts: list[list[int]], output_len: int) -> Timing: ...


def explain_failure(error: Exception, pip: str | None = None) -> str:
    """Why a peer has no numbers; it may fail in ways of its own. `pip`: of an environment that peers have already."""
    if isinstance(error, YalisError):
        return str(error)
    if isinstance(error, ImportError):
        if error.name is None:
            return f"not installed ({error})"
        its_own = "make peers, or " if pip is None else ""
        return f"{error.name} is not installed: {its_own}{pip or 'pip'} install {error.name}"
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
