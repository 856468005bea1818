"""How an engine is set up: one frozen object, validated once, the same names in Python and on the command line."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from yalis.errors import YalisError

DTYPES = ("auto", "float32", "bfloat16", "float16")
LOADS = ("auto", "random")
DEFAULT_MODEL = "smollm2-135m"
GridShape = tuple[int, int]  # rows and columns of a tensor-parallel group


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
    block_size: int | None = None  # tokens a KV block holds; None: 64 on a GPU, 16 on a CPU
    kv_blocks: int | None = None  # None: from the memory below
    kv_memory: float | None = None  # GiB for the KV cache; None: 2 on a CPU, memory_fraction on a GPU
    memory_fraction: float = 0.9  # of a GPU, for weights and KV cache together
    prefix_reuse: bool = True
    eager: bool = False  # run every step op by op: nothing is recorded, nothing compiled
    compile: bool = False  # let torch.compile have the model's blocks
    threads: int | None = None  # CPU threads of a rank; None: torch's choice, shared among a machine's ranks
    tp: GridShape = (1, 1)  # tensor parallelism: 4, "2x2" or (2, 2), rows x columns
    pp: int = 1  # pipeline stages
    dp: int = 1  # replicas
    micro_batches: int | None = None  # steps on their way through the stages at a time; None: one for each stage
    allreduce: str = "auto"  # auto or a communication backend's name
    ranks_per_node: int | None = None  # pretend that a machine holds so many ranks; None: what is found
    ranks_per_gpu: int = 1  # several ranks share a GPU only where this says so
    join_timeout: float = 300.0  # seconds to wait for ranks that have not come

    def __post_init__(self) -> None:
        _text("model", self.model)
        _text("device", self.device)
        _text("attention", self.attention)
        _text("allreduce", self.allreduce)
        object.__setattr__(self, "tp", _grid(self.tp))
        if self.tokenizer is not None:
            _text("tokenizer", self.tokenizer)
        _one_of("dtype", self.dtype, DTYPES)
        _one_of("load", self.load, LOADS)
        _one_of("prefix_reuse", self.prefix_reuse, (True, False))
        _one_of("eager", self.eager, (True, False))
        _one_of("compile", self.compile, (True, False))
        if self.eager and self.compile:
            raise YalisError("eager compiles nothing; leave out --eager or --compile")
        _whole("load_seed", self.load_seed, 0, 2**63 - 1)
        for name in ("max_num_seqs", "max_batch_tokens", "pp", "dp", "ranks_per_gpu"):
            _whole(name, getattr(self, name), 1)
        optional = {
            "max_model_len": None,
            "block_size": None,
            "kv_blocks": None,
            "threads": 1024,
            "micro_batches": 1024,
            "ranks_per_node": None,
        }
        for name, most in optional.items():
            if getattr(self, name) is not None:
                _whole(name, getattr(self, name), 1, most)
        if self.block_size is not None and self.block_size & (self.block_size - 1):
            raise YalisError(f"block_size is {self.block_size}; give a power of two, such as 16")
        if self.kv_memory is not None and not (_is_number(self.kv_memory) and 0 < self.kv_memory < math.inf):
            raise YalisError(f"kv_memory is {self.kv_memory!r}; give a number of GiB above 0")
        if not (_is_number(self.memory_fraction) and 0 < self.memory_fraction <= 1):
            raise YalisError(f"memory_fraction is {self.memory_fraction!r}; give a number above 0 and at most 1")
        if not (_is_number(self.join_timeout) and 0 < self.join_timeout < math.inf):
            raise YalisError(f"join_timeout is {self.join_timeout!r}; give a number of seconds above 0")


def _grid(value: object) -> GridShape:
    """4 and "4" are four rows of one column; "2x2" and (2, 2) are two of two."""
    parts: object = value
    if isinstance(value, str):
        parts = [int(part) if part.isdecimal() else part for part in value.lower().split("x")]
    elif not isinstance(value, (tuple, list)):
        parts = [value]
    assert isinstance(parts, (tuple, list))
    good = all(isinstance(part, int) and not isinstance(part, bool) and part >= 1 for part in parts)
    if not good or len(parts) not in (1, 2):
        raise YalisError(f"tp is {value!r}; give a number of ranks from 1 on, such as 4, or rows x columns such as 2x2")
    return (parts[0], parts[1] if len(parts) == 2 else 1)


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
