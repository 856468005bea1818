"""Flags have the names and types of the Python fields."""

from __future__ import annotations

import ast
import re
from dataclasses import fields
from pathlib import Path

import pytest

import yalis
from yalis.cli.flags import HELP, engine_config, name_flags, sampling_fields
from yalis.cli.main import build_parser
from yalis.config import EngineConfig
from yalis.errors import YalisError
from yalis.types import SamplingParams


def test_every_field_has_a_flag_and_help() -> None:
    names = {field.name for config in (EngineConfig, SamplingParams) for field in fields(config)}
    assert set(HELP) == names
    parser = build_parser()
    args = parser.parse_args(["generate", "x"])
    assert not names & set(vars(args))  # flags that were not given are absent
    assert engine_config(args) == EngineConfig()
    assert sampling_fields(args) == {}


def test_flags_of_every_type() -> None:
    line = "generate x --model m --kv-blocks 7 --kv-memory 0.5 --no-prefix-reuse --max-tokens 3 --top-p 0.5"
    line += " --stop a --stop b --stop-token-ids 4 --stop-token-ids 5 --ignore-eos --seed 9"
    line += " --presence-penalty -1 --dtype float32 --logit-bias 42:-100,7:2.5"
    args = build_parser().parse_args(line.split())
    assert engine_config(args) == EngineConfig(
        model="m", kv_blocks=7, kv_memory=0.5, prefix_reuse=False, dtype="float32"
    )
    assert SamplingParams(**sampling_fields(args)) == SamplingParams(
        max_tokens=3, top_p=0.5, stop=("a", "b"), stop_token_ids=(4, 5), ignore_eos=True, seed=9,
        presence_penalty=-1.0, logit_bias={42: -100.0, 7: 2.5},
    )  # fmt: skip


def test_underscores_in_flags_are_dashes() -> None:
    line = "generate --max_tokens 3 --top_p=0.5 --no_prefix_reuse --stop a_b --model=some_model -- a_b --max_tokens"
    args = build_parser().parse_args(line.split())
    assert args.prompts == ["a_b", "--max_tokens"]
    assert engine_config(args) == EngineConfig(model="some_model", prefix_reuse=False)
    assert sampling_fields(args) == {"max_tokens": 3, "top_p": 0.5, "stop": ("a_b",)}
    command = ["yalis", "generate", "--hosts_file", "--max_tokens", "3"]  # the command of the ranks is kept as it is
    assert build_parser().parse_args(["lab", "--ranks_per_host", "3", "--", *command]).command[-5:] == command


def test_flags_of_vllm_with_the_same_meaning() -> None:
    line = "generate x --tensor-parallel-size 2 --pipeline_parallel_size=3 --gpu-memory-utilization 0.5 --enforce-eager"
    args = build_parser().parse_args([*line.split(), "--no-enable-prefix-caching", "--dtype", "half"])
    assert engine_config(args) == EngineConfig(
        tp=(2, 1), pp=3, memory_fraction=0.5, eager=True, prefix_reuse=False, dtype="float16"
    )


def test_the_help_of_chat(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        build_parser().parse_args(["chat", "--help"])
    flags = {line.split()[0]: line.split()[1:2] for line in capsys.readouterr().out.splitlines() if "  --" in line}
    assert "--n" not in flags  # a chat has one answer
    assert [flags[name] for name in ("--ranks-per-gpu", "--max-tokens", "--top-p", "--tp")] == [["N"]] * 4
    assert [flags["--kv-memory"], flags["--join-timeout"], flags["--stop"]] == [["GIB"], ["SECONDS"], ["TEXT"]]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--max-tokens x", "'x' is not a whole number; type `yalis generate --help`"),
        ("--top-p", "expected one argument"),
        ("--max-tokens 0", "max_tokens is 0"),
        ("--logit-bias 42", "'42' is not a list of ID:BIAS, such as 42:-100,7:2.5"),
        ("--logit-bias 42:101", "the logit_bias of token 42 is 101.0; give a number of at least -100 and at most 100"),
        ("--temperature nan", "temperature is nan"),
        ("--dtype int8", "dtype is 'int8'; accepted: auto, float32"),
        ("--block-size 12", "power of two"),
    ],
)
def test_invalid_values_are_one_line(line: str, message: str) -> None:
    def read() -> None:
        args = build_parser().parse_args(["generate", "hi", *line.split()])
        engine_config(args)
        sampling_fields(args)

    with pytest.raises(YalisError, match=message):
        read()


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("shorten it, or raise max_model_len=", "shorten it, or raise --max-model-len"),
        ("give kv_blocks=2048 or less", "give --kv-blocks 2048 or less"),
        ("a smaller kv_memory=, or tp=4.", "a smaller --kv-memory, or --tp 4."),
        ("give device='cpu', or eager=True", "give --device cpu, or --eager"),
        ("no file /data/model=a/x; tpp=2", "no file /data/model=a/x; tpp=2"),
    ],
)
def test_the_command_line_names_flags(message: str, shown: str) -> None:
    assert name_flags(message) == shown


def test_messages_of_the_library_name_keyword_arguments() -> None:
    """A flag in a message below cli/ would be shown to users of the Python API."""
    flags = re.compile("|".join(rf"--{field.name.replace('_', '-')}\b" for field in fields(EngineConfig)))
    root, found = Path(yalis.__file__).parent, []
    for path in sorted(root.rglob("*.py")):
        if path.relative_to(root).parts[0] in ("cli", "study"):
            continue
        tree = ast.parse(path.read_text())
        texts = [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
        docstrings = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        found += [f"{path.name}:{text.lineno}" for text in texts if text not in docstrings and flags.search(text.value)]
    assert found == []
