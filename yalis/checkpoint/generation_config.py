"""Reads generation_config.json: the end-of-sequence tokens and the sampling defaults that a model's authors chose.

Imports no torch, so that a batch job can compare its requests with existing results before a model is loaded.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from yalis.checkpoint.fetch import ALIASES
from yalis.checkpoint.json_file import read_json_object
from yalis.errors import YalisError
from yalis.types import SamplingParams

FILE = "generation_config.json"
#: Keys of the file -> fields of SamplingParams. vLLM uses the same keys.
_FIELDS = {
    "max_new_tokens": "max_tokens",
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
}


def read_generation_config(source: Path) -> dict[str, Any]:
    """Return generation_config.json of a model's folder, or of the folder of a config.json; {} if it has none."""
    path = (source.parent if source.suffix == ".json" and source.is_file() else source) / FILE
    return read_json_object(path, "fetch it again, or remove it") if path.is_file() else {}


def sampling_defaults(source: Path) -> dict[str, Any]:
    """Return the fields of SamplingParams that a model's generation_config.json sets.

    As in transformers, tokens are sampled only if the file has `do_sample: true`; the temperature is then 1 unless the
    file has another.
    """
    content = read_generation_config(source)
    found = {field: content[key] for key, field in _FIELDS.items() if content.get(key) is not None}
    if content.get("do_sample"):
        found.setdefault("temperature", 1.0)
    else:
        found = {name: value for name, value in found.items() if name in ("max_tokens", "repetition_penalty")}
    try:
        SamplingParams(**found)
    except YalisError as error:
        raise YalisError(
            f"{FILE} of {source} cannot be used ({error}); correct it, or ignore it with generation_config none"
        ) from error
    return found


def find_sampling_defaults(model: str) -> dict[str, Any]:
    """Return sampling_defaults() of what --model accepts; {} for a name that is no model, which loading it refuses.

    Of a hub repo only the small files are downloaded.
    """
    if model in ALIASES:  # GGUF files
        return {}
    path = Path(model).expanduser()
    if "/" in model and not path.exists():
        from yalis.checkpoint.resolve import locate  # imports torch

        path = locate(model, weights=False)
    return sampling_defaults(path)
