"""Target: the header of a GGUF file."""

from __future__ import annotations

import math
import struct
from pathlib import Path
from random import Random
from typing import Any

from tests.fuzz.mutations import NUMBERS, STRINGS, Raw, mutate_bytes
from tests.fuzz.target import SIZES, open_model

_UINT32, _INT32, _FLOAT32, _BOOL, _STRING, _ARRAY, _UINT64 = 4, 5, 6, 7, 8, 9, 10
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_INTEGERS = [number for number in NUMBERS if isinstance(number, int)]
_FLOATS = [float(number) for number in NUMBERS if isinstance(number, Raw) and len(number) < 10] + [0.0, 1e-45, -1.0]
_EXPERTS = 2  # of Mixtral, whose architecture name is "llama", too
_TOKENS = ["<unk>", "<s>", "</s>", *map(chr, range(33, 91))]  # as many as the vocabulary

Pair = tuple[str, int, Any]  # key, type, value; the value of an array is (type, values)
Info = tuple[str, list[int], int, int]  # name, dimensions with the innermost first, type, offset


def _metadata(architecture: str, tokenizer: bool) -> list[Pair]:
    sizes = {
        "context_length": SIZES["max_position_embeddings"],
        "embedding_length": SIZES["hidden_size"],
        "block_count": SIZES["num_hidden_layers"],
        "feed_forward_length": SIZES["intermediate_size"],
        "attention.head_count": SIZES["num_attention_heads"],
        "attention.head_count_kv": SIZES["num_key_value_heads"],
        "attention.key_length": SIZES["head_dim"],
        "attention.sliding_window": 16,
        "rope.dimension_count": SIZES["head_dim"],
        "rope.scaling.original_context_length": 64,
    }
    floats = {"attention.layer_norm_rms_epsilon": 1e-5, "rope.freq_base": 1e4, "rope.scaling.factor": 2.0}
    floats |= {"attention.scale": 0.3, "embedding_scale": 12.0, "residual_scale": 0.2, "logit_scale": 3.0}
    pairs: list[Pair] = [("general.architecture", _STRING, architecture), ("general.name", _STRING, "tiny")]
    pairs += [("general.alignment", _UINT32, 32), (f"{architecture}.rope.scaling.type", _STRING, "linear")]
    pairs += [(f"{architecture}.{key}", _UINT32, value) for key, value in sizes.items()]
    pairs += [(f"{architecture}.{key}", _FLOAT32, value) for key, value in floats.items()]
    pairs += [("tokenizer.ggml.bos_token_id", _UINT32, 1), ("tokenizer.ggml.eos_token_id", _UINT32, 2)]
    if tokenizer:
        pairs += [("tokenizer.ggml.model", _STRING, "gpt2"), ("tokenizer.ggml.pre", _STRING, "default")]
        pairs += [("tokenizer.ggml.tokens", _ARRAY, (_STRING, _TOKENS))]
        pairs += [("tokenizer.ggml.token_type", _ARRAY, (_INT32, [3, 3, 3] + [1] * (len(_TOKENS) - 3)))]
        pairs += [("tokenizer.ggml.merges", _ARRAY, (_STRING, ["A B", "C D"]))]
        pairs += [("tokenizer.ggml.add_bos_token", _BOOL, True)]
    return pairs


def _tensors() -> list[Info]:
    hidden, width, head = SIZES["hidden_size"], SIZES["intermediate_size"], SIZES["head_dim"]
    queries, keys = SIZES["num_attention_heads"] * head, SIZES["num_key_value_heads"] * head
    q8 = 8  # blocks of 32 elements in 34 bytes
    shapes: dict[str, tuple[list[int], int]] = {
        "token_embd": ([hidden, len(_TOKENS)], q8),
        "output_norm": ([hidden], 0),
        "output": ([hidden, len(_TOKENS)], 1),
        "rope_freqs": ([head // 2], 0),
    }
    for layer in range(SIZES["num_hidden_layers"]):
        shapes |= {
            f"blk.{layer}.attn_norm": ([hidden], 0),
            f"blk.{layer}.ffn_norm": ([hidden], 0),
            f"blk.{layer}.attn_q": ([hidden, queries], q8),
            f"blk.{layer}.attn_k": ([hidden, keys], q8),
            f"blk.{layer}.attn_v": ([hidden, keys], 0),
            f"blk.{layer}.attn_output": ([queries, hidden], 0),
            f"blk.{layer}.ffn_gate": ([hidden, width], q8),
            f"blk.{layer}.ffn_up": ([hidden, width], 30),
            f"blk.{layer}.ffn_down": ([width, hidden], 1),
            f"blk.{layer}.ffn_gate_inp": ([hidden, _EXPERTS], 0),
            f"blk.{layer}.ffn_gate_exps": ([hidden, width, _EXPERTS], q8),
            f"blk.{layer}.ffn_up_exps": ([hidden, width, _EXPERTS], 30),
            f"blk.{layer}.ffn_down_exps": ([width, hidden, _EXPERTS], 1),
        }
    tensors: list[Info] = []
    offset = 0
    for name, (shape, kind) in shapes.items():
        tensors.append((f"{name}.weight", shape, kind, offset))
        elements = math.prod(shape)
        size = elements // 32 * 34 if kind == q8 else elements * {0: 4, 1: 2, 30: 2}[kind]
        offset += -(-size // 32) * 32
    return tensors


_TENSORS = _tensors()
_ONES = {0: struct.pack("<f", 1.0), 1: b"\x00\x3c", 30: b"\x80\x3f", 8: b"\x00\x3c" + b"\1" * 32}


def _tensor_data() -> bytes:
    """Return tensors of ones."""
    data = bytearray(_TENSORS[-1][3] + 8192)
    for _, _, kind, offset in _TENSORS:
        data[offset:] = _ONES[kind] * ((len(data) - offset) // len(_ONES[kind]))
    return bytes(data)


_DATA = _tensor_data()


def _string(text: str) -> bytes:
    data = text.encode("utf-8", "surrogatepass")
    return struct.pack("<Q", len(data)) + data


def _value(kind: int, value: Any) -> bytes:
    if kind == _STRING:
        return _string(value)
    if kind == _ARRAY:
        inner, values = value
        return struct.pack("<IQ", inner, len(values)) + b"".join(_value(inner, item) for item in values)
    layout = "<" + _SCALARS.get(kind, "Q")
    if isinstance(value, int) and kind != _BOOL and layout[1] not in "fd":
        value %= 1 << 8 * struct.calcsize(layout)  # the bits that fit
        return int(value).to_bytes(struct.calcsize(layout), "little")
    return struct.pack(layout, value)


def _nested(depth: int) -> bytes:
    """Return the value of an array of arrays of arrays."""
    return struct.pack("<IQ", _ARRAY, 1) * depth + struct.pack("<IQ", _UINT32, 0)


def _write(pairs: list[Pair], tensors: list[Info], version: int, counts: tuple[int, int]) -> bytes:
    parts = [b"GGUF", struct.pack("<IQQ", version, counts[0] % 2**64, counts[1] % 2**64)]
    for key, kind, value in pairs:
        data = value if isinstance(value, bytes) else _value(kind, value)
        parts.append(_string(key) + struct.pack("<I", kind) + data)
    for name, shape, kind, offset in tensors:
        sizes = b"".join(struct.pack("<Q", size % 2**64) for size in shape)
        parts.append(_string(name) + struct.pack("<I", len(shape)) + sizes)
        parts.append(struct.pack("<IQ", kind % 2**32, offset % 2**64))
    header = b"".join(parts)
    return header + bytes(-len(header) % 32)


def _mutate_pair(pair: Pair, rng: Random) -> Pair:
    key, kind, value = pair
    action = rng.choice(("integer", "integer", "float", "string", "array", "nested", "kind", "key"))
    if action == "integer":
        kind = kind if kind in (_UINT32, _INT32) and rng.random() < 0.5 else rng.choice((_UINT32, _INT32, _UINT64, 11))
        return key, kind, rng.choice(_INTEGERS)
    if action == "float":
        return key, rng.choice((_FLOAT32, 12)), rng.choice(_FLOATS)
    if action == "string":
        return key, _STRING, rng.choice(STRINGS)
    if action == "array":
        count = rng.choice((0, 1, 3, 61, 100_000))
        return key, _ARRAY, rng.choice(((_UINT32, [rng.choice(_INTEGERS)] * count), (_STRING, ["x"] * count)))
    if action == "nested":
        return key, _ARRAY, _nested(rng.choice((1, 100, 900, 60_000)))
    if action == "kind":
        return key, rng.choice((*range(14), 2**31)), struct.pack("<Q", rng.choice(_INTEGERS) % 2**64)
    return rng.choice((*STRINGS, key.upper(), "split.count")), kind, value


def _mutate_tensor(info: Info, rng: Random) -> Info:
    name, shape, kind, offset = info
    action = rng.choice(("shape", "shape", "dimensions", "kind", "offset", "name"))
    if action == "shape":
        shape = [rng.choice(_INTEGERS) if rng.random() < 0.5 else size for size in shape]
    elif action == "dimensions":
        shape = rng.choice(([], shape[:1], [*shape, 1], [1] * 9, [0, *shape], [2**32, 2**32], [2**63, 2], [1] * 70_000))
    elif action == "kind":
        kind = rng.choice((*range(45), 2**31, 2**32 - 1))
    elif action == "offset":
        offset = rng.choice((*_INTEGERS, offset + 1, offset - 32, 0))
    else:
        name = rng.choice(
            (*STRINGS, "token_embd.weight", "blk.99999999999999999999.attn_q.weight", "rope_freqs.weight")
        )
    return name, shape, kind, offset


class GgufTarget:
    name = "GGUF header"

    def make(self, rng: Random) -> bytes:
        architecture = rng.choice(("llama", "llama", "qwen2", "qwen3", "gemma2", "phi3", "granite"))
        pairs, tensors = _metadata(architecture, tokenizer=rng.random() < 0.1), list(_TENSORS)
        if architecture == "llama" and rng.random() < 0.3:
            keys = {"expert_count": _EXPERTS, "expert_used_count": 1}
            pairs += [(f"llama.{key}", _UINT32, value) for key, value in keys.items()]
        else:
            tensors = [info for info in tensors if not info[0].endswith(("_exps.weight", "_inp.weight"))]
        if rng.random() < 0.7:  # without this tensor, the RoPE scaling of the metadata is used
            tensors = [info for info in tensors if info[0] != "rope_freqs.weight"]
        version, counts, kind = 3, (0, 0), rng.random()
        if kind < 0.75:
            for _ in range(rng.choice((1, 1, 2, 3))):
                if rng.random() < 0.6:
                    at = rng.randrange(len(pairs))
                    pairs[at] = _mutate_pair(pairs[at], rng)
                else:
                    at = rng.randrange(len(tensors))
                    tensors[at] = _mutate_tensor(tensors[at], rng)
            if rng.random() < 0.1:
                pairs.append(("split.count", _UINT64, rng.choice(_INTEGERS)))
            if rng.random() < 0.1:
                del pairs[rng.randrange(len(pairs))]
        elif kind < 0.8:
            version = rng.choice(_INTEGERS) % 2**32
        elif kind < 0.85:
            counts = (rng.choice(_INTEGERS), rng.choice(_INTEGERS))
        counts = (len(tensors), len(pairs)) if counts == (0, 0) else counts
        data = _write(pairs, tensors, version, counts)
        if kind >= 0.85:
            data = mutate_bytes(data, rng)
        return data + (_DATA if rng.random() < 0.9 else bytes(len(_DATA)))

    def run(self, data: bytes, folder: Path) -> None:
        path = folder / "tiny-00001-of-00002.gguf"
        path.write_bytes(data)
        open_model(path)
