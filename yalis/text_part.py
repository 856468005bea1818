"""The text part of multimodal checkpoints: its config and tensor names, translated to those of a text model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from yalis.families import FAMILIES

#: "architectures" entries of models whose text part runs here, if text_config's model_type is one of these.
_MULTIMODAL = ("Gemma3ForConditionalGeneration", "Mistral3ForConditionalGeneration")
_TEXT_MODELS = ("gemma3_text", "ministral3", "mistral")
#: Keys that a multimodal config.json may have beside text_config instead of in it.
_SHARED_KEYS = (
    "bos_token_id", "dtype", "eos_token_id", "pad_token_id", "quantization_config", "tie_word_embeddings", "torch_dtype"
)  # fmt: skip
#: Prefixes of tensors, as transformers before and since version 5 stores them.
_PREFIXES = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
}


def extract_text_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config of the text part; a config that is no multimodal one of a known kind is returned itself."""
    names, text = config.get("architectures"), config.get("text_config")
    if not isinstance(names, list) or not isinstance(text, dict) or not any(name in _MULTIMODAL for name in names):
        return config
    family = next((family for family in FAMILIES.values() if family.name == text.get("model_type")), None)
    if family is None or family.name not in _TEXT_MODELS:
        return config
    shared = {key: config[key] for key in _SHARED_KEYS if config.get(key) is not None}
    given = {key: value for key, value in text.items() if value is not None}
    return {**shared, **given, "architectures": [family.architecture]}


def rename_text_tensors(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tensors with the names of a text model; those of other parts keep their names."""
    return {_text_name(name): tensor for name, tensor in tensors.items()}


def _text_name(name: str) -> str:
    for prefix, replacement in _PREFIXES.items():
        if name.startswith(prefix):
            return replacement + name.removeprefix(prefix)
    return name
