"""Flags made from the fields of EngineConfig and SamplingParams, so that both worlds have the same names.

A flag that was not given is absent, and the dataclass's own default holds.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import MISSING, Field, fields
from typing import Any

from yalis.config import DTYPES, LOADS, EngineConfig
from yalis.errors import YalisError
from yalis.types import SamplingParams

HELP = {
    # EngineConfig
    "model": "alias (see `yalis models`), folder, Hugging Face repo id, or .gguf file",
    "tokenizer": "folder or repo id of another tokenizer than the checkpoint's own",
    "dtype": f"one of {', '.join(DTYPES)}; auto is the checkpoint's own on a GPU, float32 on a CPU",
    "device": "auto, cpu, cuda or cuda:N",
    "attention": "auto or a backend's name (see `yalis doctor`)",
    "load": f"one of {', '.join(LOADS)}; random makes seeded weights from config.json alone",
    "load_seed": "seed of the random weights",
    "max_model_len": "longest sequence, prompt and answer together",
    "max_num_seqs": "sequences in one step",
    "max_batch_tokens": "tokens in one step; longer prompts are computed in chunks",
    "block_size": "tokens a block of the KV cache holds, a power of two (default: 64 on a GPU, 16 on a CPU)",
    "kv_blocks": "blocks in the KV cache, instead of counting them from memory",
    "kv_memory": "GiB for the KV cache",
    "memory_fraction": "share of a GPU's memory for weights and KV cache together",
    "prefix_reuse": "keep the KV blocks of shared prefixes",
    "eager": "run every step op by op, without recording or compiling any",
    "compile": "let torch.compile have the model's blocks, its work kept in the cache",
    "threads": "CPU threads of each rank",
    "tp": "tensor parallelism: a number of ranks, or rows x columns of a grid, such as 2x2",
    "pp": "pipeline stages",
    "dp": "replicas of the model, each with its own ranks",
    "micro_batches": "with --pp: steps on their way through the pipeline at a time (default: one for each stage)",
    "allreduce": "auto or a communication backend's name (see `yalis doctor`)",
    "ranks_per_node": "tell communication backends that so many neighbouring ranks share a node, whatever is found",
    "ranks_per_gpu": "on GPUs: ranks that may share one",
    "join_timeout": "seconds to wait for ranks that have not come",
    # SamplingParams
    "max_tokens": "most tokens to generate",
    "min_tokens": "tokens to generate before anything may end the answer",
    "temperature": "0 takes the likeliest token",
    "top_k": "draw from the k likeliest tokens; 0 keeps all",
    "top_p": "draw from the likeliest tokens that together have this probability",
    "min_p": "drop tokens less likely than this times the likeliest",
    "repetition_penalty": "above 1 makes tokens of prompt and answer less likely",
    "presence_penalty": "from -2 to 2, for tokens already in the answer",
    "frequency_penalty": "from -2 to 2, for each time a token is already in the answer",
    "stop": "text that ends the answer; may be given several times",
    "stop_token_ids": "token id that ends the answer; may be given several times",
    "ignore_eos": "go on past the model's own end",
    "seed": "the same seed gives the same tokens",
    "n": "answers for each prompt",
    "logprobs": "report each token's log probability and those of this many most likely ones (with --json)",
}


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line. Flags are spelt out: an abbreviation could come to mean another one."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{**settings, "allow_abbrev": False})

    def error(self, message: str) -> Any:
        raise YalisError(f"{message}; type `{self.prog} --help` for what is accepted")


def add_engine_flags(parser: argparse.ArgumentParser, without: Sequence[str] = ()) -> None:
    parser.set_defaults(serves_ranks=True)
    group = parser.add_argument_group("engine")
    for one in fields(EngineConfig):
        if one.name not in without:
            _add(group, one)


def add_sampling_flags(parser: argparse.ArgumentParser, **shown_defaults: Any) -> None:
    """`shown_defaults`: where a verb has another default than SamplingParams."""
    group = parser.add_argument_group("sampling")
    for one in fields(SamplingParams):
        _add(group, one, shown_defaults)


def add_common_flags(parser: argparse.ArgumentParser, json: str) -> None:
    parser.add_argument("--json", action="store_true", help=json)
    parser.add_argument(
        "--debug", action="store_true", default=argparse.SUPPRESS, help="show the traceback of an error"
    )


def engine_config(args: argparse.Namespace) -> EngineConfig:
    return EngineConfig(**_given(args, EngineConfig))


def sampling_fields(args: argparse.Namespace) -> dict[str, Any]:
    """The sampling fields that were given, already known to be good."""
    given = _given(args, SamplingParams)
    SamplingParams(**given)
    return given


def _given(args: argparse.Namespace, kind: type[EngineConfig] | type[SamplingParams]) -> dict[str, Any]:
    named = vars(args)
    given = {one.name: named[one.name] for one in fields(kind) if one.name in named}
    return {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}


def _add(group: Any, one: Field[Any], shown_defaults: dict[str, Any] | None = None) -> None:
    flag = "--" + one.name.replace("_", "-")
    kind = str(one.type).removesuffix(" | None")
    assert one.default is not MISSING, one.name
    default = (shown_defaults or {}).get(one.name, one.default)
    settings: dict[str, Any] = {"dest": one.name, "default": argparse.SUPPRESS, "help": HELP[one.name]}
    if default not in (None, (), False, ""):
        shown = "on" if default is True else "x".join(map(str, default)) if isinstance(default, tuple) else default
        settings["help"] += f" (default: {shown})"
    if kind == "bool":
        group.add_argument(flag, action=argparse.BooleanOptionalAction, **settings)
    elif kind.startswith("tuple["):
        read = _READERS[kind.removeprefix("tuple[").removesuffix(", ...]")]
        group.add_argument(flag, action="append", type=read, metavar=_placeholder(one.name), **settings)
    else:
        group.add_argument(flag, type=_READERS[kind], metavar=_placeholder(one.name), **settings)


def _placeholder(name: str) -> str:
    return {"stop": "TEXT", "stop_token_ids": "ID"}.get(name, name.rsplit("_", 1)[-1].upper())


def whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None


def number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None


_READERS: dict[str, Callable[[str], Any]] = {"int": whole, "float": number, "str": str, "GridShape": str}
