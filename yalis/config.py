"""The engine's configuration: frozen, validated once, with the same names in Python and on the command line."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from yalis.errors import YalisError

DTYPES = ("auto", "float32", "bfloat16", "float16")
_DTYPE_NAMES = {"fp32": "float32", "float": "float32", "bf16": "bfloat16", "fp16": "float16", "half": "float16"}
LOADS = ("auto", "random")
ROUTINGS = ("model", "uniform")
GENERATION_CONFIGS = ("auto", "none")
DEFAULT_MODEL = "smollm2-135m"
GridShape = tuple[int, int]  # rows and columns of a tensor-parallel group


@dataclass(frozen=True)
class EngineConfig:
    model: str = DEFAULT_MODEL  # short name, folder, repo id, or .gguf file
    tokenizer: str | None = None  # a folder or repo id; None: the checkpoint's
    dtype: str = "auto"  # auto: the checkpoint's dtype on a GPU, float32 on a CPU
    device: str = "auto"  # auto, cpu, cuda, cuda:N
    attention: str = "auto"  # auto or the name of a backend
    load: str = "auto"  # random: random weights; only config.json is read
    load_seed: int = 0
    routing: str = "model"  # uniform: every expert is equally likely, whatever the router says; for random weights only
    generation_config: str = "auto"  # auto: generation_config.json sets the sampling defaults; none: it does not
    max_model_len: int | None = None  # None: the model's maximum, or what the KV cache can hold
    max_num_seqs: int = 64  # sequences in one step
    max_batch_tokens: int = 2048  # tokens in one step; longer prompts are prefilled in chunks
    block_size: int | None = None  # tokens per KV block; None: 64 on a GPU, 16 on a CPU
    kv_blocks: int | None = None  # None: computed from kv_memory or memory_fraction
    kv_memory: float | None = None  # GiB for the KV cache; None: 2 on a CPU, memory_fraction on a GPU
    memory_fraction: float = 0.9  # of GPU memory, for weights and KV cache together
    prefix_reuse: bool = True  # prefix caching
    eager: bool = False  # no CUDA graphs and no torch.compile
    compile: bool = False  # compile the model's layers with torch.compile
    threads: int | None = None  # CPU threads per rank; None: torch's default, divided among the ranks of a host
    tp: GridShape = (1, 1)  # tensor parallelism: 4, "2x2" or (2, 2), rows x columns
    pp: int = 1  # pipeline parallelism: stages
    dp: int = 1  # data parallelism: replicas
    expert_parallel: bool | None = None  # whole experts on each rank of a grid's rows; None: where a model says it pays
    micro_batches: int | None = None  # steps in flight in the pipeline; None: one per stage
    allreduce: str = "auto"  # auto or the name of a communication backend
    ranks_per_node: int | None = None  # simulate nodes of this many ranks; None: detected
    ranks_per_gpu: int = 1  # ranks that may share a GPU
    join_timeout: float = 300.0  # seconds to wait for all ranks to join
    step_timeout: float = 600.0  # seconds that a step of several ranks may make no progress; 0: no limit
    insecure_rendezvous: bool = False  # start although the ranks cannot authenticate each other

    def __post_init__(self) -> None:
        _check_text("model", self.model)
        _check_text("device", self.device)
        _check_text("attention", self.attention)
        _check_text("allreduce", self.allreduce)
        object.__setattr__(self, "tp", parse_grid(self.tp))
        if self.tokenizer is not None:
            _check_text("tokenizer", self.tokenizer)
        dtype = str(self.dtype).removeprefix("torch.")
        object.__setattr__(self, "dtype", _DTYPE_NAMES.get(dtype, dtype))
        _check_choice("dtype", self.dtype, DTYPES)
        _check_choice("load", self.load, LOADS)
        if self.generation_config == "vllm":  # vLLM's name for it
            object.__setattr__(self, "generation_config", "none")
        _check_choice("generation_config", self.generation_config, GENERATION_CONFIGS)
        _check_choice("prefix_reuse", self.prefix_reuse, (True, False))
        _check_choice("eager", self.eager, (True, False))
        _check_choice("compile", self.compile, (True, False))
        _check_choice("expert_parallel", self.expert_parallel, (None, True, False))
        _check_choice("insecure_rendezvous", self.insecure_rendezvous, (True, False))
        if self.eager and self.compile:
            raise YalisError("eager and compile exclude each other; give eager=True or compile=True")
        _check_choice("routing", self.routing, ROUTINGS)
        if self.routing == "uniform" and self.load != "random":
            raise YalisError(
                "routing='uniform' replaces what the router computes, so that outputs make no sense; it is for "
                "measurements with load='random'"
            )
        _check_int("load_seed", self.load_seed, 0, 2**63 - 1)
        for name in ("max_num_seqs", "max_batch_tokens", "pp", "dp", "ranks_per_gpu"):
            _check_int(name, getattr(self, name), 1)
        optional = {
            "max_model_len": None,
            "block_size": None,
            "kv_blocks": None,
            "threads": 1024,
            "micro_batches": 1024,
            "ranks_per_node": None,
        }
        for name, maximum in optional.items():
            if getattr(self, name) is not None:
                _check_int(name, getattr(self, name), 1, maximum)
        if self.block_size is not None and self.block_size & (self.block_size - 1):
            raise YalisError(f"block_size is {self.block_size}; give a power of two, such as 16")
        if self.kv_memory is not None and not (_is_number(self.kv_memory) and 0 < self.kv_memory < math.inf):
            raise YalisError(f"kv_memory is {self.kv_memory!r}; give a number of GiB above 0")
        if not (_is_number(self.memory_fraction) and 0 < self.memory_fraction <= 1):
            raise YalisError(f"memory_fraction is {self.memory_fraction!r}; give a number above 0 and at most 1")
        if not (_is_number(self.join_timeout) and 0 < self.join_timeout < math.inf):
            raise YalisError(f"join_timeout is {self.join_timeout!r}; give a number of seconds above 0")
        if not (_is_number(self.step_timeout) and (self.step_timeout == 0 or 1 <= self.step_timeout < math.inf)):
            raise YalisError(f"step_timeout is {self.step_timeout!r}; give 0 for no limit, or at least 1 second")


def parse_grid(value: object) -> GridShape:
    """Parse a grid: 4 and "4" are four rows of one column; "2x2" and (2, 2) are two rows of two columns."""
    parts: object = value
    if isinstance(value, str):
        parts = [int(part) if part.isdecimal() else part for part in value.lower().split("x")]
    elif not isinstance(value, (tuple, list)):
        parts = [value]
    assert isinstance(parts, (tuple, list))
    valid = all(isinstance(part, int) and not isinstance(part, bool) and part >= 1 for part in parts)
    if not valid or len(parts) not in (1, 2):
        raise YalisError(f"tp is {value!r}; give a number of ranks, such as 4, or rows x columns, such as 2x2")
    return (parts[0], parts[1] if len(parts) == 2 else 1)


def _check_choice(name: str, value: object, accepted: tuple[object, ...]) -> None:
    if not any(value is option or (isinstance(value, str) and value == option) for option in accepted):
        raise YalisError(f"{name} is {value!r}; accepted: {', '.join(map(str, accepted))}")


def _check_text(name: str, value: object) -> None:
    if not isinstance(value, str) or not value:
        raise YalisError(f"{name} is {value!r}; give a non-empty string")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _check_int(name: str, value: Any, low: int, high: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
        limit = f"of at least {low}" if high is None else f"from {low} to {high}"
        raise YalisError(f"{name} is {value!r}; give a whole number {limit}")
