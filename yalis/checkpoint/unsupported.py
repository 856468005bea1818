"""Recognizes model files that YALIS cannot read, so that the error names the cause and what to do instead."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from yalis.checkpoint.base import Checkpoint
from yalis.checkpoint.json_file import read_json_object
from yalis.errors import YalisError
from yalis.families import match_family

_ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin")
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"
_LAYER = re.compile(r"model\.layers\.(\d+)\.")
#: Transformers keeps the dtype and writes .safetensors files.
_CONVERT = (
    'python -c "from transformers import AutoModelForCausalLM as M, AutoTokenizer as T; '
    '[auto.from_pretrained({source!r}).save_pretrained({target!r}) for auto in (M, T)]"'
)


def refuse_adapter(folder: Path, label: str) -> None:
    """Raise YalisError if the folder has a LoRA adapter, alone or next to the weights of a model."""
    found = [name for name in _ADAPTER_FILES if (folder / name).is_file()]
    if not found:
        return
    merge = "merge the adapter into its base model with peft (merge_and_unload, save_pretrained) and give that folder"
    if any(path.name not in _ADAPTER_FILES for path in folder.glob("*.safetensors")):
        instead = f"move {' and '.join(found)} elsewhere to run the base model"
    else:
        base = None
        with suppress(YalisError):
            base = read_json_object(folder / found[0], "").get("base_model_name_or_path")
        instead = f"give its base model, {base}" if base else "give its base model"
    raise YalisError(f"LoRA adapters are not supported, and {label} has {found[0]}; {merge}, or {instead}")


def unsupported_quantization(config: Mapping[str, Any]) -> str | None:
    """Return the quantization method that a config.json declares, such as gptq; None if its tensors can be read."""
    declared = config.get("quantization_config") or config.get("compression_config")
    if not declared:
        return None
    if not isinstance(declared, dict):
        return "an unknown method"
    if method := declared.get("quant_method"):
        family = match_family(config)
        if method == "mxfp4" and family is not None and family.mxfp4_experts:
            return None
        return str(method)
    if declared.get("load_in_4bit") or declared.get("load_in_8bit"):  # configs older than quant_method
        return "bitsandbytes"
    return "compressed-tensors" if "config_groups" in declared else "an unknown method"


def refuse_lfs_pointer(path: Path) -> None:
    """Raise YalisError if the file is a git-LFS pointer: the folder was cloned without git-lfs."""
    if not path.is_file():  # opening a named pipe would wait for a writer
        return
    with suppress(OSError), path.open("rb") as file:
        if file.read(len(_LFS_POINTER)) == _LFS_POINTER:
            raise YalisError(
                f"{path} is a git-LFS pointer instead of the file itself; type `git lfs pull` in {path.parent}"
            )


def refuse_pickles(folder: Path, label: str) -> None:
    """Raise YalisError if a folder without .safetensors files has pickled weights, or may have them on the hub.

    If `label` is not an existing path it is a hub repo, whose pickled weights are never downloaded.
    """
    found = sorted(path.name for path in folder.glob("pytorch_model*"))
    if not Path(label).expanduser().exists():
        source, target, weights = label, f"{Path(label).name}-safetensors", "no .safetensors file"
    elif found:
        source, target, weights = str(folder), f"{folder}-safetensors", f"its weights as {found[0]}"
    else:
        return
    convert = _CONVERT.format(source=source, target=target)
    raise YalisError(
        f"{source} has {weights}, and only .safetensors and .gguf files are supported; convert pytorch_model.bin with "
        f"`{convert}` and give {target}"
    )


def ignored_parts(checkpoint: Checkpoint, num_layers: int) -> list[str]:
    """Return a warning for each part of the checkpoint that is not used. `num_layers`: of the config.

    Raises YalisError if the weights have fewer layers.
    """
    warnings = []
    stored = max((int(match[1]) + 1 for name in checkpoint.names() if (match := _LAYER.match(name))), default=0)
    if 0 < stored < num_layers:
        raise YalisError(
            f"num_hidden_layers is {num_layers} in the config of {checkpoint.label}, but its weights have {stored} "
            "layers; config.json and weights do not belong together: fetch the model again"
        )
    if stored > num_layers:
        warnings.append(
            f"num_hidden_layers is {num_layers} in the config of {checkpoint.label}, but its weights have {stored} "
            "layers; the rest is not used"
        )
    if (method := unsupported_quantization(checkpoint.config)) is not None:
        warnings.append(
            f"the config of {checkpoint.label} declares quantization with {method}, which is not supported yet; its "
            "random weights are not quantized"
        )
    return warnings
