"""The supported model families: one record per family with all settings in which it differs.

Every family runs on the same decoder with different settings. To add a family, add a record to FAMILIES. If it needs an
operation no field describes, add a field to ModelSpec (spec.py) or MoESpec (moe.py) and use it in the layer that
computes it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from yalis import moe_gguf
from yalis.config_reader import ConfigReader
from yalis.errors import YalisError
from yalis.moe import (
    MoESpec,
    list_unknown_fields,
    read_glm4_moe,
    read_gpt_oss_moe,
    read_mixtral_moe,
    read_olmoe_moe,
    read_qwen2_moe,
    read_qwen3_moe,
)


class GgufReader(Protocol):
    """Typed access to the metadata of a GGUF file; keys omit the architecture prefix ("llama.")."""

    architecture: str  # general.architecture
    model_name: str  # general.name
    label: str

    def integer(self, key: str, default: int | None = None) -> int: ...

    def number(self, key: str, default: float | None = None) -> float: ...

    def flag(self, key: str, default: bool) -> bool: ...

    def has_tensor(self, name: str) -> bool: ...


@dataclass(frozen=True)
class GgufFormat:
    """How llama.cpp's converter stores a family in a GGUF file."""

    architecture: str  # the file's general.architecture
    #: GGUF tensor name -> Hugging Face name within a layer, where it differs from gguf_config.LAYER_TENSORS.
    tensor_names: Mapping[str, str] = field(default_factory=dict)
    interleaved_heads: bool = False  # rows of q_proj and k_proj are reordered for RoPE on pairs (2i, 2i + 1)
    rope_dim_is_head_dim: bool = False  # without attention.key_length, rope.dimension_count is the head size
    #: Returns further config.json entries; gets the metadata and the entries common to all families.
    extra_config: Callable[[GgufReader, Mapping[str, Any]], dict[str, Any]] = lambda metadata, config: {}
    #: Decides between families that share an architecture name; None: used when no other matches.
    matches: Callable[[GgufReader], bool] | None = None


@dataclass(frozen=True)
class Family:
    name: str  # config.json's model_type
    architecture: str  # config.json's "architectures" entry
    models: str  # released models, for messages
    gguf: GgufFormat | None = None  # None: GGUF files of this family cannot be read
    defaults: Mapping[str, Any] = field(default_factory=dict)  # transformers' value of keys a config.json leaves out
    #: Returns, per layer, whether it uses the sliding window. None: the family ignores sliding_window.
    sliding_layers: Callable[[ConfigReader, int], Sequence[bool]] | None = None
    activation: str | None = None  # replaces hidden_act, which this family's config.json may hold but does not use
    qkv_bias: bool = False  # q, k and v always have biases; otherwise attention_bias decides
    qk_norm: bool = False
    norm_offset: float = 0.0
    sandwich_norms: bool = False
    fused_projections: bool = False
    rope_aliases: Mapping[str, str] = field(default_factory=dict)  # other names for a RoPE scaling type
    rope_defaults: Mapping[str, Any] = field(default_factory=dict)  # the RoPE scaling of a config.json without one
    partial_rotary: bool = False  # honours partial_rotary_factor, which transformers ignores in the other families
    mxfp4_experts: bool = False  # fused experts may be stored as MXFP4, which is dequantized on load
    #: Returns ModelSpec fields computed from config.json keys that only this family has.
    spec_fields: Callable[[ConfigReader], dict[str, Any]] = lambda config: {}

    @property
    def gguf_format(self) -> GgufFormat:
        """The GGUF format of a family that find_gguf_family() returns."""
        assert self.gguf is not None
        return self.gguf


def _every_layer(config: ConfigReader, num_layers: int) -> list[bool]:
    return [True] * num_layers


def _listed_layers(config: ConfigReader, num_layers: int) -> list[bool] | None:
    """Return which layers config.json's layer_types lists as sliding, or None if it has no such key."""
    types = config.config.get("layer_types")
    if types is None:
        return None
    if len(types) != num_layers:
        raise YalisError(
            f"{config.label} gives {len(types)} layer_types for {num_layers} layers; it must give one for each"
        )
    return [layer_type == "sliding_attention" for layer_type in types]


def _qwen_sliding_layers(config: ConfigReader, num_layers: int) -> list[bool]:
    if not config.flag("use_sliding_window"):
        return [False] * num_layers
    first = config.config.get("max_window_layers", 28)
    return _listed_layers(config, num_layers) or [layer >= first for layer in range(num_layers)]


def _even_sliding_layers(config: ConfigReader, num_layers: int) -> list[bool]:
    return _listed_layers(config, num_layers) or [layer % 2 == 0 for layer in range(num_layers)]


def _gemma2_spec_fields(config: ConfigReader) -> dict[str, Any]:
    return {
        "attention_scale": config.positive("query_pre_attn_scalar", 256.0) ** -0.5,
        "embed_scale": config.integer("hidden_size") ** 0.5,
        "attention_softcap": config.optional_number("attn_logit_softcapping"),
        "logit_softcap": config.optional_number("final_logit_softcapping"),
    }


def _granite_spec_fields(config: ConfigReader) -> dict[str, Any]:
    return {
        "attention_scale": config.number("attention_multiplier", 1.0),
        "embed_scale": config.number("embedding_multiplier", 1.0),
        "residual_multiplier": config.number("residual_multiplier", 1.0),
        "logits_scaling": config.number("logits_scaling", 1.0),
    }


def _qwen2_moe_sliding_layers(config: ConfigReader, num_layers: int) -> list[bool]:
    if not config.flag("use_sliding_window"):
        return [False] * num_layers
    end = config.config.get("max_window_layers", 28)
    return _listed_layers(config, num_layers) or [layer % 2 == 0 and layer < end for layer in range(num_layers)]


def _qwen3_moe_sliding_layers(config: ConfigReader, num_layers: int) -> list[bool]:
    return [config.flag("use_sliding_window")] * num_layers


def _mixtral_spec_fields(config: ConfigReader) -> dict[str, Any]:
    return _moe_fields(read_mixtral_moe(config)) | {"qkv_bias": False, "out_bias": False}


def _olmoe_spec_fields(config: ConfigReader) -> dict[str, Any]:
    return _moe_fields(read_olmoe_moe(config)) | {"joint_qk_norm": True}


def _qwen2_moe_spec_fields(config: ConfigReader) -> dict[str, Any]:
    return _moe_fields(read_qwen2_moe(config)) | {"qkv_bias": config.flag("qkv_bias"), "out_bias": False}


def _qwen3_moe_spec_fields(config: ConfigReader) -> dict[str, Any]:
    return _moe_fields(read_qwen3_moe(config))


def _glm4_moe_spec_fields(config: ConfigReader) -> dict[str, Any]:
    return _moe_fields(read_glm4_moe(config)) | {"out_bias": False, "qk_norm": config.flag("use_qk_norm")}


def _gpt_oss_spec_fields(config: ConfigReader) -> dict[str, Any]:
    return _moe_fields(read_gpt_oss_moe(config)) | {"attention_sinks": True}


def _moe_fields(moe: MoESpec) -> dict[str, Any]:
    return {"mlp": "moe", "moe": moe, "mlp_bias": False}


def _gguf_window(metadata: GgufReader) -> int | None:
    return metadata.integer("attention.sliding_window", 0) or None


def _llama_gguf_config(metadata: GgufReader, config: Mapping[str, Any]) -> dict[str, Any]:
    return {"mlp_bias": metadata.has_tensor("blk.0.ffn_down.bias")}


def _is_mistral_gguf(metadata: GgufReader) -> bool:
    """Mistral's GGUF files have Llama's architecture name. The window or the model's name distinguishes them."""
    dense = not moe_gguf.has_experts(metadata)
    return dense and (_gguf_window(metadata) is not None or "mistral" in metadata.model_name.lower())


def _mistral_gguf_config(metadata: GgufReader, config: Mapping[str, Any]) -> dict[str, Any]:
    return {**_llama_gguf_config(metadata, config), "sliding_window": _gguf_window(metadata)}


def _qwen2_gguf_config(metadata: GgufReader, config: Mapping[str, Any]) -> dict[str, Any]:
    return {"use_sliding_window": False, "sliding_window": None}


def _gemma2_gguf_config(metadata: GgufReader, config: Mapping[str, Any]) -> dict[str, Any]:
    # The query scale is not in the file. It is the head size, except in the 27B model with its 46 layers.
    by_hidden = config["hidden_size"] // config["num_attention_heads"]
    return {
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": _gguf_window(metadata) or 4096,
        "query_pre_attn_scalar": by_hidden if config["num_hidden_layers"] == 46 else config["head_dim"],
        "attn_logit_softcapping": metadata.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": metadata.number("final_logit_softcapping", 30.0),
    }


def _phi3_gguf_config(metadata: GgufReader, config: Mapping[str, Any]) -> dict[str, Any]:
    by_hidden = config["hidden_size"] // config["num_attention_heads"]
    max_position = config["max_position_embeddings"]
    return {
        "sliding_window": _gguf_window(metadata),
        "partial_rotary_factor": metadata.integer("rope.dimension_count", by_hidden) / config["head_dim"],
        "original_max_position_embeddings": metadata.integer("rope.scaling.original_context_length", max_position),
    }


def _granite_gguf_config(metadata: GgufReader, config: Mapping[str, Any]) -> dict[str, Any]:
    # All four are required: llama.cpp and transformers do not agree on the scale of attention where it is missing.
    return {
        **_llama_gguf_config(metadata, config),
        "attention_multiplier": metadata.number("attention.scale"),
        "embedding_multiplier": metadata.number("embedding_scale"),
        "residual_multiplier": metadata.number("residual_scale"),
        "logits_scaling": metadata.number("logit_scale"),
    }


_RECORDS = (
    Family(
        name="llama",
        architecture="LlamaForCausalLM",
        models="Llama 2, 3, 3.1, 3.2; SmolLM2",
        gguf=GgufFormat("llama", interleaved_heads=True, rope_dim_is_head_dim=True, extra_config=_llama_gguf_config),
        defaults={"max_position_embeddings": 2048},
    ),
    Family(
        name="mistral",
        architecture="MistralForCausalLM",
        models="Mistral",
        gguf=GgufFormat(
            "llama",
            interleaved_heads=True,
            rope_dim_is_head_dim=True,
            extra_config=_mistral_gguf_config,
            matches=_is_mistral_gguf,
        ),
        defaults={"num_key_value_heads": 8, "sliding_window": 4096, "max_position_embeddings": 131072},
        sliding_layers=_every_layer,
    ),
    Family(
        name="qwen2",
        architecture="Qwen2ForCausalLM",
        models="Qwen2, Qwen2.5",
        gguf=GgufFormat("qwen2", extra_config=_qwen2_gguf_config),
        defaults={"num_key_value_heads": 32, "sliding_window": 4096, "max_position_embeddings": 32768},
        sliding_layers=_qwen_sliding_layers,
        qkv_bias=True,
    ),
    Family(
        name="qwen3",
        architecture="Qwen3ForCausalLM",
        models="Qwen3",
        gguf=GgufFormat("qwen3"),
        defaults={
            "num_key_value_heads": 32,
            "sliding_window": 4096,
            "max_position_embeddings": 32768,
            "head_dim": 128,
        },
        sliding_layers=_qwen_sliding_layers,
        qk_norm=True,
    ),
    Family(
        name="gemma2",
        architecture="Gemma2ForCausalLM",
        models="Gemma 2",
        gguf=GgufFormat(
            "gemma2",
            tensor_names={
                "post_attention_norm": "post_attention_layernorm",
                "ffn_norm": "pre_feedforward_layernorm",
                "post_ffw_norm": "post_feedforward_layernorm",
            },
            extra_config=_gemma2_gguf_config,
        ),
        defaults={
            "num_key_value_heads": 4,
            "sliding_window": 4096,
            "max_position_embeddings": 8192,
            "head_dim": 256,
            "query_pre_attn_scalar": 256,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
            "tie_word_embeddings": True,
        },
        sliding_layers=_even_sliding_layers,
        activation="gelu_pytorch_tanh",
        norm_offset=1.0,
        sandwich_norms=True,
        spec_fields=_gemma2_spec_fields,
    ),
    Family(
        name="phi3",
        architecture="Phi3ForCausalLM",
        models="Phi-3",
        gguf=GgufFormat("phi3", tensor_names={"ffn_up": "mlp.gate_up_proj"}, extra_config=_phi3_gguf_config),
        defaults={"rms_norm_eps": 1e-5, "max_position_embeddings": 4096},
        sliding_layers=_every_layer,
        fused_projections=True,
        rope_aliases={"su": "longrope", "yarn": "longrope"},
        partial_rotary=True,
    ),
    Family(
        name="granite",
        architecture="GraniteForCausalLM",
        models="dense Granite 3",
        gguf=GgufFormat("granite", interleaved_heads=True, extra_config=_granite_gguf_config),
        defaults={"max_position_embeddings": 2048},
        spec_fields=_granite_spec_fields,
    ),
    Family(
        name="mixtral",
        architecture="MixtralForCausalLM",
        models="Mixtral",
        gguf=GgufFormat(
            "llama",
            tensor_names={
                "ffn_gate_inp": "block_sparse_moe.gate",
                "ffn_gate_exps": "block_sparse_moe.experts.{expert}.w1",
                "ffn_up_exps": "block_sparse_moe.experts.{expert}.w3",
                "ffn_down_exps": "block_sparse_moe.experts.{expert}.w2",
            },
            interleaved_heads=True,
            rope_dim_is_head_dim=True,
            extra_config=moe_gguf.mixtral_config,
            matches=moe_gguf.has_experts,
        ),
        defaults={
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
        },
        sliding_layers=_every_layer,
        spec_fields=_mixtral_spec_fields,
    ),
    Family(
        name="olmoe",
        architecture="OlmoeForCausalLM",
        models="OLMoE",
        gguf=GgufFormat("olmoe", extra_config=moe_gguf.olmoe_config),
        defaults={"max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
        spec_fields=_olmoe_spec_fields,
    ),
    Family(
        name="qwen2_moe",
        architecture="Qwen2MoeForCausalLM",
        models="Qwen1.5-MoE, Qwen2-MoE",
        gguf=GgufFormat("qwen2moe", extra_config=moe_gguf.qwen2_moe_config),
        defaults={
            "num_key_value_heads": 16,
            "sliding_window": 4096,
            "max_position_embeddings": 32768,
            "intermediate_size": 5632,
            "qkv_bias": True,
        },
        sliding_layers=_qwen2_moe_sliding_layers,
        spec_fields=_qwen2_moe_spec_fields,
    ),
    Family(
        name="qwen3_moe",
        architecture="Qwen3MoeForCausalLM",
        models="Qwen3-MoE",
        gguf=GgufFormat("qwen3moe", extra_config=moe_gguf.qwen3_moe_config),
        defaults={
            "num_key_value_heads": 4,
            "sliding_window": 4096,
            "max_position_embeddings": 32768,
            "intermediate_size": 6144,
        },
        sliding_layers=_qwen3_moe_sliding_layers,
        qk_norm=True,
        spec_fields=_qwen3_moe_spec_fields,
    ),
    Family(
        name="glm4_moe",
        architecture="Glm4MoeForCausalLM",
        models="GLM-4.5, GLM-4.6",
        gguf=GgufFormat(
            "glm4moe",
            tensor_names={
                "post_attention_norm": "post_attention_layernorm",
                "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
                "ffn_up_shexp": "mlp.shared_experts.up_proj",
                "ffn_down_shexp": "mlp.shared_experts.down_proj",
            },
            extra_config=moe_gguf.glm4_moe_config,
        ),
        defaults={
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "intermediate_size": 10944,
            "norm_topk_prob": True,
            "partial_rotary_factor": 0.5,
        },
        partial_rotary=True,
        spec_fields=_glm4_moe_spec_fields,
    ),
    Family(
        name="gpt_oss",
        architecture="GptOssForCausalLM",
        models="gpt-oss",
        gguf=GgufFormat(
            "gpt-oss",
            tensor_names={"post_attention_norm": "post_attention_layernorm", "ffn_gate_inp": "mlp.router"},
            extra_config=moe_gguf.gpt_oss_config,
        ),
        defaults={
            "num_key_value_heads": 8,
            "head_dim": 64,
            "sliding_window": 128,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 150000.0,
            "intermediate_size": 2880,
            "attention_bias": True,
        },
        rope_defaults={
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        sliding_layers=_even_sliding_layers,
        activation="silu",  # not used: experts have a clamped gate
        mxfp4_experts=True,
        spec_fields=_gpt_oss_spec_fields,
    ),
)
#: The families by config.json's "architectures" entry.
FAMILIES = {family.architecture: family for family in _RECORDS}


def match_family(config: Mapping[str, Any]) -> Family | None:
    """Return the family of a config.json, or None if it is not supported."""
    names = _architectures(config)
    if not names:
        return next((family for family in _RECORDS if family.name == config.get("model_type")), None)
    return next((FAMILIES[name] for name in names if isinstance(name, str) and name in FAMILIES), None)


def _architectures(config: Mapping[str, Any]) -> list[Any]:
    names = config.get("architectures") or []
    return names if isinstance(names, list) else [names]


def find_family(config: Mapping[str, Any], label: str) -> Family:
    """Return the family of a config.json; raises an error that lists the supported ones."""
    family = match_family(config)
    if family is not None:
        return family
    known = ", ".join(f"{family.architecture} ({family.models})" for family in _RECORDS)
    names = _architectures(config)
    unknown = names[0] if names else config.get("model_type")
    if unknown is None:
        raise YalisError(f"{label} has no architectures entry; use a model whose config.json has one of: {known}")
    needs = list_unknown_fields(config)
    why = f" (its config has {'; '.join(needs)})" if needs else ""
    raise YalisError(f"{label} has architecture {unknown!r}, which is not supported{why}; known: {known}")


def find_gguf_family(metadata: GgufReader) -> Family:
    """Return the family of a GGUF file by its general.architecture."""
    formats = [(family, family.gguf) for family in _RECORDS if family.gguf is not None]
    candidates = [(family, stored) for family, stored in formats if stored.architecture == metadata.architecture]
    if not candidates:
        known = ", ".join(dict.fromkeys(stored.architecture for _, stored in formats))
        raise YalisError(f"{metadata.label} is a GGUF file of architecture {metadata.architecture!r}; known: {known}")
    matching = [family for family, stored in candidates if stored.matches is not None and stored.matches(metadata)]
    return matching[0] if matching else next(family for family, stored in candidates if stored.matches is None)
