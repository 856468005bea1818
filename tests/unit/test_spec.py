"""Reading config.json: defaults as in transformers, and a one-sentence error for invalid values."""

from __future__ import annotations

from typing import Any

import pytest
import transformers

from yalis.errors import YalisError
from yalis.families import FAMILIES
from yalis.spec import read_spec

LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
GOOD = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 64,
}


@pytest.mark.parametrize("architecture", FAMILIES)
def test_missing_keys_have_the_defaults_of_transformers(architecture):
    """A config.json with sizes only is read with the defaults of transformers' config class."""
    family = FAMILIES[architecture].name
    sizes = {
        "hidden_size": 512,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 32,
        "vocab_size": 100,
    }
    expected = transformers.AutoConfig.for_model(family, **sizes)
    spec = read_spec({"architectures": [architecture], **sizes})
    ropes = expected.rope_parameters
    assert spec.num_kv_heads == (expected.num_key_value_heads or 32)  # Nemotron's is None, with which its model fails
    assert spec.max_position == expected.max_position_embeddings
    assert spec.norm_eps == getattr(expected, FAMILIES[architecture].norm_eps)
    assert spec.tie_embeddings == expected.tie_word_embeddings
    assert spec.rope.theta == ropes.get("full_attention", ropes)["rope_theta"]
    assert spec.rope.kind == ropes.get("full_attention", ropes)["rope_type"]
    assert spec.rope.query_beta == ropes.get("llama_4_scaling_beta", 0.0)
    assert spec.head_dim == (getattr(expected, "head_dim", None) or 16)
    window = getattr(expected, "sliding_window", None) if getattr(expected, "use_sliding_window", True) else None
    types = getattr(expected, "layer_types", None) or ["sliding_attention"] * 3
    assert spec.windows == tuple(window if name == "sliding_attention" else None for name in types)
    default_scale = getattr(expected, "query_pre_attn_scalar", spec.head_dim) ** -0.5
    assert spec.attention_scale == getattr(expected, "attention_multiplier", default_scale)
    assert spec.residual_multiplier == getattr(expected, "residual_multiplier", 1.0)
    logit_scale = getattr(expected, "logit_scale", 1.0)  # Cohere 2 multiplies by it
    assert spec.logits_scaling == getattr(expected, "logits_scaling", 1 / logit_scale)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["BertModel"]}, "'BertModel', which is not supported; known: LlamaForCausalLM"),
        ({"architectures": "GPT2LMHeadModel"}, "'GPT2LMHeadModel'"),
        (
            {"architectures": []},
            "has no architectures entry; use a model whose config.json has one of: LlamaForCausalLM",
        ),
        ({"architectures": [["LlamaForCausalLM"]]}, "makes no sense|not supported"),
        ({"hidden_size": "64"}, "hidden_size in .* is '64'"),
        ({"num_key_value_heads": 3}, "must be a multiple"),
        ({"num_hidden_layers": 0}, "at least 1"),
        ({"hidden_size": None}, "has no hidden_size; add it, as in the original"),
        ({"rms_norm_eps": "small"}, "must be a number"),
        ({"head_dim": 17}, "must be even"),
        ({"eos_token_id": "end"}, "eos_token_id"),
        ({"hidden_act": "relu9"}, "known: silu"),
        ({"hidden_act": ["silu"]}, "makes no sense"),
        ({"tie_word_embeddings": "yes"}, "true or false"),
        ({"rope_parameters": "x"}, "makes no sense"),
        ({"rope_parameters": {"rope_type": "linear", "factor": "x"}}, "makes no sense"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "lacks its 'low_freq_factor'"),
        (
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}},
            "has RoPE scaling 'dynamic', which is not supported; supported: default, linear, llama3, yarn, longrope",
        ),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}},
            "has partial_rotary_factor 0.5 with linear RoPE scaling, which LlamaForCausalLM does not support",
        ),
        ({"rope_scaling": {"type": "longrope", "short_factor": None, "long_factor": [1.0]}}, "makes no sense"),
        (
            {
                "architectures": ["Phi3ForCausalLM"],
                "original_max_position_embeddings": 1,
                "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [1.0] * 8},
            },
            "makes no sense",
        ),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 0}, "sliding_window"),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": "x"}, "sliding_window"),
        ({"architectures": ["Gemma2ForCausalLM"], "layer_types": ["full_attention"]}, "one for each"),
        (
            {"architectures": ["MixtralForCausalLM"], "num_local_experts": 3, "num_experts_per_tok": 4},
            "num_experts_per_tok in .* is 4, but the model has 3 experts",
        ),
        (
            {"architectures": ["Qwen3MoeForCausalLM"], "num_local_experts": 3, "num_experts": 4},
            "num_experts and num_local_experts, and they differ",
        ),
        ({"architectures": ["Qwen2MoeForCausalLM"], "mlp_only_layers": [0.5]}, "must be a list of layer numbers"),
        (
            {"architectures": ["Qwen3MoeForCausalLM"], "scoring_func": "sigmoid"},
            "scoring_func 'sigmoid' .another router than softmax.",
        ),
        (
            {"architectures": ["GptOssForCausalLM"], "n_shared_experts": 1},
            "n_shared_experts 1 .shared experts without a gate.",
        ),
        ({"architectures": ["Glm4MoeForCausalLM"], "scoring_func": "softmax"}, "scoring_func 'softmax'"),
        ({"architectures": ["Glm4MoeForCausalLM"], "n_group": 3}, "n_group in .* is 3, .* of equal size"),
        (
            {"architectures": ["Glm4MoeForCausalLM"], "n_group": 64, "topk_group": 3},
            "must have the 8 experts of a token",
        ),
        (
            {"architectures": ["Glm4MoeForCausalLM"], "topk_group": 2},
            "topk_group in .* is 2; it must be at most n_group",
        ),
        ({"architectures": ["Glm4MoeForCausalLM"], "first_k_dense_replace": -1}, "first_k_dense_replace in .* is -1"),
        ({"architectures": ["OlmoeForCausalLM"], "clip_qkv": 8.0}, "clip_qkv 8.0 .clamped queries"),
        (
            {"architectures": ["DeepseekV3ForCausalLM"], "kv_lora_rank": 512, "n_group": 8, "topk_group": 4},
            "'DeepseekV3ForCausalLM', which is not supported .its config has n_group 8 .a choice of experts by "
            "groups.; topk_group 4 .*; kv_lora_rank 512 .multi-head latent attention.*; known: Llama",
        ),
    ],
)
def test_invalid_values_raise_one_sentence(change, message):
    with pytest.raises(YalisError, match=message) as error:
        read_spec({**GOOD, **change}, "the folder")
    assert "\n" not in str(error.value)


#: config.json of released models, without keys that only training uses.
PHI_4 = {
    "architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "attention_bias": False, "hidden_act": "silu",
    "hidden_size": 5120, "intermediate_size": 17920, "max_position_embeddings": 16384, "num_attention_heads": 40,
    "num_hidden_layers": 40, "num_key_value_heads": 10, "original_max_position_embeddings": 16384,
    "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 250000, "sliding_window": None,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "vocab_size": 100352, "eos_token_id": 100265,
}  # fmt: skip
PHI_4_MINI = {
    **PHI_4, "hidden_size": 3072, "intermediate_size": 8192, "max_position_embeddings": 131072, "vocab_size": 200064,
    "num_attention_heads": 24, "num_hidden_layers": 32, "num_key_value_heads": 8, "tie_word_embeddings": True,
    "original_max_position_embeddings": 4096, "partial_rotary_factor": 0.75, "rope_theta": 10000.0,
    "sliding_window": 262144, "full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False, "mlp_bias": False,
    "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48},
}  # fmt: skip
FALCON3 = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "attention_bias": False, "head_dim": 256,
    "hidden_act": "silu", "hidden_size": 3072, "intermediate_size": 23040, "max_position_embeddings": 32768,
    "mlp_bias": False, "num_attention_heads": 12, "num_hidden_layers": 28, "num_key_value_heads": 4,
    "pretraining_tp": 1, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000042,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "vocab_size": 131072,
}  # fmt: skip
GEMMA3_1B = {
    "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "attention_bias": False,
    "attn_logit_softcapping": None, "cache_implementation": "hybrid", "eos_token_id": [1, 106],
    "final_logit_softcapping": None, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 1152,
    "intermediate_size": 6912, "max_position_embeddings": 32768, "num_attention_heads": 4, "num_hidden_layers": 26,
    "num_key_value_heads": 1, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06, "rope_local_base_freq": 10000,
    "rope_scaling": None, "rope_theta": 1000000, "sliding_window": 512, "sliding_window_pattern": 6,
    "torch_dtype": "bfloat16", "vocab_size": 262144,
}  # fmt: skip


def test_configs_of_released_models() -> None:
    phi4, mini, falcon, gemma = map(read_spec, (PHI_4, PHI_4_MINI, FALCON3, GEMMA3_1B))
    assert (phi4.rope.theta, phi4.windows[0], phi4.fused_qkv) == (250000, None, True)
    assert (mini.rope.kind, mini.rope.dim, mini.rope.switch_at, mini.tie_embeddings) == ("longrope", 96, 4096, True)
    assert (falcon.head_dim, falcon.rope.theta, falcon.fused_qkv) == (256, 1000042, False)
    assert gemma.windows[:7] == (512,) * 5 + (None, 512)
    assert [rope.theta for rope in gemma.layer_ropes[:7]] == [1e4] * 5 + [1e6, 1e4]
    assert gemma.tie_embeddings


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["Phi3ForCausalLM"], "lm_head_bias": True}, "lm_head_bias True .a bias of lm_head."),
        ({"architectures": ["StableLmForCausalLM"], "qk_layernorm": True}, "qk_layernorm True"),
        ({"architectures": ["HunYuanDenseV1ForCausalLM"], "use_cla": True}, "use_cla True .keys and values shared"),
        ({"architectures": ["Gemma3ForCausalLM"], "use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"architectures": ["Gemma3ForCausalLM"], "attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ({"clip_qkv": 8.0}, "clip_qkv 8.0"),
        ({"hidden_act": "relu2"}, "activation 'relu2'; known: silu"),
        ({"architectures": ["ArceeForCausalLM"], "hidden_act": "xielu"}, "activation 'xielu'; known: .*relu2"),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
            "rope_parameters in .* differs by layer type, which LlamaForCausalLM does not support",
        ),
        ({"rope_parameters": {"rope_theta": 1e4, "llama_4_scaling_beta": 0.1}}, "llama_4_scaling_beta 0.1"),
        (
            {"architectures": ["Exaone4ForCausalLM"], "layer_types": ["full_attention", "chunked_attention"]},
            "'chunked_attention' among its layer_types",
        ),
        ({"architectures": ["SmolLM3ForCausalLM"], "no_rope_layers": [1]}, "no_rope_layers in .* for each layer"),
        (
            {"architectures": ["SmolLM3ForCausalLM"], "rope_scaling": LONGROPE, "no_rope_layers": [1, 0]},
            "longrope scaling and layers without RoPE",
        ),
        (
            {
                "architectures": ["Gemma3ForCausalLM"],
                "head_dim": 16,
                "rope_parameters": {"full_attention": LONGROPE, "sliding_attention": {"rope_type": "default"}},
            },
            "longrope scaling for some layers only",
        ),
        (
            {"architectures": ["HunYuanDenseV1ForCausalLM"], "rope_scaling": {"type": "dynamic", "factor": 2.0}},
            "ntk_alpha RoPE scaling but lacks its 'alpha'",
        ),
        ({"rope_scaling": {"type": "ntk_alpha", "alpha": 2.0}}, "'ntk_alpha', which is not supported"),
        (
            {"rope_scaling": LLAMA3, "original_max_position_embeddings": 2**70},
            "original_max_position_embeddings at most 2.32",
        ),
    ],
)
def test_mathematics_that_is_not_covered_is_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(YalisError, match=message) as error:
        read_spec({**GOOD, **change}, "the folder")
    assert "\n" not in str(error.value)


EXPERTS = [name for name in FAMILIES if "Moe" in name or name.startswith(("Mixtral", "GptOss"))]


@pytest.mark.parametrize("architecture", EXPERTS)
def test_experts_have_the_defaults_of_transformers(architecture):
    sizes = {key: value for key, value in GOOD.items() if key != "architectures"}
    expected = transformers.AutoConfig.for_model(FAMILIES[architecture].name, **sizes)
    moe = read_spec({**sizes, "architectures": [architecture]}).moe
    experts = getattr(expected, "n_routed_experts", None) or expected.num_experts
    assert (moe.num_experts, moe.top_k) == (experts, expected.num_experts_per_tok)
    assert moe.width == getattr(expected, "moe_intermediate_size", expected.intermediate_size)
    shared = getattr(expected, "shared_expert_intermediate_size", getattr(expected, "n_shared_experts", 0) * moe.width)
    assert moe.shared_width == shared
    assert moe.renormalize == getattr(expected, "norm_topk_prob", moe.scoring == "softmax")
    dense = getattr(expected, "first_k_dense_replace", 0)
    assert moe.layers == tuple(layer >= dense for layer in range(2))
    groups = (getattr(expected, "n_group", 1), getattr(expected, "topk_group", 1))
    assert (moe.groups, moe.top_groups) == groups
    assert moe.scale == getattr(expected, "routed_scaling_factor", 1.0)
    if moe.clamp is not None:
        assert moe.clamp == (expected.swiglu_alpha, expected.swiglu_limit)


def test_rope_of_gpt_oss_is_yarn_unless_config_json_has_another() -> None:
    sizes = {**GOOD, "architectures": ["GptOssForCausalLM"], "max_position_embeddings": 131072}
    written = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
    written["original_max_position_embeddings"] = 4096
    default = read_spec(sizes).rope
    assert (default.kind, default.factor, default.truncate) == ("yarn", 32.0, False)
    assert read_spec({**sizes, "rope_scaling": written, "rope_theta": 150000}).rope == default
    assert read_spec({**sizes, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}).rope.kind == "default"


@pytest.mark.parametrize("architecture", FAMILIES)
def test_partial_rotary_factor_is_honoured_where_transformers_honours_it(architecture):
    sizes = {key: value for key, value in GOOD.items() if key != "architectures"}
    options = {"rope_theta": 1e4, "rope_type": "default", "partial_rotary_factor": 0.5}
    if FAMILIES[architecture].sliding_rope is not None:
        with pytest.raises(YalisError, match="needs an entry for full_attention and sliding_attention"):
            read_spec({**GOOD, "architectures": [architecture], "rope_parameters": options})
        return
    config = transformers.AutoConfig.for_model(
        FAMILIES[architecture].name, **sizes, head_dim=16, pad_token_id=0, rope_parameters=options
    )
    rotary = transformers.AutoModel.from_config(config).rotary_emb
    spec = read_spec({**sizes, "architectures": [architecture], "head_dim": 16, "rope_parameters": options})
    assert spec.rope.dim == 2 * len(rotary.inv_freq)
    assert spec.rope.dim == (8 if FAMILIES[architecture].partial_rotary else 16)
