"""Command-line flags made from the fields of EngineConfig and SamplingParams, under the same names.

A flag that was not given is absent from the parsed arguments, so that the dataclass's default applies.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any

from yalis.config import DTYPES, GENERATION_CONFIGS, LOADS, ROUTINGS, EngineConfig
from yalis.errors import YalisError
from yalis.keywords import LLM_KEYWORDS, suggest
from yalis.structured_outputs import StructuredOutputs, as_structured_outputs
from yalis.types import SamplingParams

HELP = {
    # EngineConfig
    "model": "short name (see `yalis models`), folder, Hugging Face repo id, or .gguf file",
    "tokenizer": "folder or repo id of the tokenizer, if not the checkpoint's own",
    "dtype": f"one of {', '.join(DTYPES)}; auto is the checkpoint's dtype on a GPU and float32 on a CPU",
    "device": "auto, cpu, cuda or cuda:N",
    "attention": "auto, or the name of an attention backend (see `yalis doctor`)",
    "load": f"one of {', '.join(LOADS)}; random makes random weights from config.json alone",
    "load_seed": "seed of the random weights",
    "routing": f"one of {', '.join(ROUTINGS)}; with --load random: uniform makes all experts of a mixture of experts "
    "equally likely, where random weights prefer a few",
    "generation_config": f"one of {', '.join(GENERATION_CONFIGS)}; auto takes the defaults of sampling flags from the "
    "model's generation_config.json",
    "max_model_len": "maximum tokens of a sequence, prompt and output together",
    "max_num_seqs": "maximum sequences in one step",
    "max_batch_tokens": "maximum tokens in one step; longer prompts are prefilled in chunks",
    "block_size": "tokens in a block of the KV cache, a power of two (default: 64 on a GPU, 16 on a CPU)",
    "kv_blocks": "number of KV cache blocks, instead of computing it from free memory",
    "kv_memory": "size of the KV cache in GiB",
    "memory_fraction": "fraction of GPU memory for weights and KV cache together",
    "prefix_reuse": "reuse the KV blocks of shared prefixes (prefix caching)",
    "eager": "run every step op by op, without CUDA graphs and compilation",
    "compile": "compile the model's layers with torch.compile; compiled code is cached on disk",
    "threads": "CPU threads per rank",
    "tp": "tensor-parallel size: a number of ranks, or the rows x columns of a grid, such as 2x2",
    "pp": "pipeline-parallel size: the number of stages",
    "dp": "data-parallel size: the number of replicas, each on its own ranks",
    "expert_parallel": "with --tp: each rank has whole experts of a mixture of experts, not a slice of every expert "
    "(default: chosen by modelled cost)",
    "micro_batches": "with --pp: micro-batches in the pipeline at a time (default: one per stage)",
    "allreduce": "auto, or the name of a communication backend (see `yalis doctor`)",
    "ranks_per_node": "treat every N consecutive ranks as one node for communication, instead of detecting nodes",
    "ranks_per_gpu": "number of ranks that may share a GPU",
    "join_timeout": "seconds to wait for all ranks to start",
    "step_timeout": "seconds without progress in a step of several ranks until the job ends; 0: no limit",
    "insecure_rendezvous": "start on several hosts although the ranks cannot authenticate each other",
    # SamplingParams
    "max_tokens": "maximum tokens to generate",
    "min_tokens": "minimum tokens to generate before the output may end",
    "temperature": "sampling temperature; 0 is greedy decoding",
    "top_k": "sample from the k most likely tokens; 0 means all",
    "top_p": "sample from the most likely tokens whose probabilities add up to this",
    "min_p": "drop tokens less likely than this fraction of the most likely token",
    "repetition_penalty": "above 1 makes tokens of the prompt and the output less likely",
    "presence_penalty": "-2 to 2, for tokens that are already in the output",
    "frequency_penalty": "-2 to 2, for each occurrence of a token in the output",
    "logit_bias": "number from -100 to 100 to add to the logit of a token id; several as 42:-100,7:2.5",
    "stop": "text that ends the output; may be given several times",
    "stop_token_ids": "token id that ends the output; may be given several times",
    "keep_special_tokens": "special token that stays in the text, such as [TOOL_CALLS]; may be given several times",
    "ignore_eos": "continue after the model's end-of-sequence token",
    "seed": "random seed; the same seed produces the same tokens",
    "n": "outputs per prompt",
    "logprobs": "with --json: report the log probability of each token and of this many most likely tokens",
    "structured_outputs": 'what the output must be, as JSON or as a file of it, such as {"json": SCHEMA}; also '
    '"json_object", "regex", "choice", "grammar" and "tags"',
    "prompt_logprobs": "with --json: the same for each prompt token; with --max-tokens 0 the prompt is only scored",
}


#: vLLM's names of flags that have the same meaning here.
VLLM_FLAGS = {
    f"--{no}{theirs.replace('_', '-')}": f"--{no}{ours.replace('_', '-')}"
    for theirs, ours in LLM_KEYWORDS.renamed.items()
    for no in ("", "no-")
}

#: An argument of LLM in a message, such as `max_model_len=`, `kv_blocks=512` or `device='cpu'`.
_KEYWORD = re.compile(
    rf"""(?<![\w'"/.-])({"|".join(field.name for field in fields(EngineConfig))})=(?:'([^']*)'|([\w.]*\w))?"""
)


def name_flags(message: str) -> str:
    """Return the message of an error with flags instead of keyword arguments: `--kv-blocks 512` for `kv_blocks=512`."""

    def flag(match: re.Match[str]) -> str:
        name, value = match[1].replace("_", "-"), match[2] or match[3]
        if value in ("True", "False"):
            return f"--{name}" if value == "True" else f"--no-{name}"
        return f"--{name} {value}" if value else f"--{name}"

    return _KEYWORD.sub(flag, message)


class Parser(argparse.ArgumentParser):
    """Reports errors as one line, suggests the accepted word for a misspelled one, and reads --max_tokens as
    --max-tokens and --tensor-parallel-size, vLLM's name, as --tp.

    Flags cannot be abbreviated: a new flag would make an abbreviation ambiguous. The parsed arguments hold the parser
    of the verb or benchmark as `parser`.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{**settings, "allow_abbrev": False})
        self.set_defaults(parser=self)

    def error(self, message: str) -> Any:
        raise YalisError(f"{message}; type `{self.prog} --help` for the accepted arguments")

    def refuse_unknown(self, argument: str) -> None:
        """Raise the error for an argument that is left over after parsing."""
        name = _with_dashes(argument).partition("=")[0].lstrip("-")
        flags = [flag.lstrip("-") for flag in self._option_string_actions] if argument.startswith("-") else []
        advice = LLM_KEYWORDS.advice.get(name.replace("-", "_"))
        hint = f" ({advice})" if advice and flags else suggest(name, flags, prefix="--")
        self.error(f"unknown argument {argument!r}{hint}")

    def _parse_optional(self, arg_string: str) -> Any:
        flag = _with_dashes(arg_string)
        name, equals, value = flag.partition("=")
        name = VLLM_FLAGS.get(name, name)
        known = flag.startswith("--") and name in self._option_string_actions
        return super()._parse_optional(name + equals + value if known else arg_string)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            choices = [str(choice) for choice in action.choices]
            advice = suggest(str(value), choices) or f"; accepted: {', '.join(choices)}"
            raise argparse.ArgumentError(action, f"invalid choice: {value!r}{advice}")


def _with_dashes(argument: str) -> str:
    """Return a flag, with or without =VALUE, with dashes for the underscores of its name."""
    name, equals, value = argument.partition("=")
    return name.replace("_", "-") + equals + value


def add_engine_flags(parser: argparse.ArgumentParser, without: Sequence[str] = ()) -> None:
    """Add a flag for each field of EngineConfig. Under a launcher, ranks other than 0 then serve rank 0's engine."""
    parser.set_defaults(uses_engine=True)
    group = parser.add_argument_group("engine")
    for field in fields(EngineConfig):
        if field.name not in without:
            _add_flag(group, field)


def add_sampling_flags(parser: argparse.ArgumentParser, hidden: Sequence[str] = (), **shown_defaults: Any) -> None:
    """Add a flag for every field of SamplingParams.

    `hidden` fields, which the verb refuses, are left out of its help text. `shown_defaults` are defaults of this verb
    that differ from those of SamplingParams, for the help text.
    """
    group = parser.add_argument_group("sampling")
    for field in fields(SamplingParams):
        _add_flag(group, field, shown_defaults, field.name in hidden)


def add_common_flags(parser: argparse.ArgumentParser, json: str) -> None:
    parser.add_argument("--json", action="store_true", help=json)
    add_debug_flag(parser)


def add_debug_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--debug", action="store_true", default=argparse.SUPPRESS, help="print the traceback of an error"
    )


def engine_config(args: argparse.Namespace) -> EngineConfig:
    return EngineConfig(**_given_fields(args, EngineConfig))


def sampling_fields(args: argparse.Namespace) -> dict[str, Any]:
    """Return the sampling fields that were given, after validating them."""
    given = _given_fields(args, SamplingParams)
    SamplingParams(**given)
    return given


def _given_fields(args: argparse.Namespace, config_class: type[EngineConfig] | type[SamplingParams]) -> dict[str, Any]:
    values = vars(args)
    given = {field.name: values[field.name] for field in fields(config_class) if field.name in values}
    return {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}


def _add_flag(
    group: Any, field: Field[Any], shown_defaults: dict[str, Any] | None = None, hidden: bool = False
) -> None:
    flag = "--" + field.name.replace("_", "-")
    type_name = str(field.type).removesuffix(" | None")
    assert field.default is not MISSING, field.name
    default = (shown_defaults or {}).get(field.name, field.default)
    options: dict[str, Any] = {"dest": field.name, "default": argparse.SUPPRESS, "help": HELP[field.name]}
    if default not in (None, (), False, ""):
        shown = "on" if default is True else "x".join(map(str, default)) if isinstance(default, tuple) else default
        options["help"] += f" (default: {shown})"
    if hidden:
        options["help"] = argparse.SUPPRESS
    if type_name == "bool":
        group.add_argument(flag, action=argparse.BooleanOptionalAction, **options)
    elif type_name.startswith("tuple["):
        item_type = type_name.removeprefix("tuple[").removesuffix(", ...]")
        options.update(action="append", type=_PARSERS[item_type], metavar=_METAVARS[field.name])
        group.add_argument(flag, **options)
    else:
        metavar = _METAVARS.get(field.name) or ("N" if type_name in ("int", "float") else field.name.upper())
        group.add_argument(flag, type=_PARSERS[type_name], metavar=metavar, **options)


#: What the help text shows for a flag's value; other numbers are N, other texts the name of the flag.
_METAVARS = {
    "stop": "TEXT", "stop_token_ids": "ID", "logit_bias": "ID:BIAS", "tp": "N", "kv_memory": "GIB",
    "join_timeout": "SECONDS", "keep_special_tokens": "TOKEN",
    "structured_outputs": "JSON|FILE",
    "step_timeout": "SECONDS",
}  # fmt: skip


def parse_int(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None


def parse_ints(text: str) -> tuple[int, ...]:
    """Parse "1,8" into (1, 8)."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of whole numbers, such as 1,8") from None


def parse_float(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None


def parse_biases(text: str) -> dict[int, float]:
    """Parse "42:-100,7:2.5" into {42: -100.0, 7: 2.5}."""
    pairs = [part.partition(":") for part in text.split(",")]
    try:
        return {int(token): float(bias) for token, _, bias in pairs}
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of ID:BIAS, such as 42:-100,7:2.5") from None


def parse_structured_outputs(text: str) -> StructuredOutputs:
    """Parse a JSON object of the fields of StructuredOutputs, or the file that contains it."""
    try:
        value = json.loads(text if text.lstrip().startswith("{") else Path(text).read_text("utf-8"))
        structured = as_structured_outputs(value)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"cannot read {text} ({error.strerror}); give JSON or a file of it") from None
    except ValueError as error:
        raise argparse.ArgumentTypeError(f'not valid JSON ({error}); such as {{"json": SCHEMA}}') from None
    assert structured is not None
    return structured


_PARSERS: dict[str, Callable[[str], Any]] = {
    "int": parse_int, "float": parse_float, "str": str, "GridShape": str, "dict[int, float]": parse_biases,
    "StructuredOutputs": parse_structured_outputs,
}  # fmt: skip
