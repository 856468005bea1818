"""What `--model` means: an alias, a folder, a .gguf file, or a repo id of the Hugging Face hub."""

from __future__ import annotations

import re
from pathlib import Path

from yalis.checkpoint.base import Checkpoint
from yalis.checkpoint.fetch import ALIASES, fetch_model
from yalis.checkpoint.gguf import GgufCheckpoint
from yalis.checkpoint.gguf_header import MAGIC
from yalis.checkpoint.random import RandomCheckpoint
from yalis.checkpoint.safetensors import SafetensorsCheckpoint, read_config
from yalis.config import LOADS
from yalis.errors import YalisError, YalisFailure, first_line

_REPO = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_KNOWN = ", ".join(ALIASES)
_CONFIG_FILES = ["*.json", "*.model", "*.txt", "*.jinja"]


def open_checkpoint(model: str, load: str = "auto", seed: int = 0) -> Checkpoint:
    """The checkpoint a user names. With load="random" its weights are seeded numbers and only its config is read."""
    if load not in LOADS:
        raise YalisError(f"load is {load!r}; accepted: {', '.join(LOADS)}")
    place = locate(model, weights=load == "auto")
    if place.is_dir():
        if not (place / "config.json").is_file():
            raise YalisError(f"{place} has no config.json; give a model's folder, a .gguf file, or one of: {_KNOWN}")
        if load == "auto":
            return SafetensorsCheckpoint(place, label=model)
        return RandomCheckpoint(read_config(place / "config.json"), seed, model, place)
    if place.suffix == ".json":
        if load == "auto":
            raise YalisError(f"{place} is a config without weights; add --load random, or give the model's folder")
        return RandomCheckpoint(read_config(place), seed, model, place.parent)
    if place.suffix == ".gguf" or _starts_with_magic(place):
        opened = GgufCheckpoint(place, label=model)
        return opened if load == "auto" else RandomCheckpoint(opened.config, seed, model, place)
    raise YalisError(f"{place} is not a model; give a folder with config.json, a .gguf file, or one of: {_KNOWN}")


def locate(model: str, weights: bool = True) -> Path:
    """The file or folder `model` names, fetched where that is what it takes."""
    if model in ALIASES:
        return fetch_model(model)
    path = Path(model).expanduser()
    if path.exists():
        return path
    if _REPO.fullmatch(model) and not model.endswith((".gguf", ".json", ".safetensors")):
        return _from_hub(model, weights)
    raise YalisError(
        f"there is no {model!r}; give a folder with config.json, a .gguf file, a hub repo id such as org/name, "
        f"or one of: {_KNOWN}"
    )


def _from_hub(repo: str, weights: bool) -> Path:
    """The repo's snapshot in the hub's own cache, which also serves when there is no network."""
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise YalisError(f"there is no folder {repo!r}; a repo of the hub needs: pip install huggingface_hub") from None
    wanted = [*_CONFIG_FILES, "*.safetensors"] if weights else _CONFIG_FILES
    try:
        return Path(snapshot_download(repo, allow_patterns=wanted))
    except Exception as error:  # whatever the network, the hub or its client had against it
        raise YalisFailure(
            f"there is no folder {repo!r}, and the Hugging Face hub did not give a repo of that name "
            f"({first_line(error)}); give a folder, a .gguf file, or one of: {_KNOWN}"
        ) from error


def _starts_with_magic(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(4) == MAGIC
    except OSError as error:
        raise YalisError(f"cannot read {path}: {error.strerror or error}") from error
