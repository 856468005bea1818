"""The records of dense model families that were added after the first ones in families.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from yalis.config_reader import ConfigReader
from yalis.dense_gguf import (
    GGUF_POST_NORMS,
    arcee_gguf_config,
    ernie4_5_gguf_config,
    exaone4_gguf_config,
    gemma3_gguf_config,
    glm4_gguf_config,
    is_olmo3_gguf,
    olmo3_gguf_config,
    seed_oss_gguf_config,
    smollm3_gguf_config,
)
from yalis.errors import YalisError
from yalis.family import (
    PARALLEL_NORM,
    POST_NORMS,
    SANDWICH_NORMS,
    BlockNorms,
    Family,
    GgufFormat,
    every_layer,
    listed_layers,
    patterned_layers,
)


def _gemma3_sliding_layers(config: ConfigReader, num_layers: int) -> list[bool]:
    return patterned_layers(config, num_layers, 6)


def _gemma3_sliding_rope(config: ConfigReader) -> dict[str, Any]:
    return {"rope_theta": config.number("rope_local_base_freq", 1e4)}


def _gemma3_spec_fields(config: ConfigReader) -> dict[str, Any]:
    if config.config.get("attn_logit_softcapping") is not None:  # transformers has the key and ignores it
        raise YalisError(f"{config.label} has attn_logit_softcapping, which Gemma 3 does not use; remove it")
    return {
        "attention_scale": config.positive("query_pre_attn_scalar", 256.0) ** -0.5,
        "embed_scale": config.integer("hidden_size") ** 0.5,
        "logit_softcap": config.optional_number("final_logit_softcapping"),
    }


def _olmo2_spec_fields(config: ConfigReader) -> dict[str, Any]:
    return {"joint_qk_norm": True}


def _olmo3_sliding_layers(config: ConfigReader, num_layers: int) -> list[bool]:
    listed = listed_layers(config, num_layers)
    return [(layer + 1) % 4 != 0 for layer in range(num_layers)] if listed is None else listed


def _olmo3_sliding_rope(config: ConfigReader) -> dict[str, Any]:
    return {"rope_theta": 5e5}  # rope_theta beside rope_scaling is that of the other layers


def _smollm3_rope_layers(config: ConfigReader, num_layers: int) -> Sequence[bool]:
    given = config.config.get("no_rope_layers")
    if given is None:
        interval = config.integer("no_rope_layer_interval", 4)
        return [(layer + 1) % interval != 0 for layer in range(num_layers)]
    if not isinstance(given, list) or len(given) < num_layers or not all(value in (0, 1) for value in given):
        raise YalisError(
            f"no_rope_layers in {config.label} is {given!r}; it must be a list with 1 (RoPE) or 0 for each layer"
        )
    return [bool(value) for value in given[:num_layers]]


def _smollm3_sliding_layers(config: ConfigReader, num_layers: int) -> list[bool]:
    if not config.flag("use_sliding_window"):
        return [False] * num_layers
    listed = listed_layers(config, num_layers)
    return [not rope for rope in _smollm3_rope_layers(config, num_layers)] if listed is None else listed


def _glm4_spec_fields(config: ConfigReader) -> dict[str, Any]:
    return {"fused_gate_up": True, "mlp_bias": False, "out_bias": False, "interleaved_rope": True}


def _ministral3_spec_fields(config: ConfigReader) -> dict[str, Any]:
    return {"qkv_bias": False, "out_bias": False, "mlp_bias": False}


def _seed_oss_spec_fields(config: ConfigReader) -> dict[str, Any]:
    return {"out_bias": config.flag("attention_out_bias")}


def _exaone4_sliding_layers(config: ConfigReader, num_layers: int) -> list[bool]:
    if config.config.get("sliding_window") is None:
        return [False] * num_layers
    return patterned_layers(config, num_layers, 4)


def _exaone4_rope_layers(config: ConfigReader, num_layers: int) -> Sequence[bool]:
    """Without a sliding window all layers have RoPE, with one only those that slide."""
    if config.config.get("sliding_window") is None:
        return [True] * num_layers
    return _exaone4_sliding_layers(config, num_layers)


def _exaone4_spec_fields(config: ConfigReader) -> dict[str, Any]:
    return {"qkv_bias": False, "out_bias": False, "mlp_bias": False}


def _cohere2_rope_layers(config: ConfigReader, num_layers: int) -> Sequence[bool]:
    """Only layers with a sliding window have RoPE."""
    if config.config.get("sliding_window") is None:
        return [False] * num_layers
    return patterned_layers(config, num_layers, 4)


def _cohere2_sliding_layers(config: ConfigReader, num_layers: int) -> list[bool]:
    return patterned_layers(config, num_layers, 4)


def _cohere2_spec_fields(config: ConfigReader) -> dict[str, Any]:
    return {
        "norm": "layer",
        "parallel_block": True,
        "interleaved_rope": True,
        "mlp_bias": False,
        "logits_scaling": 1.0 / config.positive("logit_scale", 0.0625),
    }


def _ernie4_5_spec_fields(config: ConfigReader) -> dict[str, Any]:
    return {"interleaved_rope": True, **_bias_everywhere(config)}


def _bias_everywhere(config: ConfigReader) -> dict[str, Any]:
    return dict.fromkeys(("qkv_bias", "out_bias", "mlp_bias"), config.flag("use_bias"))


def _hunyuan_spec_fields(config: ConfigReader) -> dict[str, Any]:
    return {"qk_norm_names": ("query_layernorm", "key_layernorm"), "qk_norm_after_rope": True, "mlp_bias": False}


def _arcee_spec_fields(config: ConfigReader) -> dict[str, Any]:
    return {"mlp": "plain"}


def _nemotron_spec_fields(config: ConfigReader) -> dict[str, Any]:
    return {"mlp": "plain", "norm": "layer", "norm_bias": True}


def _starcoder2_spec_fields(config: ConfigReader) -> dict[str, Any]:
    layer_norm = {"norm": "layer", "norm_bias": True}
    return {"mlp": "plain", "plain_mlp": ("c_fc", "c_proj"), **layer_norm, **_bias_everywhere(config)}


def _stablelm_spec_fields(config: ConfigReader) -> dict[str, Any]:
    fields: dict[str, Any] = {"norm": "layer", "norm_bias": True, "out_bias": False, "mlp_bias": False}
    fields["qkv_bias"] = config.flag("use_qkv_bias")
    if config.flag("use_parallel_residual"):
        fields.update(parallel_block=True, block_norms=PARALLEL_NORM)
    return fields


DENSE_FAMILIES = (
    Family(
        name="gemma3_text",
        architecture="Gemma3ForCausalLM",
        models="Gemma 3 (text)",
        gguf=GgufFormat(
            "gemma3",
            tensor_names={**GGUF_POST_NORMS, "ffn_norm": "pre_feedforward_layernorm"},
            extra_config=gemma3_gguf_config,
        ),
        defaults={
            "vocab_size": 262208,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "sliding_window": 4096,
            "max_position_embeddings": 131072,
            "head_dim": 256,
            "query_pre_attn_scalar": 256,
            "rope_theta": 1e6,
            "tie_word_embeddings": True,
        },
        sliding_layers=_gemma3_sliding_layers,
        sliding_rope=_gemma3_sliding_rope,
        activation="gelu_pytorch_tanh",
        qk_norm=True,
        norm_offset=1.0,
        block_norms=SANDWICH_NORMS,
        spec_fields=_gemma3_spec_fields,
    ),
    Family(
        name="olmo2",
        architecture="Olmo2ForCausalLM",
        models="OLMo 2",
        gguf=GgufFormat("olmo2", tensor_names=GGUF_POST_NORMS),
        defaults={"max_position_embeddings": 2048, "rms_norm_eps": 1e-5},
        block_norms=POST_NORMS,
        spec_fields=_olmo2_spec_fields,
    ),
    Family(
        name="olmo3",
        architecture="Olmo3ForCausalLM",
        models="OLMo 3",
        gguf=GgufFormat("olmo2", tensor_names=GGUF_POST_NORMS, extra_config=olmo3_gguf_config, matches=is_olmo3_gguf),
        defaults={
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-5,
            "sliding_window": 4096,
            "rope_theta": 5e5,
        },
        sliding_layers=_olmo3_sliding_layers,
        sliding_rope=_olmo3_sliding_rope,
        block_norms=POST_NORMS,
        spec_fields=_olmo2_spec_fields,
    ),
    Family(
        name="smollm3",
        architecture="SmolLM3ForCausalLM",
        models="SmolLM3",
        gguf=GgufFormat("smollm3", interleaved_heads=True, rope_dim_is_head_dim=True, extra_config=smollm3_gguf_config),
        defaults={
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "rope_theta": 2e6,
            "tie_word_embeddings": True,
        },
        sliding_layers=_smollm3_sliding_layers,
        rope_layers=_smollm3_rope_layers,
    ),
    Family(
        name="glm4",
        architecture="Glm4ForCausalLM",
        models="GLM-4-0414",
        gguf=GgufFormat(
            "glm4",
            tensor_names={
                "post_attention_norm": "post_self_attn_layernorm",
                "post_ffw_norm": "post_mlp_layernorm",
                "ffn_up": "mlp.gate_up_proj",
            },
            extra_config=glm4_gguf_config,
        ),
        defaults={
            "num_key_value_heads": 2,
            "head_dim": 128,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 0.00000015625,
            "attention_bias": True,
            "partial_rotary_factor": 0.5,
        },
        partial_rotary=True,
        block_norms=BlockNorms(
            attention_out="post_self_attn_layernorm", mlp="post_attention_layernorm", mlp_out="post_mlp_layernorm"
        ),
        spec_fields=_glm4_spec_fields,
    ),
    Family(
        name="ministral3",
        architecture="Ministral3ForCausalLM",
        models="Ministral 3 (text)",
        defaults={
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 262144,
            "rms_norm_eps": 1e-5,
        },
        sliding_layers=every_layer,
        default_rope={
            "rope_type": "yarn",
            "rope_theta": 1e6,
            "factor": 16.0,
            "original_max_position_embeddings": 16384,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale_all_dim": 1.0,
            "mscale": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
        query_scaling=True,
        spec_fields=_ministral3_spec_fields,
    ),
    Family(
        name="seed_oss",
        architecture="SeedOssForCausalLM",
        models="Seed-OSS",
        gguf=GgufFormat(
            "seed_oss",
            tensor_names={"post_attention_norm": "post_attention_layernorm"},
            extra_config=seed_oss_gguf_config,
        ),
        defaults={
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 524288,
            "attention_bias": True,
        },
        spec_fields=_seed_oss_spec_fields,
    ),
    Family(
        name="exaone4",
        architecture="Exaone4ForCausalLM",
        models="EXAONE 4.0",
        gguf=GgufFormat("exaone4", tensor_names=GGUF_POST_NORMS, extra_config=exaone4_gguf_config),
        defaults={
            "num_key_value_heads": 32,
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-5,
            "sliding_window": 4096,
        },
        sliding_layers=_exaone4_sliding_layers,
        rope_layers=_exaone4_rope_layers,
        qk_norm=True,
        block_norms=POST_NORMS,
        spec_fields=_exaone4_spec_fields,
    ),
    Family(
        name="cohere2",
        architecture="Cohere2ForCausalLM",
        models="Command R7B, Command A, Aya (Cohere 2)",
        defaults={
            "max_position_embeddings": 8192,
            "layer_norm_eps": 1e-5,
            "sliding_window": 4096,
            "tie_word_embeddings": True,
        },
        sliding_layers=_cohere2_sliding_layers,
        rope_layers=_cohere2_rope_layers,
        norm_eps="layer_norm_eps",
        block_norms=PARALLEL_NORM,
        spec_fields=_cohere2_spec_fields,
    ),
    Family(
        name="ernie4_5",
        architecture="Ernie4_5ForCausalLM",
        models="dense ERNIE 4.5",
        gguf=GgufFormat("ernie4_5", extra_config=ernie4_5_gguf_config),
        defaults={
            "num_key_value_heads": 2,
            "head_dim": 128,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 5e5,
            "tie_word_embeddings": True,
        },
        spec_fields=_ernie4_5_spec_fields,
    ),
    Family(
        name="hunyuan_v1_dense",
        architecture="HunYuanDenseV1ForCausalLM",
        models="dense Hunyuan",
        defaults={"max_position_embeddings": 2048, "rms_norm_eps": 1e-5},
        qk_norm=True,
        rope_aliases={"dynamic": "ntk_alpha"},
        spec_fields=_hunyuan_spec_fields,
    ),
    Family(
        name="arcee",
        architecture="ArceeForCausalLM",
        models="AFM (Arcee)",
        gguf=GgufFormat("arcee", interleaved_heads=True, rope_dim_is_head_dim=True, extra_config=arcee_gguf_config),
        defaults={"max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "hidden_act": "relu2"},
        spec_fields=_arcee_spec_fields,
    ),
    Family(
        name="nemotron",
        architecture="NemotronForCausalLM",
        models="Nemotron-4, Minitron",
        defaults={
            "max_position_embeddings": 4096,
            "norm_eps": 1e-5,
            "hidden_act": "relu2",
            "partial_rotary_factor": 0.5,
        },
        norm_eps="norm_eps",
        norm_offset=1.0,
        partial_rotary=True,
        spec_fields=_nemotron_spec_fields,
    ),
    Family(
        name="starcoder2",
        architecture="Starcoder2ForCausalLM",
        models="StarCoder2",
        defaults={
            "num_key_value_heads": 2,
            "max_position_embeddings": 4096,
            "norm_epsilon": 1e-5,
            "hidden_act": "gelu_pytorch_tanh",
            "use_bias": True,
            "tie_word_embeddings": True,
        },
        sliding_layers=every_layer,
        norm_eps="norm_epsilon",
        spec_fields=_starcoder2_spec_fields,
    ),
    Family(
        name="stablelm",
        architecture="StableLmForCausalLM",
        models="StableLM 3B, Stable LM 2 1.6B",
        defaults={
            "num_key_value_heads": 32,
            "max_position_embeddings": 4096,
            "layer_norm_eps": 1e-5,
            "partial_rotary_factor": 0.25,
        },
        norm_eps="layer_norm_eps",
        partial_rotary=True,
        spec_fields=_stablelm_spec_fields,
    ),
)
