"""How an engine is set up: one frozen object, validated once, the same names in Python and on the command line."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from yalis.errors import YalisError

DTYPES = ("auto", "float32", "bfloat16", "float16")
LOADS = ("auto", "random")
DEFAULT_MODEL = "smollm2-135m"


@dataclass(frozen=True)
class EngineConfig:
    model: str = DEFAULT_MODEL  # alias, folder, repo id, or .gguf file
    tokenizer: str | None = None  # a folder or repo id; None takes the checkpoint's own
    dtype: str = "auto"  # auto: the checkpoint's on a GPU, float32 on a CPU
    device: str = "auto"  # auto, cpu, cuda, cuda:N
    attention: str = "auto"  # auto or a backend's name
    load: str = "auto"  # random: seeded weights from config.json alone
    load_seed: int = 0
    max_model_len: int | None = None  # None: what the model was made for, or what the KV cache holds
    max_num_seqs: int = 64  # sequences in one step
    max_batch_tokens: int = 2048  # tokens in one step; longer prompts are prefilled in chunks
    block_size: int = 16  # tokens a KV block holds
    kv_blocks: int | None = None  # None: from the memory below
    kv_memory: float | None = None  # GiB for the KV cache; None: 2 on a CPU, memory_fraction on a GPU
    memory_fraction: float = 0.9  # of a GPU, for weights and KV cache together
    prefix_reuse: bool = True
    threads: int | None = None  # CPU threads; None leaves torch's choice

    def __post_init__(self) -> None:
        _text("model", self.model)
        _text("device", self.device)
        _text("attention", self.attention)
        if self.tokenizer is not None:
            _text("tokenizer", self.tokenizer)
        _one_of("dtype", self.dtype, DTYPES)
        _one_of("load", self.load, LOADS)
        _one_of("prefix_reuse", self.prefix_reuse, (True, False))
        _whole("load_seed", self.load_seed, 0, 2**63 - 1)
        for name in ("max_num_seqs", "max_batch_tokens", "block_size"):
            _whole(name, getattr(self, name), 1)
        for name, most in (("max_model_len", None), ("kv_blocks", None), ("threads", 1024)):
            if getattr(self, name) is not None:
                _whole(name, getattr(self, name), 1, most)
        if self.block_size & (self.block_size - 1):
            raise YalisError(f"block_size is {self.block_size}; give a power of two, such as 16")
        if self.kv_memory is not None and not (_is_number(self.kv_memory) and 0 < self.kv_memory < math.inf):
            raise YalisError(f"kv_memory is {self.kv_memory!r}; give a number of GiB above 0")
        if not (_is_number(self.memory_fraction) and 0 < self.memory_fraction <= 1):
            raise YalisError(f"memory_fraction is {self.memory_fraction!r}; give a number above 0 and at most 1")


def _one_of(name: str, value: object, accepted: tuple[object, ...]) -> None:
    if not any(value is one or (isinstance(value, str) and value == one) for one in accepted):
        raise YalisError(f"{name} is {value!r}; accepted: {', '.join(map(str, accepted))}")


def _text(name: str, value: object) -> None:
    if not isinstance(value, str) or not value:
        raise YalisError(f"{name} is {value!r}; give a text")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _whole(name: str, value: Any, low: int, high: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
        limit = f"of at least {low}" if high is None else f"from {low} to {high}"
        raise YalisError(f"{name} is {value!r}; give a whole number {limit}")
