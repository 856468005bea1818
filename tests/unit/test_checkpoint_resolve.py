"""Resolving `--model`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.gguf_files import TINY, write_gguf
from yalis.checkpoint.gguf import GgufCheckpoint
from yalis.checkpoint.random import RandomCheckpoint
from yalis.checkpoint.resolve import open_checkpoint, shape_names
from yalis.checkpoint.safetensors import SafetensorsCheckpoint
from yalis.errors import YalisError
from yalis.spec import read_spec

SHAPES = Path(__file__).parents[2] / "benchmarks" / "shapes"
HUB = "yalis-tests/tiny-llama"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny"
    TINY.build(seed=1).save_pretrained(path)
    return path


@pytest.fixture
def hub(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The hub's cache with one repo, without a network."""
    from huggingface_hub import constants

    commit = "0123456789abcdef0123456789abcdef01234567"
    repo = tmp_path / "hub" / ("models--" + HUB.replace("/", "--"))
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text(commit)
    (repo / "snapshots").mkdir()
    (repo / "snapshots" / commit).symlink_to(folder, target_is_directory=True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "hub"


def test_a_folder(folder: Path) -> None:
    checkpoint = open_checkpoint(str(folder))
    assert isinstance(checkpoint, SafetensorsCheckpoint)
    assert checkpoint.label == str(folder)
    assert checkpoint.config["architectures"] == ["LlamaForCausalLM"]


def test_a_gguf_file_by_any_name(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", TINY.build(seed=1))
    assert isinstance(open_checkpoint(str(path)), GgufCheckpoint)
    renamed = path.rename(tmp_path / "blob")
    assert isinstance(open_checkpoint(str(renamed)), GgufCheckpoint)
    random = open_checkpoint(str(renamed), load="random")
    assert isinstance(random, RandomCheckpoint)
    assert random.config["hidden_size"] == 48


def test_a_repo_in_the_hubs_cache(hub: Path) -> None:
    checkpoint = open_checkpoint(HUB)
    assert isinstance(checkpoint, SafetensorsCheckpoint)
    assert checkpoint.label == HUB
    assert isinstance(open_checkpoint(HUB, load="random"), RandomCheckpoint)
    with pytest.raises(
        YalisError, match="there is no folder 'yalis-tests/other', and fetching it from the Hugging Face hub failed"
    ) as error:
        open_checkpoint("yalis-tests/other")
    assert "\n" not in str(error.value)


def test_files_in_a_hub_repo_that_are_not_supported(hub: Path) -> None:
    """The repo is named, not its folder in the cache, which lacks files of formats that are not downloaded."""
    snapshots = next(hub.glob("models--*/snapshots"))
    snapshot = next(snapshots.iterdir())
    config = (snapshot / "config.json").read_text()
    snapshot.unlink()
    snapshot.mkdir()
    (snapshot / "config.json").write_text(config)
    with pytest.raises(YalisError) as error:
        open_checkpoint(HUB)
    assert str(error.value).startswith(f"{HUB} has no .safetensors file, and only .safetensors and ")
    assert f"from_pretrained('{HUB}').save_pretrained('tiny-llama-safetensors')" in str(error.value)
    assert str(error.value).endswith(" and give tiny-llama-safetensors")
    (snapshot / "adapter_config.json").write_text("{}")
    with pytest.raises(YalisError, match=f"LoRA adapters are not supported, and {HUB} has adapter_config.json"):
        open_checkpoint(HUB)


def test_random_weights_need_only_a_config(folder: Path, tmp_path: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "big.json").write_text(json.dumps(config))
    for model in (tmp_path, tmp_path / "config.json", tmp_path / "big.json"):
        checkpoint = open_checkpoint(str(model), load="random", seed=7)
        out, again = torch.empty(251, 48), torch.empty(251, 48)
        checkpoint.tensor("model.embed_tokens.weight", (251, 48)).read_into(out)
        RandomCheckpoint(config, seed=7).tensor("model.embed_tokens.weight", (251, 48)).read_into(again)
        assert torch.equal(out, again)
        assert checkpoint.source == tmp_path


def test_names_of_shape_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # they are found from any folder
    assert "qwen3-235b-a22b" in shape_names()
    for name in shape_names():
        checkpoint = open_checkpoint(name, load="random")
        assert (checkpoint.label, checkpoint.source) == (name, SHAPES)
        assert read_spec(checkpoint.config, name).dtype == "bfloat16"
    with pytest.raises(YalisError, match=r"llama-3\.1-70b\.json is a config without weights; add load='random'"):
        open_checkpoint("llama-3.1-70b")
    with pytest.raises(YalisError, match=r"there is no 'llama-70b'; .* one of: smollm2-135m, llama-3\.1-405b, "):
        open_checkpoint("llama-70b", load="random")
    with pytest.raises(YalisError, match=r"one of: smollm2-135m$"):
        open_checkpoint("llama-70b")


def test_paths_that_are_not_models(tmp_path: Path) -> None:
    with pytest.raises(YalisError, match=r"there is no 'nowhere'; give a folder .* or one of: smollm2-135m"):
        open_checkpoint("nowhere")
    with pytest.raises(YalisError, match="there is no '/no/such/place'"):
        open_checkpoint("/no/such/place")
    with pytest.raises(YalisError, match=r"there is no 'models/missing\.gguf'"):
        open_checkpoint("models/missing.gguf")
    with pytest.raises(YalisError, match=r"has no config\.json"):
        open_checkpoint(str(tmp_path))
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(YalisError, match=r"notes\.txt is not a model"):
        open_checkpoint(str(tmp_path / "notes.txt"))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(YalisError, match="has no architectures entry"):
        open_checkpoint(str(tmp_path))
    with pytest.raises(YalisError, match="is a config without weights; add load='random'"):
        open_checkpoint(str(tmp_path / "config.json"))
    with pytest.raises(YalisError, match="load is 'lazy'; accepted: auto, random"):
        open_checkpoint(str(tmp_path), load="lazy")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(YalisError, match="is not valid JSON"):
        open_checkpoint(str(tmp_path), load="random")
