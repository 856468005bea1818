"""What GGUF metadata means as a Hugging Face config.json, and what its tensors are called there."""

from __future__ import annotations

import math
import re
from typing import Any

from yalis.errors import YalisError

#: GGUF's general.architecture -> config.json's model_type and architecture
FAMILIES = {
    "llama": ("llama", "LlamaForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
    "gemma2": ("gemma2", "Gemma2ForCausalLM"),
    "phi3": ("phi3", "Phi3ForCausalLM"),
}

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
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
}
_LAYER_BY_FAMILY = {
    "gemma2": {
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
    "phi3": {"ffn_up": "mlp.gate_up_proj"},
}
_NAME = re.compile(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)")


def hugging_face_name(name: str, family: str) -> str | None:
    """The name transformers gives a tensor; None for what it does not keep as a weight, such as rope factors."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    layer, part, kind = match.groups()
    if layer is None:
        return f"{_TOP[part]}.{kind}" if part in _TOP else None
    known = _LAYER | _LAYER_BY_FAMILY.get(family, {})
    return f"model.layers.{layer}.{known[part]}.{kind}" if part in known else None


def family_of(metadata: dict[str, Any], label: str) -> str:
    family = metadata.get("general.architecture")
    if family not in FAMILIES:
        raise YalisError(f"{label} is a GGUF file of architecture {family!r}; known: {', '.join(FAMILIES)}")
    return str(family)


def build_config(
    metadata: dict[str, Any],
    shapes: dict[str, tuple[int, ...]],
    factors: dict[str, list[float]],
    dtype: str,
    label: str,
) -> dict[str, Any]:
    """`shapes` are the file's tensors by GGUF name; `factors` its rope tensors, already read."""
    family = family_of(metadata, label)
    read = _Reader(metadata, family, label)
    if "token_embd.weight" not in shapes:
        raise YalisError(f"{label} has no token_embd.weight; it is not a whole model")
    hidden, heads = read.whole("embedding_length"), read.whole("attention.head_count")
    rotated = read.whole("rope.dimension_count", hidden // heads)
    head_dim = read.whole("attention.key_length", rotated if family == "llama" else hidden // heads)
    model_type, architecture = FAMILIES[family]
    config: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": model_type,
        "hidden_size": hidden,
        "intermediate_size": read.whole("feed_forward_length"),
        "num_hidden_layers": read.whole("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": read.whole("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "vocab_size": shapes["token_embd.weight"][0],
        "max_position_embeddings": read.whole("context_length"),
        "rms_norm_eps": read.number("attention.layer_norm_rms_epsilon"),
        "hidden_act": "silu",
        "attention_bias": "blk.0.attn_output.bias" in shapes,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "use_cache": True,
        "rope_theta": read.number("rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(read, factors, rotated),
        "tie_word_embeddings": "output.weight" not in shapes,
        "dtype": dtype,
        **_token_ids(metadata),
    }
    window = read.whole("attention.sliding_window", 0) or None
    if family == "llama":
        config["mlp_bias"] = "blk.0.ffn_down.bias" in shapes
        if window or "mistral" in str(metadata.get("general.name", "")).lower():
            config |= {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": window}
    elif family == "qwen2":
        config |= {"use_sliding_window": False, "sliding_window": None}
    elif family == "gemma2":
        # The scale of queries is not in the file: it is the head's, except for the 27B with its 46 layers.
        scalar = hidden // heads if config["num_hidden_layers"] == 46 else head_dim
        config |= {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"}
        config |= {"sliding_window": window or 4096, "query_pre_attn_scalar": scalar}
        config["attn_logit_softcapping"] = read.number("attn_logit_softcapping", 50.0)
        config["final_logit_softcapping"] = read.number("final_logit_softcapping", 30.0)
    elif family == "phi3":
        config["sliding_window"] = window
        config["partial_rotary_factor"] = rotated / head_dim
        trained = read.whole("rope.scaling.original_context_length", config["max_position_embeddings"])
        config["original_max_position_embeddings"] = trained
    return config


class _Reader:
    """Numbers of the metadata, by their key behind the architecture's name. A default of 0 allows 0."""

    def __init__(self, metadata: dict[str, Any], family: str, label: str) -> None:
        self.metadata, self.family, self.label = metadata, family, label

    def number(self, key: str, default: float | None = None) -> float:
        value = self.metadata.get(f"{self.family}.{key}", default)
        if isinstance(value, list):  # some writers repeat a number for every layer
            value = value[0] if len(set(value)) == 1 else "different by layer"
        if value is None or isinstance(value, (bool, str)) or not (value > 0 or value == default):
            wrong = "missing" if value is None else f"{value!r}"
            raise YalisError(f"{self.family}.{key} in {self.label} is {wrong}; take another file of this model")
        return value  # type: ignore[no-any-return]

    def whole(self, key: str, default: int | None = None) -> int:
        value = self.number(key, default)
        if not isinstance(value, int):
            raise YalisError(f"{self.family}.{key} in {self.label} is {value}; it must be a whole number")
        return value


def _token_ids(metadata: dict[str, Any]) -> dict[str, Any]:
    ends: list[int] = []
    for key in ("eos_token_id", "eot_token_id", "eom_token_id"):
        token = metadata.get(f"tokenizer.ggml.{key}")
        if token is not None and token not in ends:
            ends.append(token)
    return {
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": None if not ends else ends[0] if len(ends) == 1 else ends,
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id"),
    }


def _rope_scaling(read: _Reader, factors: dict[str, list[float]], rotated: int) -> dict[str, Any] | None:
    """`factors` divide each frequency. Llama 3's are recognised; others are spelled out, which comes to the same."""
    if "rope_freqs" in factors:
        given = factors["rope_freqs"]
        guess = {"rope_type": "llama3", "factor": max(given), "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        guess["original_max_position_embeddings"] = 8192
        rule = _llama3_factors(guess, read.number("rope.freq_base", 10000.0), rotated)
        if len(given) == len(rule) and all(math.isclose(a, b, rel_tol=1e-4) for a, b in zip(given, rule, strict=True)):
            return guess
        whole = {"short_factor": given, "long_factor": given, "attention_factor": 1.0, "factor": 1.0}
        return {"rope_type": "longrope", **whole, "original_max_position_embeddings": read.whole("context_length")}
    if "rope_factors_long" in factors and "rope_factors_short" in factors:
        long, short = factors["rope_factors_long"], factors["rope_factors_short"]
        return {"rope_type": "longrope", "type": "longrope", "long_factor": long, "short_factor": short}
    kind = read.metadata.get(f"{read.family}.rope.scaling.type")
    factor = read.number("rope.scaling.factor", 0)
    if kind in (None, "none") or not factor:
        return None
    scaling = {"rope_type": kind, "factor": factor}
    if original := read.whole("rope.scaling.original_context_length", 0):
        scaling["original_max_position_embeddings"] = original
    return scaling


def _llama3_factors(rope: dict[str, Any], theta: float, rotated: int) -> list[float]:
    """What Llama 3.1's rule divides each frequency by: 1 for quick ones, `factor` for slow ones, a blend between."""
    factors = []
    for at in range(0, rotated, 2):
        turns = rope["original_max_position_embeddings"] / (2 * math.pi * theta ** (at / rotated))
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        smooth = min(1.0, max(0.0, (turns - low) / (high - low)))
        factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return factors
