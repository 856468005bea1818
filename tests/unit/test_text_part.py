"""The text part of multimodal checkpoints generates transformers' tokens; other multimodal configs are refused."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file

from tests.families import VOCAB, choose_eager
from yalis import LLM, SamplingParams, YalisError
from yalis.text_part import extract_text_config

TEXT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 77,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "sliding_window": 8,
    "max_position_embeddings": 64,
}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 37,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
GEMMA3 = transformers.Gemma3Config(
    text_config={**TEXT, "sliding_window_pattern": 2}, vision_config=VISION, mm_tokens_per_image=4
)
MISTRAL3 = transformers.Mistral3Config(
    text_config={**TEXT, "model_type": "ministral3"},
    vision_config={**VISION, "model_type": "pixtral", "head_dim": 16},
    tie_word_embeddings=False,
)


def save(config: transformers.PreTrainedConfig, folder: Path) -> transformers.PreTrainedModel:
    torch.manual_seed(1)
    choose_eager(config.text_config)
    model = transformers.AutoModelForImageTextToText.from_config(choose_eager(config)).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(0.2 * torch.randn(weight.shape) + (1.0 if "norm" in name and config is MISTRAL3 else 0.0))
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("config", [GEMMA3, MISTRAL3], ids=lambda config: config.model_type)
@pytest.mark.parametrize("stored", ["language_model.model.", "model.language_model."])
def test_text_is_generated_as_by_transformers(
    config: transformers.PreTrainedConfig, stored: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = save(config, tmp_path)
    if stored == "model.language_model.":  # as transformers 5 names its parameters
        tensors = {name: value.contiguous() for name, value in model.state_dict().items()}
        assert any(name.startswith(stored) for name in tensors)
        if config is GEMMA3:
            del tensors["lm_head.weight"]  # tied
        save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    prompts = [[5, 9, 200, 31, 7, 8, 100, 77, 13, 40, 41], [3]]
    expected = [
        model.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False, use_cache=False)[0, len(prompt) :]
        for prompt in prompts
    ]
    with caplog.at_level(logging.WARNING), LLM(str(tmp_path), device="cpu", dtype="float32") as llm:
        outputs = llm.generate(prompts, SamplingParams(max_tokens=8, ignore_eos=True))
    assert [output.token_ids for output in outputs] == [tokens.tolist() for tokens in expected]
    assert "only the text part of" in caplog.text


def test_keys_beside_text_config_are_used() -> None:
    config = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "eos_token_id": [1, 106],
        "torch_dtype": "float16",
        "text_config": {"model_type": "gemma3_text", "hidden_size": 2560, "head_dim": None},
    }
    assert extract_text_config(config) == {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "eos_token_id": [1, 106],
        "torch_dtype": "float16",
        "hidden_size": 2560,
    }


@pytest.mark.parametrize(
    "change",
    [
        {"text_config": {"model_type": "llama"}},
        {"text_config": None},
        {"architectures": ["LlavaForConditionalGeneration"], "text_config": {"model_type": "mistral"}},
    ],
)
def test_other_multimodal_models_are_refused(change: dict[str, Any], tmp_path: Path) -> None:
    config = {"architectures": ["Mistral3ForConditionalGeneration"], **change}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(YalisError, match=f"{config['architectures'][0]}', which is not supported"):
        LLM(str(tmp_path), load="random", device="cpu")
