"""Other engines, measured in the same run on the same tokens, so that a ratio compares like with like."""

from __future__ import annotations

import contextlib
import io
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import torch

from yalis.registry import Registry
from yalis.study.bandwidth import synchronize


@dataclass(frozen=True)
class Timing:
    """One greedy run of a batch: when each token of the whole batch was there, in seconds from the start."""

    first_token: float
    steps: list[float]  # seconds of each decode step after the first token
    total: float
    tokens: list[list[int]]  # [batch][output_len]


@dataclass(frozen=True)
class PeerSetup:
    """What a peer must match to be compared."""

    path: Path  # a folder, or a .gguf file
    random_weights: bool
    dtype: torch.dtype
    device: torch.device


class Peer(Protocol):
    name: str
    version: str

    def run(self, prompts: list[list[int]], output_len: int) -> Timing: ...


class TransformersPeer:
    """transformers' own generate, greedy, with its default cache."""

    name = "transformers"

    def __init__(self, setup: PeerSetup) -> None:
        import transformers

        self.version = transformers.__version__
        self._device = setup.device
        with contextlib.redirect_stderr(io.StringIO()):  # its progress bars, which ask nobody whether to show
            self._model = _load(setup)
        # No end token at all: one that is only suppressed would change which tokens are chosen.
        self._model.generation_config = transformers.GenerationConfig(do_sample=False, pad_token_id=0)

    def run(self, prompts: list[list[int]], output_len: int) -> Timing:
        import transformers

        stamps: list[float] = []

        class Clock(transformers.StoppingCriteria):  # type: ignore[misc]
            def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
                synchronize(input_ids.device)
                stamps.append(time.perf_counter())
                return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)

        ids = torch.tensor(prompts, device=self._device)
        synchronize(self._device)
        start = time.perf_counter()
        with torch.inference_mode():
            out = self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=output_len,
                stopping_criteria=transformers.StoppingCriteriaList([Clock()]),
            )
        synchronize(self._device)
        total = time.perf_counter() - start
        steps = [after - before for before, after in pairwise(stamps)]
        return Timing(stamps[0] - start, steps, total, out[:, ids.shape[1] :].tolist())


def _load(setup: PeerSetup) -> Any:
    import transformers

    auto = transformers.AutoModelForCausalLM
    if setup.random_weights:
        config = transformers.AutoConfig.from_pretrained(str(setup.path))
        with setup.device:
            return auto.from_config(config, dtype=setup.dtype).eval()
    if setup.path.suffix == ".gguf":
        import accelerate  # noqa: F401  (without it transformers reads no GGUF file)

        model = auto.from_pretrained(str(setup.path.parent), gguf_file=setup.path.name, dtype=setup.dtype)
    else:
        model = auto.from_pretrained(str(setup.path), dtype=setup.dtype)
    return model.to(setup.device).eval()


PEERS: Registry[type[Peer]] = Registry("peer", {"transformers": "yalis.study.peers:TransformersPeer"})


def start(name: str, setup: PeerSetup) -> Peer | str:
    """The peer, ready; or why it cannot run here, which is a line in the table and not the end of the benchmark."""
    peer: Any = PEERS.load(name)
    try:
        ready: Peer = peer(setup)
        return ready
    except Exception as error:
        return explain(error)


def explain(error: Exception) -> str:
    """Why a peer has no numbers; it may fail in ways of its own."""
    if isinstance(error, ImportError):
        return f"not installed: pip install {error.name}" if error.name else f"not installed ({error})"
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
