"""Model files made to take memory or time, to leave their folder or to end the process are refused in one sentence."""

from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.families import CASES, Case
from tests.gguf_files import SIZES, TINY, write_gguf
from tests.peak_memory import peak_extra_bytes
from tests.tiny_chat import save_tiny_chat
from tests.tokenizer_files import byte_level
from yalis import LLM
from yalis.checkpoint.gguf import GgufCheckpoint
from yalis.checkpoint.json_file import read_json_object
from yalis.checkpoint.resolve import open_checkpoint
from yalis.checkpoint.safetensors import INDEX, SafetensorsCheckpoint
from yalis.checkpoint.tokenizer import Tokenizer
from yalis.cli.main import main
from yalis.errors import YalisError
from yalis.launch.local import LocalRanks
from yalis.spec import read_spec

MODEL = Case("bias", "LlamaConfig", {**SIZES, "attention_bias": True})


def _save(folder: Path) -> dict[str, Any]:
    """Save a model; returns its config."""
    MODEL.build(seed=5).save_pretrained(folder)
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


def test_the_number_of_split_files_is_checked_by_the_name(tmp_path: Path) -> None:
    for name in ("m.gguf", "m-00001-of-00002.gguf"):
        write_gguf(tmp_path / name, CASES[0].build(seed=3), extra={"split.count": 2**31 - 1})
        start = time.monotonic()
        with pytest.raises(YalisError, match="one of the 2147483647 files of a model"):
            GgufCheckpoint(tmp_path / name)
        assert time.monotonic() - start < 5


def _gguf_of_zeros(path: Path, tensors: int, pairs: int, rest: bytes = b"") -> Path:
    """Write a header and a gigabyte of zeros, which take no space on the disk. Zeros are valid metadata."""
    path.write_bytes(struct.pack("<4sIQQ", b"GGUF", 3, tensors, pairs) + rest)
    os.truncate(path, 1 << 30)
    return path


@pytest.mark.parametrize(
    ("tensors", "pairs", "rest"),
    [
        (0, 1 << 60, b""),
        (1 << 60, 0, b""),
        (0, 1, struct.pack("<QcIIQ", 1, b"a", 9, 0, 1 << 29)),  # an array of bytes
        (0, 1, struct.pack("<QcIIQ", 1, b"a", 9, 8, 1 << 26)),  # of strings
        (0, 1, struct.pack("<QcIQ", 1, b"a", 8, 1 << 29)),  # a string
    ],
)
def test_a_gguf_header_does_not_read_the_weights(tmp_path: Path, tensors: int, pairs: int, rest: bytes) -> None:
    path = _gguf_of_zeros(tmp_path / "m.gguf", tensors, pairs, rest)

    def read() -> None:
        with pytest.raises(YalisError, match="is damaged or truncated"):
            GgufCheckpoint(path)

    start = time.monotonic()
    assert peak_extra_bytes(read) < 100 << 20
    assert time.monotonic() - start < 5


@pytest.mark.parametrize(
    "template",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% set x = 1 %}{% endfor %}{% endfor %}",
        "{% macro twice(n) %}{% if n %}{{ twice(n - 1) }}{{ twice(n - 1) }}{% endif %}{% endmacro %}{{ twice(60) }}",
    ],
    ids=["loops", "recursion"],
)
def test_a_chat_template_has_limited_time(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("yalis.checkpoint.tokenizer._TEMPLATE_SECONDS", 0.5)
    tokenizer = Tokenizer(byte_level(), (), "tiny")
    tokenizer.hf.chat_template = template
    start = time.monotonic()
    with pytest.raises(YalisError, match=r"the chat template of tiny .* \(it ran for more than 0\.5 s\)"):
        tokenizer.encode_chat([{"role": "user", "content": "x"}])
    assert time.monotonic() - start < 5
    tokenizer.hf.chat_template = "{{ messages[0].content }}"
    assert tokenizer.decode(tokenizer.encode_chat([{"role": "user", "content": "hello"}])) == "hello"


def test_a_chat_template_with_a_huge_power_is_refused() -> None:
    """A single operation in C, which no exception from another thread can end."""
    tokenizer = Tokenizer(byte_level(), (), "tiny")
    tokenizer.hf.chat_template = "{% set n = messages | length %}{{ (3 * n) ** (400000000 * n) > 0 }}"
    with pytest.raises(YalisError, match=r"the chat template of tiny uses the operator \*\*"):
        tokenizer.encode_chat([{"role": "user", "content": "x"}])
    tokenizer.hf.chat_template = "{% set x = dict(**messages[0]) %}** {{ x.content }} **"
    assert tokenizer.decode(tokenizer.encode_chat([{"role": "user", "content": "x"}])) == "** x **"


@pytest.mark.timeout(60)
def test_a_named_pipe_or_device_is_not_read(tmp_path: Path) -> None:
    save_tiny_chat(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(YalisError, match=r"model\.safetensors is not a regular file"):
        open_checkpoint(str(tmp_path)).close()
    (tmp_path / "device").symlink_to("/dev/zero")
    with pytest.raises(YalisError, match="device is not a regular file; fetch it again"):
        read_json_object(tmp_path / "device", "fetch it again")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_hidden_layers", 6 * 10**8),
        ("num_attention_heads", 2 * 10**9),
        ("vocab_size", 2**40),
        ("hidden_size", 2**70),
    ],
)
def test_sizes_beyond_any_model_are_refused(tmp_path: Path, key: str, value: int) -> None:
    config = {**_save(tmp_path), key: value}
    with pytest.raises(YalisError, match=rf"{key} in .* is {value}; it must be at most \d+"):
        read_spec(config)

    def read() -> None:
        with pytest.raises(YalisError):
            read_spec(config)

    start = time.monotonic()
    assert peak_extra_bytes(read) < 50 << 20
    assert time.monotonic() - start < 5


def test_layers_that_the_weights_do_not_have(tmp_path: Path) -> None:
    config = _save(tmp_path)
    config["num_hidden_layers"] = 9000
    (tmp_path / "config.json").write_text(json.dumps(config))
    start = time.monotonic()
    stored = (
        f"num_hidden_layers is 9000 in the config of {tmp_path}, but its weights have {SIZES['num_hidden_layers']} "
    )
    with pytest.raises(YalisError, match=stored):
        LLM(str(tmp_path))
    assert time.monotonic() - start < 5


def test_a_table_of_positions_larger_than_the_memory(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**_save(tmp_path), "max_position_embeddings": 2**32}))
    with pytest.raises(YalisError, match=r"does not fit the memory of cpu.* smaller max_num_seqs= or max_model_len="):
        LLM(str(tmp_path), kv_blocks=4)


@pytest.mark.parametrize("gguf", [False, True])
def test_a_weight_file_that_is_truncated_while_it_is_mapped(tmp_path: Path, gguf: bool) -> None:
    """Without a check the process is killed by SIGBUS."""
    if gguf:
        write_gguf(tmp_path / "model.gguf", TINY.build(seed=1))
    else:
        _save(tmp_path)
    path = tmp_path / ("model.gguf" if gguf else "model.safetensors")
    program = f"""
import os, torch
from yalis.checkpoint.resolve import open_checkpoint
from yalis.errors import YalisFailure
checkpoint = open_checkpoint({str(path if gguf else tmp_path)!r})
tensors = [(tensor, torch.empty(tensor.shape)) for tensor in map(checkpoint.find, checkpoint.names())]
os.truncate({str(path)!r}, 100)
try:
    for tensor, out in tensors:
        tensor.read_into(out)
except YalisFailure as failure:
    print(failure)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{path} was truncated to 100 of ")


def test_a_rank_killed_by_sigbus_is_explained() -> None:
    ranks = LocalRanks.__new__(LocalRanks)
    process = subprocess.Popen([sys.executable, "-c", f"import os; os.kill(os.getpid(), {int(signal.SIGBUS)})"])
    ranks.processes = {1: process}
    expected = "killed by SIGBUS: a file was truncated while it was read, or /dev/shm is full"
    assert ranks.exit_status(1, wait=30) == expected


@pytest.mark.parametrize("shard", ["../secret.safetensors", "a/../../secret.safetensors", "/etc/hostname"])
def test_a_shard_outside_of_the_folder(tmp_path: Path, shard: str) -> None:
    folder = tmp_path / "model"
    _save(folder)
    (folder / "model.safetensors").rename(tmp_path / "secret.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": {"model.embed_tokens.weight": shard}}))
    with pytest.raises(YalisError, match=rf"names '{shard}', which is not in its folder"):
        SafetensorsCheckpoint(folder)


def test_shards_may_be_links_as_in_the_cache_of_the_hub(tmp_path: Path) -> None:
    snapshot = tmp_path / "snapshots" / "1234"
    config = _save(snapshot)
    (tmp_path / "blobs").mkdir()
    for path in list(snapshot.iterdir()):
        path.rename(tmp_path / "blobs" / path.name)
        path.symlink_to(Path("../../blobs") / path.name)
    (snapshot / "sub").mkdir()
    (snapshot / "sub" / "a.safetensors").symlink_to("../../../blobs/model.safetensors")
    (snapshot / INDEX).write_text(json.dumps({"weight_map": {"model.norm.weight": "sub/a.safetensors"}}))
    checkpoint = SafetensorsCheckpoint(snapshot)
    assert checkpoint.find("model.norm.weight") is not None
    assert checkpoint.config == config


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", INDEX])
@pytest.mark.parametrize("depth", [150, 900, 100_000])
def test_deeply_nested_json(tmp_path: Path, name: str, depth: int, capsys: pytest.CaptureFixture[str]) -> None:
    """A depth of 900 can be read, but not written."""
    content = json.dumps({**_save(tmp_path), "x": 0})[:-2] + "[" * depth + "]" * depth + "}"
    (tmp_path / name).write_text(content)
    assert main(["generate", "--model", str(tmp_path), "hello"]) == 2
    assert f"{tmp_path / name} has more than 100 levels of nesting" in capsys.readouterr().err


INFINITE = float("inf")


@pytest.mark.parametrize(
    "info",
    [
        {"dtype": "F32", "shape": [INFINITE], "data_offsets": [0, 16]},
        {"dtype": "F32", "shape": [-INFINITE, 4], "data_offsets": [0, 16]},
        {"dtype": "F32", "shape": [4], "data_offsets": [0, INFINITE]},
        {"dtype": "F32", "shape": [4], "data_offsets": [-INFINITE, 16]},
        {"dtype": "Q9", "shape": [4], "data_offsets": [INFINITE, INFINITE]},
        {"dtype": "Q9", "shape": [4], "data_offsets": [0.5, 16.5]},
        {"dtype": "Q9", "shape": [0, 2**70], "data_offsets": [0, 0]},
        {"dtype": "F32", "shape": [4.0], "data_offsets": [0, 16]},
        {"dtype": "F32", "shape": ["4"], "data_offsets": [0, 16]},
        {"dtype": "F32", "shape": [True] * 4, "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [10**4000] * 3000, "data_offsets": [0, 16]},
        {"dtype": "F32", "shape": [4], "data_offsets": [0, 10**4000]},
        {"dtype": ["F32"], "shape": [4], "data_offsets": [0, 16]},
    ],
    ids=str,
)
def test_headers_with_impossible_numbers(tmp_path: Path, info: dict[str, Any]) -> None:
    (tmp_path / "config.json").write_text("{}")
    header = json.dumps({"w": info}).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(16))
    start = time.monotonic()
    with pytest.raises(YalisError, match="is not a complete safetensors file"):
        SafetensorsCheckpoint(tmp_path)
    assert time.monotonic() - start < 5
