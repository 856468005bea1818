"""Hugging Face folders: reading slices and shards, memory use, and errors for invalid files."""

from __future__ import annotations

import json
import struct
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from tests.families import Case
from tests.gguf_files import SIZES, read_all
from tests.peak_memory import peak_extra_bytes
from yalis.checkpoint.safetensors import INDEX, SafetensorsCheckpoint
from yalis.errors import YalisError

MODEL = Case("bias", "LlamaConfig", {**SIZES, "attention_bias": True})


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One model saved in a single file and in shards."""
    base = tmp_path_factory.mktemp("folders")
    model = MODEL.build(seed=5)
    model.save_pretrained(base / "whole")
    model.save_pretrained(base / "sharded", max_shard_size="60KB")
    assert len(list((base / "sharded").glob("*.safetensors"))) > 2
    return {"whole": base / "whole", "sharded": base / "sharded"}


def _folder(path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text("{}")
    save_file(tensors, path / "model.safetensors")
    return path


@pytest.mark.parametrize("kind", ["whole", "sharded"])
def test_all_tensors(folders: dict[str, Path], kind: str) -> None:
    checkpoint = SafetensorsCheckpoint(folders[kind])
    expected = MODEL.build(seed=5).state_dict()
    found = read_all(checkpoint)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())
    assert checkpoint.bytes_read == sum(weight.numel() * 4 for weight in expected.values())
    assert checkpoint.config["model_type"] == "llama"
    assert checkpoint.find("no.such.tensor") is None
    checkpoint.close()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_slice_in_any_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: st.DataObject) -> None:
    monkeypatch.setattr("yalis.checkpoint.mapped_file.CHUNK_BYTES", data.draw(st.sampled_from([64, 1000, 8 << 20])))
    stored = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    shape = data.draw(st.sampled_from([(), (7,), (30, 5), (9, 11), (4, 3, 5)]))
    whole = torch.randn(shape).to(stored)
    # an odd number of bytes before it makes the data unaligned
    checkpoint = SafetensorsCheckpoint(_folder(tmp_path, {"a": torch.ones(3, dtype=torch.uint8), "w": whole}))
    index = []
    for size in shape:
        start = data.draw(st.integers(0, size))
        index.append(slice(start, data.draw(st.integers(start, size))))
    expected = whole[tuple(index)] if shape else whole.reshape(1)
    out = torch.full(expected.shape, 99.0, dtype=dtype)
    lazy = checkpoint.tensor("w", tuple(shape) or (1,))
    assert lazy.dtype == stored
    lazy.read_into(out, *index)
    assert torch.equal(out, expected.to(dtype))
    assert checkpoint.bytes_read == expected.numel() * stored.itemsize


def test_a_slice_of_the_wrong_size_is_rejected(folders: dict[str, Path]) -> None:
    lazy = SafetensorsCheckpoint(folders["whole"]).tensor("model.embed_tokens.weight", (251, 48))
    with pytest.raises(ValueError, match="a slice of shape"):
        lazy.read_into(torch.empty(4, 48), slice(0, 5))


def test_reading_into_a_strided_tensor(folders: dict[str, Path]) -> None:
    lazy = SafetensorsCheckpoint(folders["whole"]).tensor("model.embed_tokens.weight", (251, 48))
    straight, turned = torch.empty(251, 48), torch.empty(48, 251)
    lazy.read_into(straight)
    lazy.read_into(turned.t())
    assert torch.equal(straight, turned.t())


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_reading_needs_little_memory_besides_the_result(stored: torch.dtype, tmp_path: Path) -> None:
    rows = (128 << 20) // 1024 // stored.itemsize
    folder = _folder(tmp_path, {"w": torch.zeros(rows, 1024, dtype=stored)})  # 128 MiB
    checkpoint = SafetensorsCheckpoint(folder)
    lazy = checkpoint.tensor("w", (rows, 1024))
    out = torch.ones(rows, 1024)
    assert peak_extra_bytes(lambda: lazy.read_into(out)) < 32 << 20
    assert not out.any()


def test_reading_half_the_columns_reads_half_the_bytes(tmp_path: Path) -> None:
    checkpoint = SafetensorsCheckpoint(_folder(tmp_path, {"w": torch.randn(64, 32)}))
    checkpoint.tensor("w", (64, 32)).read_into(torch.empty(64, 16), slice(None), slice(16, 32))
    assert checkpoint.bytes_read == 64 * 16 * 4


def test_a_missing_shard_is_named(folders: dict[str, Path], tmp_path: Path) -> None:
    names = sorted(path.name for path in folders["sharded"].iterdir() if path.suffix in (".json", ".safetensors"))
    shards = [name for name in names if name.endswith(".safetensors")]
    for name in names:
        if name != shards[1]:
            (tmp_path / name).write_bytes((folders["sharded"] / name).read_bytes())
    with pytest.raises(YalisError, match=f"lacks the shard {shards[1]}"):
        SafetensorsCheckpoint(tmp_path)
    (tmp_path / INDEX).write_text("{}")
    with pytest.raises(YalisError, match="has no weight_map"):
        SafetensorsCheckpoint(tmp_path)
    (tmp_path / INDEX).write_text("{")
    with pytest.raises(YalisError, match=r"index\.json is not valid JSON"):
        SafetensorsCheckpoint(tmp_path)


def test_a_truncated_file(tmp_path: Path) -> None:
    folder = _folder(tmp_path, {"a": torch.randn(40, 8), "b": torch.randn(30)})
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    for length in [*range(0, 200, 7), *range(200, len(whole), 113), len(whole) - 1]:
        file.write_bytes(whole[:length])
        with pytest.raises(YalisError, match=r"model\.safetensors") as error:
            SafetensorsCheckpoint(folder)
        assert "\n" not in str(error.value)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.floats(0, 1), st.integers(0, 255)), min_size=1, max_size=3))
def test_a_damaged_header_raises_one_sentence_or_is_harmless(tmp_path: Path, flips: list[tuple[float, int]]) -> None:
    folder = _folder(tmp_path, {"a": torch.randn(4, 8), "b": torch.randn(3)})
    content = bytearray((folder / "model.safetensors").read_bytes())
    for where, value in flips:
        content[int(where * 150)] = value
    (folder / "model.safetensors").write_bytes(content)
    with suppress(YalisError):
        read_all(SafetensorsCheckpoint(folder))


def test_a_header_with_wrong_sizes(tmp_path: Path) -> None:
    folder = _folder(tmp_path, {"a": torch.randn(4)})
    for shape in ([5], [1 << 62, 16], [-4, -1]):
        header = json.dumps({"a": {"dtype": "F32", "shape": shape, "data_offsets": [0, 16]}}).encode()
        (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(16))
        with pytest.raises(YalisError, match=r"model\.safetensors is not a complete safetensors file"):
            SafetensorsCheckpoint(folder)


@pytest.mark.parametrize("stored", [torch.float8_e4m3fn, torch.int32])
def test_an_unsupported_dtype(stored: torch.dtype, tmp_path: Path) -> None:
    checkpoint = SafetensorsCheckpoint(_folder(tmp_path, {"w": torch.ones(4).to(stored), "v": torch.ones(4)}))
    assert checkpoint.find("v") is not None
    with pytest.raises(YalisError, match=r"tensor 'w' .* is stored as (F8_E4M3|I32); accepted: F64, F32, F16, BF16"):
        checkpoint.find("w")


def test_incomplete_folders(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["FooForCausalLM"]}')
    with pytest.raises(
        YalisError, match="architecture 'FooForCausalLM', which is not supported"
    ):  # the better message than missing weights
        SafetensorsCheckpoint(tmp_path)
    sizes = dict.fromkeys(("hidden_size", "num_hidden_layers", "intermediate_size", "vocab_size"), 8)
    config = {"architectures": ["LlamaForCausalLM"], "num_attention_heads": 2, **sizes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(YalisError, match=r"no \.safetensors file; .*load='random'"):
        SafetensorsCheckpoint(tmp_path)
    (tmp_path / "config.json").write_text("{nonsense")
    with pytest.raises(YalisError, match=r"config\.json is not valid JSON"):
        SafetensorsCheckpoint(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(YalisError, match="does not contain a JSON object"):
        SafetensorsCheckpoint(tmp_path)
    (tmp_path / "config.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(YalisError, match="is not valid JSON"):
        SafetensorsCheckpoint(tmp_path)
