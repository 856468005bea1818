"""How llama.cpp's converter stores the families of dense_families.py: their GGUF metadata as config.json keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from yalis.family import GgufReader


def _gguf_window(metadata: GgufReader) -> int | None:
    return metadata.integer("attention.sliding_window", 0) or None


def _gguf_biases(metadata: GgufReader) -> dict[str, Any]:
    return {
        "attention_bias": metadata.has_tensor("blk.0.attn_q.bias"),
        "mlp_bias": metadata.has_tensor("blk.0.ffn_down.bias"),
    }


def _gguf_ropes(metadata: GgufReader, config: Mapping[str, Any], sliding_theta: float) -> dict[str, Any]:
    """Return rope_parameters by layer type. Scaling is that of layers with full attention."""
    full = {"rope_type": "default", "rope_theta": config["rope_theta"], **(config["rope_scaling"] or {})}
    theta = metadata.number("rope.freq_base_swa", sliding_theta)
    sliding = {"rope_type": "default", "rope_theta": theta}
    return {"rope_parameters": {"full_attention": full, "sliding_attention": sliding}, "rope_scaling": None}


def gemma3_gguf_config(metadata: GgufReader, config: Mapping[str, Any]) -> dict[str, Any]:
    # The query scale is not in the file. It is the head size, except in the 27B model with its 62 layers.
    by_hidden = config["hidden_size"] // config["num_attention_heads"]
    return {
        **_gguf_ropes(metadata, config, 1e4),
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": _gguf_window(metadata) or 4096,
        "layer_types": metadata.layer_types(6),
        "query_pre_attn_scalar": by_hidden if config["num_hidden_layers"] == 62 else config["head_dim"],
        "final_logit_softcapping": metadata.number("final_logit_softcapping", 0) or None,
    }


def is_olmo3_gguf(metadata: GgufReader) -> bool:
    return _gguf_window(metadata) is not None


def olmo3_gguf_config(metadata: GgufReader, config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **_gguf_ropes(metadata, config, config["rope_theta"]),
        "sliding_window": _gguf_window(metadata),
        "layer_types": metadata.layer_types(4),
    }


def smollm3_gguf_config(metadata: GgufReader, config: Mapping[str, Any]) -> dict[str, Any]:
    return {**_gguf_biases(metadata), "no_rope_layer_interval": 4, "use_sliding_window": False}


def glm4_gguf_config(metadata: GgufReader, config: Mapping[str, Any]) -> dict[str, Any]:
    rotated = metadata.integer("rope.dimension_count")
    return {**_gguf_biases(metadata), "partial_rotary_factor": rotated / config["head_dim"]}


def seed_oss_gguf_config(metadata: GgufReader, config: Mapping[str, Any]) -> dict[str, Any]:
    return {**_gguf_biases(metadata), "attention_out_bias": config["attention_bias"]}


def exaone4_gguf_config(metadata: GgufReader, config: Mapping[str, Any]) -> dict[str, Any]:
    return {"sliding_window": _gguf_window(metadata), "layer_types": metadata.layer_types(4)}


def ernie4_5_gguf_config(metadata: GgufReader, config: Mapping[str, Any]) -> dict[str, Any]:
    return {"use_bias": config["attention_bias"]}


def arcee_gguf_config(metadata: GgufReader, config: Mapping[str, Any]) -> dict[str, Any]:
    return {**_gguf_biases(metadata), "hidden_act": "relu2"}


#: GGUF names of norms after attention and MLP, where they are not in gguf_config.LAYER_TENSORS.
GGUF_POST_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
