"""Model files that are not supported: the error names the cause and what to type instead."""

from __future__ import annotations

import json
import logging
import re
import shutil
from pathlib import Path

import pytest
import torch

from tests.tiny_chat import save_tiny_chat
from yalis.checkpoint.random import RandomCheckpoint
from yalis.checkpoint.resolve import open_checkpoint
from yalis.checkpoint.safetensors import SafetensorsCheckpoint
from yalis.checkpoint.tokenizer import load_tokenizer
from yalis.engine.llm import LLM
from yalis.errors import YalisError

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:%s\nsize 988097824\n" % ("ab" * 32)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_chat(tmp_path_factory.mktemp("saved"))


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "model"))


def edit_config(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


def refusal(model: Path, load: str = "auto") -> str:
    with pytest.raises(YalisError) as error:
        open_checkpoint(str(model), load)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_lora_adapter_beside_weights(folder: Path) -> None:
    (folder / "adapter_config.json").write_text("{}")
    shutil.copy(folder / "model.safetensors", folder / "adapter_model.safetensors")
    assert refusal(folder) == (
        f"LoRA adapters are not supported, and {folder} has adapter_config.json; merge the adapter into its base model "
        "with peft (merge_and_unload, save_pretrained) and give that folder, or move adapter_config.json and "
        "adapter_model.safetensors elsewhere to run the base model"
    )
    assert isinstance(open_checkpoint(str(folder), load="random"), RandomCheckpoint)  # reads no weights


@pytest.mark.parametrize("load", ["auto", "random"])
def test_a_lora_adapter_alone(tmp_path: Path, load: str) -> None:
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    assert refusal(tmp_path, load).endswith("and give that folder, or give its base model")
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "org/base"}))
    message = refusal(tmp_path, load)
    assert message.startswith(f"LoRA adapters are not supported, and {tmp_path} has adapter_config.json; merge")
    assert message.endswith("or give its base model, org/base")


@pytest.mark.parametrize(
    ("declared", "method"),
    [
        *(({"quant_method": name}, name) for name in ("gptq", "awq", "fp8", "compressed-tensors", "mxfp4")),
        ({"load_in_4bit": True}, "bitsandbytes"),
        ({"config_groups": {}}, "compressed-tensors"),
        ({"bits": 4}, "an unknown method"),
        ("4 bits", "an unknown method"),
    ],
)
def test_quantization_is_refused_by_its_method(
    folder: Path, caplog: pytest.LogCaptureFixture, declared: object, method: str
) -> None:
    edit_config(folder, quantization_config=declared)
    assert refusal(folder) == (
        f"{folder} is quantized with {method}, which is not supported yet; give its float32, bfloat16 or float16 "
        "checkpoint, or a GGUF file"
    )
    if method == "gptq":  # random weights run, with a warning
        LLM(str(folder), load="random", device="cpu", kv_blocks=4).close()
        assert f"the config of {folder} declares quantization with gptq" in caplog.text
    edit_config(folder, architectures=["DeepseekV3ForCausalLM"])
    assert "architecture 'DeepseekV3ForCausalLM', which is not supported" in refusal(folder)
    edit_config(folder, architectures=["LlamaForCausalLM"], quantization_config=None)
    assert isinstance(open_checkpoint(str(folder)), SafetensorsCheckpoint)


def test_a_git_lfs_pointer(folder: Path) -> None:
    (folder / "model.safetensors").write_text(POINTER)
    (folder / "model.gguf").write_text(POINTER)
    (folder / "tokenizer.json").write_text(POINTER)
    expected = f"{folder}/%s is a git-LFS pointer instead of the file itself; type `git lfs pull` in {folder}"
    assert refusal(folder) == expected % "model.safetensors"
    assert refusal(folder / "model.gguf") == expected % "model.gguf"
    with pytest.raises(YalisError) as error:
        load_tokenizer(str(folder))
    assert str(error.value) == expected % "tokenizer.json"


def test_pickled_weights_and_the_command_that_converts_them(folder: Path) -> None:
    tensors = {name: found.to(torch.bfloat16) for name, found in read_tensors(folder).items()}
    torch.save(tensors, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    edit_config(folder, dtype="bfloat16")
    message = refusal(folder)
    start = f"{folder} has its weights as pytorch_model.bin, and only .safetensors and .gguf files are supported; "
    assert message.startswith(f'{start}convert pytorch_model.bin with `python -c "')
    assert message.endswith(f'"` and give {folder}-safetensors')
    exec(re.search('`python -c "(.*)"`', message)[1], {})  # type: ignore[index]
    converted = Path(f"{folder}-safetensors")
    assert {name: found.dtype for name, found in read_tensors(converted).items()} == dict.fromkeys(
        tensors, torch.bfloat16
    )
    with LLM(str(converted), device="cpu", kv_blocks=4) as llm:
        assert llm.tokenizer is not None


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def test_fewer_layers_in_the_config_than_in_the_weights(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), LLM(str(folder), device="cpu", kv_blocks=4):
        assert not caplog.messages
    edit_config(folder, num_hidden_layers=1)
    with caplog.at_level(logging.WARNING), LLM(str(folder), device="cpu", kv_blocks=4) as llm:
        assert len(llm.generate([[1, 2, 3]])[0].token_ids) > 0
    assert caplog.messages == [
        f"num_hidden_layers is 1 in the config of {folder}, but its weights have 2 layers; the rest is not used"
    ]
