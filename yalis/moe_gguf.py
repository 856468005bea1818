"""Settings of mixtures of experts from the metadata of GGUF files: entries of config.json, by family."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from yalis.errors import YalisError

if TYPE_CHECKING:
    from yalis.families import GgufReader

_NO_WINDOW = {"use_sliding_window": False, "sliding_window": None}


def has_experts(metadata: GgufReader) -> bool:
    """Mixtral's GGUF files have Llama's architecture name."""
    return metadata.integer("expert_count", 0) > 0


def _experts(metadata: GgufReader) -> dict[str, Any]:
    return {
        "num_experts": metadata.integer("expert_count"),
        "num_experts_per_tok": metadata.integer("expert_used_count"),
    }


def _expert_width(metadata: GgufReader) -> int:
    by_experts = metadata.integer("feed_forward_length") // metadata.integer("expert_used_count")  # as llama.cpp
    return metadata.integer("expert_feed_forward_length", max(1, by_experts))


def mixtral_config(metadata: GgufReader, config: Mapping[str, Any]) -> dict[str, Any]:
    return {**_experts(metadata), "sliding_window": metadata.integer("attention.sliding_window", 0) or None}


def olmoe_config(metadata: GgufReader, config: Mapping[str, Any]) -> dict[str, Any]:
    return {**_experts(metadata), "norm_topk_prob": False}  # as llama.cpp: it is not in the file


def qwen2_moe_config(metadata: GgufReader, config: Mapping[str, Any]) -> dict[str, Any]:
    shared = metadata.integer("expert_shared_feed_forward_length", config["intermediate_size"])
    return {
        **_NO_WINDOW,
        **_experts(metadata),
        "moe_intermediate_size": _expert_width(metadata),
        "shared_expert_intermediate_size": shared,
        "norm_topk_prob": False,  # as llama.cpp: it is not in the file
        "qkv_bias": metadata.has_tensor("blk.0.attn_q.bias"),
    }


def qwen3_moe_config(metadata: GgufReader, config: Mapping[str, Any]) -> dict[str, Any]:
    width = _expert_width(metadata)
    return {
        **_NO_WINDOW, **_experts(metadata), "moe_intermediate_size": width,
        "norm_topk_prob": True,  # as llama.cpp: it is not in the file
    }  # fmt: skip


def glm4_moe_config(metadata: GgufReader, config: Mapping[str, Any]) -> dict[str, Any]:
    if (gating := metadata.integer("expert_gating_func", 2)) != 2:
        raise YalisError(
            f"{metadata.architecture}.expert_gating_func in {metadata.label} is {gating}; only 2 (sigmoid) is supported"
        )
    layers = config["num_hidden_layers"] - metadata.integer("nextn_predict_layers", 0)
    rotated = metadata.integer("rope.dimension_count", config["head_dim"])
    return {
        "num_hidden_layers": layers,  # the others predict further tokens
        "n_routed_experts": metadata.integer("expert_count"),
        "num_experts_per_tok": metadata.integer("expert_used_count"),
        "moe_intermediate_size": _expert_width(metadata),
        "n_shared_experts": metadata.integer("expert_shared_count", 0),
        "first_k_dense_replace": metadata.integer("leading_dense_block_count", 0),
        "routed_scaling_factor": metadata.number("expert_weights_scale", 1.0),
        "norm_topk_prob": metadata.flag("expert_weights_norm", True),
        "n_group": metadata.integer("expert_group_count", 1),
        "topk_group": metadata.integer("expert_group_used_count", 1),
        "attention_bias": metadata.has_tensor("blk.0.attn_q.bias"),
        "use_qk_norm": metadata.has_tensor("blk.0.attn_q_norm.weight"),
        "partial_rotary_factor": rotated / config["head_dim"],
    }


def gpt_oss_config(metadata: GgufReader, config: Mapping[str, Any]) -> dict[str, Any]:
    scaling = config["rope_scaling"]
    return {
        **_experts(metadata),
        "intermediate_size": _expert_width(metadata),
        "sliding_window": metadata.integer("attention.sliding_window", 0) or None,
        "rope_scaling": {"truncate": False, **scaling} if scaling else {"rope_type": "default"},
    }
