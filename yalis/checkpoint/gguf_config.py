"""Translates GGUF metadata to a Hugging Face config.json, and GGUF tensor names to Hugging Face names."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from yalis.checkpoint.gguf_header import GgufEntry
from yalis.errors import YalisError
from yalis.family import Family
from yalis.moe import MAX_EXPERTS
from yalis.spec import MAX_LAYERS

_MODEL_TENSORS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
#: GGUF tensor name within a block -> Hugging Face name within a layer; a Family may list differences.
LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
    # The matrices of all experts are one tensor.
    "ffn_gate_exps": "mlp.experts.{expert}.gate_proj",
    "ffn_up_exps": "mlp.experts.{expert}.up_proj",
    "ffn_down_exps": "mlp.experts.{expert}.down_proj",
}
_YARN_KEYS = {"yarn_attn_factor": "attention_factor", "yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow"}
#: GGUF tensor name within a block -> Hugging Face name within a layer, of tensors without ".weight" or ".bias" there.
_BARE_TENSORS = {"attn_sinks": "self_attn.sinks", "exp_probs_b": "mlp.gate.e_score_correction_bias"}
#: GGUF tensors of experts with the rows of two matrices, and the names of these alone.
_JOINED = {"ffn_gate_up_exps": ("ffn_gate_exps", "ffn_up_exps")}
#: Early files of Mixtral have a tensor for each expert, such as blk.0.ffn_gate.7.weight.
_NAME = re.compile(r"(?:blk\.(\d+)\.)?(\w+)(?:\.(\d{1,4}))?\.(weight|bias)")


class GgufMetadata:
    """Typed access to the metadata of a GGUF file; keys omit the architecture prefix ("llama.")."""

    def __init__(self, metadata: dict[str, Any], shapes: Mapping[str, tuple[int, ...]], label: str) -> None:
        """`shapes`: the shape of every tensor, by GGUF name."""
        self.metadata, self.shapes, self.label = metadata, shapes, label
        self.architecture = str(metadata.get("general.architecture"))
        self.model_name = str(metadata.get("general.name", ""))

    def has_tensor(self, name: str) -> bool:
        return name in self.shapes

    def number(self, key: str, default: float | None = None) -> float:
        """Return a positive number. Zero is accepted only where it is the default."""
        value = self.metadata.get(f"{self.architecture}.{key}", default)
        if isinstance(value, list):  # some writers repeat the number for every layer
            value = value[0] if value and all(each == value[0] for each in value) else "different by layer"
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not (value > 0 or value == default):
            wrong = "missing" if value is None else f"{value!r}"
            raise YalisError(f"{self.architecture}.{key} in {self.label} is {wrong}; use another file of this model")
        return value  # type: ignore[no-any-return]

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.number(key, default)
        if not isinstance(value, int):
            raise YalisError(f"{self.architecture}.{key} in {self.label} is {value}; it must be a whole number")
        return value

    def layer_types(self, period: int) -> list[str]:
        """Return config.json's layer_types. Unless the file says otherwise, all but the last of `period` layers slide.

        Without a sliding window, no layer does.
        """
        key = f"{self.architecture}.attention.sliding_window_pattern"
        given, count = self.metadata.get(key, period), self.integer("block_count")
        if count > MAX_LAYERS:
            raise YalisError(f"{self.label} has {count} layers; at most {MAX_LAYERS} are supported")
        if isinstance(given, int) and not isinstance(given, bool) and given >= 1:
            given = [(layer + 1) % given != 0 for layer in range(count)]
        if not isinstance(given, list) or len(given) != count:
            raise YalisError(f"{key} in {self.label} is {given!r}; use another file of this model")
        slides = bool(self.integer("attention.sliding_window", 0))
        return ["sliding_attention" if slides and flag else "full_attention" for flag in given]

    def flag(self, key: str, default: bool) -> bool:
        value = self.metadata.get(f"{self.architecture}.{key}", default)
        if not isinstance(value, bool):
            raise YalisError(f"{self.architecture}.{key} in {self.label} is {value!r}; it must be true or false")
        return value


def hugging_face_entries(entry: GgufEntry, family: Family, num_experts: int) -> Iterator[tuple[str, GgufEntry]]:
    """Yield the Hugging Face name and location of a tensor, or of every matrix in a tensor of all experts.

    Yields nothing for a tensor that is no weight there, such as RoPE factors.
    """
    match = _NAME.fullmatch(entry.name)
    if match is None:
        return
    layer, part, number, kind = match.groups()
    if layer is None:
        if part in _MODEL_TENSORS and number is None:
            yield f"{_MODEL_TENSORS[part]}.{kind}", entry
        return
    if part in _BARE_TENSORS:
        yield f"model.layers.{layer}.{_BARE_TENSORS[part]}", entry
        return
    known = {**LAYER_TENSORS, **family.gguf_format.tensor_names}
    part += "" if number is None else "_exps"
    names = [f"model.layers.{layer}.{known[name]}.{kind}" for name in _JOINED.get(part, (part,)) if name in known]
    if not names:
        return
    if not part.endswith("_exps"):
        if part == "ffn_gate_inp_shexp" and len(entry.shape) == 1:  # llama.cpp drops dimensions of size 1
            entry = replace(entry, shape=(1, *entry.shape))
        yield from ((name, entry) for name in names)
        return
    experts = {int(number): entry} if number is not None else dict(enumerate(_split_experts(entry, num_experts)))
    for expert, rows in experts.items():
        for name, matrix in zip(names, _split_rows(rows, len(names)), strict=True):
            yield name.format(expert=expert), matrix


def _split_experts(entry: GgufEntry, num_experts: int) -> list[GgufEntry]:
    """Return the location of each expert's matrix in a tensor of all experts, [experts, ...]."""
    if len(entry.shape) < 2 or entry.shape[0] != num_experts or not 0 < num_experts <= MAX_EXPERTS:
        raise YalisError(
            f"tensor {entry.name!r} in {entry.file.path} has shape {entry.shape}, but its metadata has {num_experts} "
            f"experts (at most {MAX_EXPERTS} are supported); fetch the file again"
        )
    return [replace(part, shape=entry.shape[1:]) for part in _split_rows(entry, num_experts)]


def _split_rows(entry: GgufEntry, count: int) -> list[GgufEntry]:
    """Divide a tensor into `count` parts of equally many rows."""
    if count == 1:
        return [entry]
    elements = math.prod(entry.shape) // count
    if entry.shape[0] % count or elements % entry.block:
        raise YalisError(f"tensor {entry.name!r} in {entry.file.path} cannot be divided by rows; fetch the file again")
    shape, size = (entry.shape[0] // count, *entry.shape[1:]), elements // entry.block * entry.block_bytes
    return [replace(entry, shape=shape, offset=entry.offset + index * size) for index in range(count)]


def build_config(
    metadata: GgufMetadata, family: Family, rope_factors: dict[str, list[float]], dtype: str
) -> dict[str, Any]:
    """Return the metadata as a config.json. `rope_factors`: the file's RoPE tensors, by GGUF name."""
    if not metadata.has_tensor("token_embd.weight"):
        raise YalisError(f"{metadata.label} has no token_embd.weight; it is not a complete model")
    hidden, heads = metadata.integer("embedding_length"), metadata.integer("attention.head_count")
    rotated = metadata.integer("rope.dimension_count", hidden // heads)
    default_head_dim = rotated if family.gguf_format.rope_dim_is_head_dim else hidden // heads
    config: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": family.name,
        "hidden_size": hidden,
        "intermediate_size": metadata.integer("feed_forward_length"),
        "num_hidden_layers": metadata.integer("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.integer("attention.head_count_kv", heads),
        "head_dim": metadata.integer("attention.key_length", default_head_dim),
        "vocab_size": metadata.shapes["token_embd.weight"][0],
        "max_position_embeddings": metadata.integer("context_length"),
        "rms_norm_eps": metadata.number("attention.layer_norm_rms_epsilon"),
        "hidden_act": "silu",
        "attention_bias": metadata.has_tensor("blk.0.attn_output.bias"),
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "use_cache": True,
        "rope_theta": metadata.number("rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(metadata, rope_factors, rotated),
        "tie_word_embeddings": not metadata.has_tensor("output.weight"),
        "dtype": dtype,
        **_token_ids(metadata.metadata),
    }
    return config | family.gguf_format.extra_config(metadata, config)


def _token_ids(metadata: dict[str, Any]) -> dict[str, Any]:
    """Return the special token ids; end of sequence, of turn and of message all end a generation."""
    eos: list[int] = []
    for key in ("eos_token_id", "eot_token_id", "eom_token_id"):
        token = metadata.get(f"tokenizer.ggml.{key}")
        if token is not None and token not in eos:
            eos.append(token)
    return {
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": None if not eos else eos[0] if len(eos) == 1 else eos,
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id"),
    }


def _rope_scaling(metadata: GgufMetadata, rope_factors: dict[str, list[float]], rotated: int) -> dict[str, Any] | None:
    """Return config.json's rope_scaling. `rope_factors` divide each frequency.

    Llama 3's factors are recognised and named. Any others are written as longrope with the same factors at every
    length, which computes the same frequencies.
    """
    if "rope_freqs" in rope_factors:
        given = rope_factors["rope_freqs"]
        if not all(factor > 0 for factor in given):
            raise YalisError(f"rope_freqs in {metadata.label} has factors that are not positive; fetch the file again")
        llama3 = {
            "rope_type": "llama3",
            "factor": max(given, default=1.0),
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
        }
        llama3["original_max_position_embeddings"] = 8192
        if 2 * len(given) == rotated:
            expected = _llama3_factors(llama3, metadata.number("rope.freq_base", 10000.0), rotated)
            if all(math.isclose(a, b, rel_tol=1e-4) for a, b in zip(given, expected, strict=True)):
                return llama3
        longrope = {"short_factor": given, "long_factor": given, "attention_factor": 1.0, "factor": 1.0}
        context = metadata.integer("context_length")
        return {"rope_type": "longrope", **longrope, "original_max_position_embeddings": context}
    if "rope_factors_long" in rope_factors and "rope_factors_short" in rope_factors:
        long, short = rope_factors["rope_factors_long"], rope_factors["rope_factors_short"]
        return {"rope_type": "longrope", "type": "longrope", "long_factor": long, "short_factor": short}
    kind = metadata.metadata.get(f"{metadata.architecture}.rope.scaling.type")
    factor = metadata.number("rope.scaling.factor", 0)
    if kind in (None, "none") or not factor:
        return None
    scaling = {"rope_type": kind, "factor": factor}
    if original := metadata.integer("rope.scaling.original_context_length", 0):
        scaling["original_max_position_embeddings"] = original
    for key, name in _YARN_KEYS.items():
        if value := metadata.number(f"rope.scaling.{key}", 0):
            scaling[name] = value
    return scaling


def _llama3_factors(rope: dict[str, Any], theta: float, rotated: int) -> list[float]:
    """Return the divisor of each frequency by Llama 3.1's rule: 1 for high, `factor` for low, interpolated between."""
    factors = []
    for dim in range(0, rotated, 2):
        turns = rope["original_max_position_embeddings"] / (2 * math.pi * theta ** (dim / rotated))
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        smooth = min(1.0, max(0.0, (turns - low) / (high - low)))
        factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return factors
