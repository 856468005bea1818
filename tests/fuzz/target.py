"""The interface of fuzz targets, and the tiny model whose files are mutated."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any, Protocol

import torch

from yalis import LLM, SamplingParams
from yalis.checkpoint.base import Checkpoint
from yalis.checkpoint.resolve import open_checkpoint
from yalis.engine.device import resolve_block_size
from yalis.parallel.memory import whole_memory
from yalis.spec import read_spec

#: Larger models are opened and sized, but not built, because a valid model may need more than the memory limit.
_MAX_BUILT_BYTES = 16 << 20
_MAX_BUILT_LAYERS = 100
_MAX_POSITIONS = 1 << 16

SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "dtype": "float32",
}


class Target(Protocol):
    """One kind of input."""

    name: str

    def make(self, rng: Random) -> bytes:
        """Return a mutated input."""

    def run(self, data: bytes, folder: Path) -> None:
        """Give the input to YALIS; `folder` is empty. Raises YalisError if it is refused."""


def open_model(path: Path, load: str = "auto") -> None:
    """Do what `yalis plan` and `LLM` do with a model's files; a small model also generates two tokens."""
    checkpoint = open_checkpoint(str(path), load)
    try:
        spec = read_spec(checkpoint.config, checkpoint.label)
        memory = whole_memory(spec, 4, resolve_block_size(None, torch.device("cpu")))
        checkpoint.fingerprint()
        small = memory.weight_bytes + memory.kv_block_bytes < _MAX_BUILT_BYTES and spec.num_layers <= _MAX_BUILT_LAYERS
        if not small or spec.max_position > _MAX_POSITIONS:
            _read_tensors(checkpoint)
            return
    finally:
        checkpoint.close()
    with LLM(str(path), load=load, device="cpu", dtype="float32", kv_blocks=8, max_num_seqs=2, threads=1) as llm:
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2), progress=False)


def _read_tensors(checkpoint: Checkpoint) -> None:
    """Read every tensor that the files contain. Their memory is bounded by the size of the files."""
    for name in checkpoint.names():
        tensor = checkpoint.find(name)
        if tensor is not None:
            tensor.read_into(torch.empty(tensor.shape, dtype=tensor.dtype))
