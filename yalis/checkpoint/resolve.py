"""Resolves `--model`: a short name, a folder, a .gguf file, or a repo id of the Hugging Face hub."""

from __future__ import annotations

import re
from pathlib import Path

from yalis.checkpoint.base import Checkpoint
from yalis.checkpoint.fetch import ALIASES, fetch_model
from yalis.checkpoint.gguf import GgufCheckpoint
from yalis.checkpoint.gguf_header import MAGIC
from yalis.checkpoint.random import RandomCheckpoint
from yalis.checkpoint.safetensors import SafetensorsCheckpoint, read_config
from yalis.checkpoint.unsupported import refuse_adapter, refuse_lfs_pointer
from yalis.config import LOADS
from yalis.errors import YalisError, YalisFailure, first_line

_REPO = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_KNOWN = ", ".join(ALIASES)
_CONFIG_FILES = ["*.json", "*.model", "*.txt", "*.jinja"]
#: Configs without weights, such as llama-3.1-70b.json. They are in a checkout, and not in an installed package.
_SHAPES = Path(__file__).parents[2] / "benchmarks" / "shapes"


def open_checkpoint(model: str, load: str = "auto", seed: int = 0) -> Checkpoint:
    """Open the checkpoint that `model` names. With load="random" only its config is read, and weights are generated."""
    if load not in LOADS:
        raise YalisError(f"load is {load!r}; accepted: {', '.join(LOADS)}")
    path = locate(model, weights=load == "auto")
    if path.is_dir():
        has_config = (path / "config.json").is_file()
        if load == "auto" or not has_config:
            refuse_adapter(path, model)
        if not has_config:
            raise YalisError(f"{path} has no config.json; give a model's folder, a .gguf file, or one of: {_KNOWN}")
        if load == "auto":
            return SafetensorsCheckpoint(path, label=model)
        return RandomCheckpoint(read_config(path / "config.json"), seed, model, path)
    if path.suffix == ".json":
        if load == "auto":
            raise YalisError(f"{path} is a config without weights; add load='random', or give the model's folder")
        return RandomCheckpoint(read_config(path), seed, model, path.parent)
    refuse_lfs_pointer(path)
    if path.suffix == ".gguf" or _starts_with_magic(path):
        opened = GgufCheckpoint(path, label=model)
        return opened if load == "auto" else RandomCheckpoint(opened.config, seed, model, path)
    raise YalisError(f"{path} is not a model; give a folder with config.json, a .gguf file, or one of: {_KNOWN}")


def locate(model: str, weights: bool = True) -> Path:
    """Return the file or folder that `model` names; downloads it if it is a short name or a hub repo.

    The name of a file in benchmarks/shapes also works, for what needs no weights."""
    if model in ALIASES:
        return fetch_model(model)
    path = Path(model).expanduser()
    if path.exists():
        return path
    if model in shape_names():
        return _SHAPES / f"{model}.json"
    if _REPO.fullmatch(model) and not model.endswith((".gguf", ".json", ".safetensors")):
        return _from_hub(model, weights)
    raise YalisError(
        f"there is no {model!r}; give a folder with config.json, a .gguf file, a hub repo id such as org/name, "
        f"or one of: {_KNOWN}" + ("" if weights or not shape_names() else f", {', '.join(shape_names())}")
    )


def shape_names() -> list[str]:
    """Return the names of the configs in benchmarks/shapes; none if this is not a checkout."""
    return sorted(file.stem for file in _SHAPES.glob("*.json"))


def _from_hub(repo: str, weights: bool) -> Path:
    """Return the repo's snapshot in the hub's cache, which also works without a network."""
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise YalisError(f"there is no folder {repo!r}; a repo of the hub needs: pip install huggingface_hub") from None
    patterns = [*_CONFIG_FILES, "*.safetensors"] if weights else _CONFIG_FILES
    try:
        return Path(snapshot_download(repo, allow_patterns=patterns))
    except Exception as error:  # the hub client raises many types
        raise YalisFailure(
            f"there is no folder {repo!r}, and fetching it from the Hugging Face hub failed ({first_line(error)}); on "
            f"a machine with network type `hf download {repo}`, or give a folder, a .gguf file, or one of: {_KNOWN}"
        ) from error


def _starts_with_magic(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(4) == MAGIC
    except OSError as error:
        raise YalisError(f"cannot read {path}: {error.strerror or error}") from error
