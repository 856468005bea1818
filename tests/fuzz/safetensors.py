"""Targets: the header of a .safetensors file, and model.safetensors.index.json."""

from __future__ import annotations

import json
import struct
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

from tests.fuzz.mutations import NUMBERS, dump, mutate_bytes, mutate_json, mutate_json_text
from tests.fuzz.target import SIZES, open_model

_CONFIG = {**SIZES, "architectures": ["LlamaForCausalLM"], "tie_word_embeddings": True}
_INDEX = "model.safetensors.index.json"


@cache
def _shapes() -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor of the model, by name."""
    hidden, width, head = SIZES["hidden_size"], SIZES["intermediate_size"], SIZES["head_dim"]
    queries, keys = SIZES["num_attention_heads"] * head, SIZES["num_key_value_heads"] * head
    layer = {
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (width, hidden),
        "mlp.up_proj": (width, hidden),
        "mlp.down_proj": (hidden, width),
    }
    layers = {f"model.layers.{i}.{name}.weight": shape for i in range(2) for name, shape in layer.items()}
    return {"model.embed_tokens.weight": (SIZES["vocab_size"], hidden), "model.norm.weight": (hidden,), **layers}


def _header(dtype: str, itemsize: int) -> tuple[dict[str, Any], int]:
    """Return the header of the model's file and the bytes of its tensors."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in _shapes().items():
        begin, end = end, end + itemsize * shape[0] * (shape[1] if len(shape) > 1 else 1)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    return header, end


def _write(header: bytes, tensor_bytes: int, length: int | None = None) -> bytes:
    length = len(header) if length is None else length
    return struct.pack("<Q", length % 2**64) + header + bytes(tensor_bytes)


def _shift_offsets(header: dict[str, Any], rng: Random) -> None:
    """Make tensors overlap, leave gaps, or lie outside the file."""
    tensor = rng.choice([value for name, value in header.items() if name != "__metadata__"])
    begin, end = tensor["data_offsets"]
    by = rng.choice((1, -1, 3, 64, -64, begin, 2**31, 2**63, 2**64 - begin, -begin - 1))
    tensor["data_offsets"] = rng.choice(([begin + by, end + by], [begin, end + by], [end, begin], [0, end - begin]))
    if rng.random() < 0.3:  # sizes whose product is 0, overflows 64 bits, or is as before
        tensor["shape"] = rng.choice(([0], [0, 2**62], [2**32, 2**32, 0], [2**33, 2**31], [1] * 60, [], [-1, -64]))


class SafetensorsTarget:
    name = "safetensors header"

    def make(self, rng: Random) -> bytes:
        header, tensor_bytes = _header(*rng.choice((("F32", 4), ("BF16", 2), ("F16", 2), ("F64", 8), ("I8", 1))))
        kind = rng.random()
        if kind < 0.35:
            _shift_offsets(header, rng)
            return _write(dump(header), tensor_bytes)
        if kind < 0.8:
            return _write(mutate_json_text(header, rng), tensor_bytes)
        if kind < 0.9:
            length = rng.choice([number for number in NUMBERS if isinstance(number, int)])
            return _write(dump(mutate_json(header, rng)), tensor_bytes, length)
        return mutate_bytes(_write(dump(header), tensor_bytes), rng, limit=rng.choice((16, 4000)))

    def run(self, data: bytes, folder: Path) -> None:
        (folder / "config.json").write_text(json.dumps(_CONFIG))
        (folder / "model.safetensors").write_bytes(data)
        open_model(folder)


class IndexTarget:
    name = "safetensors index"
    _shards = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")

    def make(self, rng: Random) -> bytes:
        weight_map: dict[str, Any] = {name: self._shards["layers.1" in name] for name in _shapes()}
        if rng.random() < 0.4:
            outside = (
                "../secret.safetensors",
                "/etc/hostname",
                "/dev/zero",
                "/dev/stdin",
                "",
                ".",
                "..",
                "a\0b",
                "~/x",
            )
            weight_map[rng.choice(list(weight_map))] = rng.choice(
                (
                    *outside,
                    f"./{self._shards[0]}",
                    f"x/../{self._shards[0]}",
                    "x" * 5000,
                    "config.json",
                    "link",
                    5,
                    None,
                )
            )
        return mutate_json_text({"metadata": {"total_size": 1000}, "weight_map": weight_map}, rng)

    def run(self, data: bytes, folder: Path) -> None:
        header, tensor_bytes = _header("F32", 4)
        model = folder / "model"
        model.mkdir()
        (model / "config.json").write_text(json.dumps(_CONFIG))
        for shard in self._shards:
            (model / shard).write_bytes(_write(dump(header), tensor_bytes))
        (folder / "secret.safetensors").write_bytes(_write(dump(header), tensor_bytes))
        (model / "link").symlink_to("/dev/zero")
        (model / _INDEX).write_bytes(data)
        open_model(model)
        for shard in json.loads(data)["weight_map"].values():
            if ".." in Path(shard).parts or Path(shard).is_absolute():
                raise AssertionError(f"the index was accepted, and {shard!r} is not inside the model's folder")
