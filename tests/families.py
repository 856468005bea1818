"""Tiny random checkpoints of every family, with transformers' outputs as reference."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

VOCAB = 251  # a prime

# Defaults of every case. The context is long enough for every scenario of the tests.
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_LONGROPE = {
    "short_factor": [1.0, 1.1, 1.3, 1.6, 2.0, 2.5, 2.6, 2.7],
    "long_factor": [1.0, 1.5, 2.0, 3.0, 5.0, 8.0, 9.0, 9.5],
}


@dataclass(frozen=True)
class Case:
    name: str
    config: str  # transformers' config class
    options: dict[str, Any] = field(default_factory=dict)
    std: float = 0.25  # of the matrices; more layers amplify rounding errors and need a smaller value
    replayed_on_cpu: bool = True  # every operation has a native kernel, so steps can be recorded on a CPU
    brief: bool = False  # `make test` runs few scenarios of it; other cases cover what its operations have in common

    def build(self, seed: int) -> transformers.PreTrainedModel:
        """Return a model with random weights, large enough that logits differ clearly."""
        options = deepcopy({**_COMMON, **self.options})
        if isinstance(options.get("layer_types"), str):  # the same for all layers
            options["layer_types"] = [options["layer_types"]] * options["num_hidden_layers"]
        config = getattr(transformers, self.config)(**options)
        model = transformers.AutoModelForCausalLM.from_config(choose_eager(config)).eval()
        generator = torch.Generator().manual_seed(seed)
        offset = 0.0 if "Gemma" in self.config else 1.0
        with torch.no_grad():
            for name, weight in model.named_parameters():
                noise = torch.randn(weight.shape, generator=generator)
                weight.copy_(offset + 0.2 * noise if "norm" in name else self.std * noise)
            for name, buffer in model.named_buffers():
                if name.endswith("correction_bias"):
                    buffer.copy_(0.2 * torch.randn(buffer.shape, generator=generator))
        model.generation_config.eos_token_id = None
        model.generation_config.bos_token_id = None
        return model


def choose_eager(config: transformers.PreTrainedConfig) -> transformers.PreTrainedConfig:
    """Choose transformers' reference code: sdpa ignores Gemma's softcap, and grouped matmuls need even widths."""
    config._attn_implementation = config._experts_implementation = "eager"
    return config


CASES = [
    Case(
        "llama-mha-tied",
        "LlamaConfig",
        {
            "num_key_value_heads": 4,
            "tie_word_embeddings": True,
            # transformers' Llama ignores partial_rotary_factor
            "rope_parameters": {"rope_theta": 1e4, "rope_type": "default", "partial_rotary_factor": 0.5},
        },
    ),
    Case(
        "llama-bias-linear",
        "LlamaConfig",
        {
            "attention_bias": True,
            "mlp_bias": True,
            "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
        },
    ),
    Case(
        "llama3-gqa4",
        "LlamaConfig",
        {
            "num_key_value_heads": 1,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 5e5,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        },
    ),
    Case(
        "llama-wide-heads",
        "LlamaConfig",
        {"head_dim": 40, "hidden_size": 60, "num_attention_heads": 6, "num_key_value_heads": 3},
    ),
    Case("mistral-window", "MistralConfig", {"sliding_window": 8, "num_key_value_heads": 1}),
    Case(
        "mistral-full", "MistralConfig", {"sliding_window": None, "num_key_value_heads": 4, "tie_word_embeddings": True}
    ),
    Case("qwen2-tied", "Qwen2Config", {"tie_word_embeddings": True}),
    Case(
        "qwen2-window-yarn",
        "Qwen2Config",
        {
            "num_key_value_heads": 4,
            "use_sliding_window": True,
            "sliding_window": 8,
            "max_window_layers": 1,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    Case("qwen3-gqa4", "Qwen3Config", {"num_key_value_heads": 1, "head_dim": 24}),
    Case("qwen3-bias-tied", "Qwen3Config", {"head_dim": 20, "attention_bias": True, "tie_word_embeddings": True}),
    Case(
        "gemma2",
        "Gemma2Config",
        {"head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 20},
        replayed_on_cpu=False,
    ),
    Case(
        "gemma2-caps-off",
        "Gemma2Config",
        {
            "head_dim": 32,
            "num_key_value_heads": 1,
            "sliding_window": 16,
            "final_logit_softcapping": None,
            "attn_logit_softcapping": 3.0,
            "tie_word_embeddings": False,
        },
        replayed_on_cpu=False,
    ),
    Case("phi3", "Phi3Config", {"num_key_value_heads": 4, "sliding_window": 12}),
    Case(
        "phi3-partial-tied",
        "Phi3Config",
        {
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_theta": 1e4, "rope_type": "default", "partial_rotary_factor": 0.5},
        },
    ),
    Case(
        "phi3-longrope",
        "Phi3Config",
        {
            "num_key_value_heads": 1,
            "original_max_position_embeddings": 24,
            "rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, **_LONGROPE},
        },
    ),
    # The options of Phi-4-mini, Phi-4 and Falcon 3 at small sizes.
    Case(
        "phi4-mini",
        "Phi3Config",
        {
            "hidden_size": 96,
            "num_attention_heads": 6,
            "sliding_window": 200,
            "tie_word_embeddings": True,
            "original_max_position_embeddings": 24,
            "partial_rotary_factor": 0.75,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "short_factor": [1.0, 1.1, 1.3, 1.6, 2.0, 2.5],
                "long_factor": [1.0, 1.5, 2.0, 3.0, 5.0, 8.0],
            },
        },
        brief=True,
    ),
    Case(
        "phi4",
        "Phi3Config",
        {
            "num_key_value_heads": 1,
            "sliding_window": None,
            "rope_parameters": {"rope_type": "default", "rope_theta": 250000.0},
        },
        brief=True,
    ),
    Case(
        "falcon3",
        "LlamaConfig",
        {
            "num_attention_heads": 6,
            "head_dim": 32,
            "hidden_size": 60,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000042.0},
        },
        brief=True,
    ),
    Case(
        "granite",
        "GraniteConfig",
        {
            "num_key_value_heads": 1,
            "attention_multiplier": 0.1,
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "logits_scaling": 3.0,
        },
        replayed_on_cpu=False,
    ),
    Case(
        "granite-bias-tied",
        "GraniteConfig",
        {
            "num_key_value_heads": 4,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
            "attention_multiplier": 0.4,
            "embedding_multiplier": 2.3,
            "residual_multiplier": 1.4,
            "logits_scaling": 0.7,
        },
        replayed_on_cpu=False,
    ),
    Case(
        "gemma3",
        "Gemma3TextConfig",
        {
            "head_dim": 16,
            "num_hidden_layers": 3,
            "intermediate_size": 77,
            "sliding_window": 8,
            "sliding_window_pattern": 2,
            "query_pre_attn_scalar": 20,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
        replayed_on_cpu=False,
        brief=True,
    ),
    Case(
        "gemma3-bias-untied",
        "Gemma3TextConfig",
        {
            "head_dim": 24,
            "num_key_value_heads": 1,
            "sliding_window_pattern": 2,
            "sliding_window": 16,
            "attention_bias": True,
            "final_logit_softcapping": 20.0,
            "tie_word_embeddings": False,
        },
        replayed_on_cpu=False,
        brief=True,
    ),
    Case("olmo2", "Olmo2Config", {"intermediate_size": 77}, brief=True),
    Case(
        "olmo2-bias-tied",
        "Olmo2Config",
        {"num_key_value_heads": 4, "attention_bias": True, "tie_word_embeddings": True},
        brief=True,
    ),
    Case(
        "olmo3",
        "Olmo3Config",
        {
            "num_hidden_layers": 4,
            "num_key_value_heads": 4,
            "sliding_window": 8,
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "yarn",
                    "rope_theta": 5e5,
                    "factor": 8.0,
                    "original_max_position_embeddings": 32,
                    "attention_factor": 1.2,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 5e5},
            },
        },
        std=0.2,
        brief=True,
    ),
    Case(
        "smollm3",
        "SmolLM3Config",
        {"num_key_value_heads": 1, "no_rope_layer_interval": 2, "intermediate_size": 77},
        brief=True,
    ),
    Case(
        "smollm3-bias-untied",
        "SmolLM3Config",
        {
            "no_rope_layer_interval": 2,
            "use_sliding_window": True,
            "sliding_window": 8,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": False,
        },
        brief=True,
    ),
    Case("glm4", "Glm4Config", {"head_dim": 20, "intermediate_size": 77}, brief=True),
    Case(
        "glm4-tied",
        "Glm4Config",
        {
            "num_key_value_heads": 4,
            "head_dim": 16,
            "attention_bias": False,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_theta": 1e4, "rope_type": "default", "partial_rotary_factor": 1.0},
        },
        brief=True,
    ),
    Case(
        "ministral3",
        "Ministral3Config",
        {
            "head_dim": 24,
            "sliding_window": None,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 16.0,
                "original_max_position_embeddings": 9,
                "max_position_embeddings": 256,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale_all_dim": 1.0,
                "mscale": 1.0,
                "llama_4_scaling_beta": 0.7,
            },
        },
        replayed_on_cpu=False,
        brief=True,
    ),
    Case(
        "ministral3-window-tied",
        "Ministral3Config",
        {"head_dim": 16, "num_key_value_heads": 1, "sliding_window": 8, "tie_word_embeddings": True},
        replayed_on_cpu=False,
        brief=True,
    ),
    Case("seed-oss", "SeedOssConfig", {"head_dim": 24, "intermediate_size": 77}, brief=True),
    Case(
        "seed-oss-bias-tied",
        "SeedOssConfig",
        {
            "num_key_value_heads": 4,
            "head_dim": 16,
            "attention_bias": False,
            "attention_out_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
        },
        brief=True,
    ),
    Case(
        "exaone4",
        "Exaone4Config",
        {"sliding_window": 8, "sliding_window_pattern": 2, "intermediate_size": 77},
        brief=True,
    ),
    Case(
        "exaone4-full-tied",
        "Exaone4Config",
        {
            "num_key_value_heads": 1,
            "sliding_window": None,
            "layer_types": "full_attention",
            "tie_word_embeddings": True,
        },
        brief=True,
    ),
    Case(
        "cohere2",
        "Cohere2Config",
        {"sliding_window": 8, "sliding_window_pattern": 2, "intermediate_size": 77, "logit_scale": 0.25},
        replayed_on_cpu=False,
        brief=True,
    ),
    Case(
        "cohere2-bias-untied",
        "Cohere2Config",
        {
            "num_key_value_heads": 1,
            "attention_bias": True,
            "layer_types": "sliding_attention",
            "sliding_window": 16,
            "tie_word_embeddings": False,
        },
        replayed_on_cpu=False,
        brief=True,
    ),
    Case("ernie4.5", "Ernie4_5Config", {"head_dim": 24, "intermediate_size": 77}, brief=True),
    Case(
        "ernie4.5-bias-untied",
        "Ernie4_5Config",
        {"num_key_value_heads": 1, "head_dim": 16, "use_bias": True, "tie_word_embeddings": False},
        brief=True,
    ),
    Case(
        "hunyuan",
        "HunYuanDenseV1Config",
        {
            "head_dim": 24,
            "intermediate_size": 77,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 1000.0, "factor": 1.0},
        },
        brief=True,
    ),
    Case(
        "hunyuan-bias-tied",
        "HunYuanDenseV1Config",
        {"num_key_value_heads": 4, "attention_bias": True, "tie_word_embeddings": True, "head_dim": 16},
        brief=True,
    ),
    Case("arcee", "ArceeConfig", {"head_dim": 24, "intermediate_size": 77}, replayed_on_cpu=False, brief=True),
    Case(
        "arcee-bias-tied",
        "ArceeConfig",
        {
            "num_key_value_heads": 1,
            "attention_bias": True,
            "mlp_bias": True,
            "hidden_act": "silu",
            "tie_word_embeddings": True,
        },
        replayed_on_cpu=False,
        brief=True,
    ),
    Case(
        "starcoder2",
        "Starcoder2Config",
        {"sliding_window": 8, "intermediate_size": 77},
        replayed_on_cpu=False,
        brief=True,
    ),
    Case(
        "starcoder2-untied",
        "Starcoder2Config",
        {"num_key_value_heads": 4, "use_bias": False, "hidden_act": "gelu", "tie_word_embeddings": False},
        replayed_on_cpu=False,
        brief=True,
    ),
    Case(
        "stablelm", "StableLmConfig", {"intermediate_size": 77, "use_qkv_bias": True}, replayed_on_cpu=False, brief=True
    ),
    Case(
        "stablelm-parallel-tied",
        "StableLmConfig",
        {
            "num_key_value_heads": 4,
            "use_parallel_residual": True,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_theta": 1e4, "rope_type": "default", "partial_rotary_factor": 0.5},
        },
        replayed_on_cpu=False,
        brief=True,
    ),
    Case(
        "nemotron",
        "NemotronConfig",
        {"head_dim": 24, "num_key_value_heads": 1, "intermediate_size": 77},
        replayed_on_cpu=False,
        brief=True,
    ),
    Case(
        "nemotron-bias-tied",
        "NemotronConfig",
        {
            "num_key_value_heads": 4,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_theta": 1e4, "rope_type": "default", "partial_rotary_factor": 1.0},
        },
        replayed_on_cpu=False,
        brief=True,
    ),
    Case(
        "mixtral-window",
        "MixtralConfig",
        {"num_local_experts": 5, "num_experts_per_tok": 3, "intermediate_size": 27, "sliding_window": 8},
        brief=True,
    ),
    Case(
        "olmoe",
        "OlmoeConfig",
        {"num_experts": 11, "num_experts_per_tok": 4, "intermediate_size": 21},
        brief=True,
    ),
    Case(
        "olmoe-bias-tied",
        "OlmoeConfig",
        {
            "num_experts": 7,
            "num_experts_per_tok": 7,
            "norm_topk_prob": True,
            "num_key_value_heads": 4,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
        brief=True,
    ),
    Case(
        "qwen2-moe",
        "Qwen2MoeConfig",
        {
            "num_experts": 9,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 19,
            "shared_expert_intermediate_size": 45,
            "use_sliding_window": True,
            "sliding_window": 8,
        },
    ),
    Case(
        "qwen2-moe-dense-tied",
        "Qwen2MoeConfig",
        {
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
            "moe_intermediate_size": 33,
            "shared_expert_intermediate_size": 17,
            "mlp_only_layers": [0],
            "qkv_bias": False,
            "num_key_value_heads": 1,
            "tie_word_embeddings": True,
        },
        brief=True,
    ),
    Case(
        "qwen3-moe-sparse-tied",
        "Qwen3MoeConfig",
        {
            "num_experts": 13,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
            "moe_intermediate_size": 25,
            "decoder_sparse_step": 2,
            "num_key_value_heads": 1,
            "head_dim": 24,
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 12,
            "tie_word_embeddings": True,
        },
        brief=True,
    ),
    Case(
        "glm4-moe",
        "Glm4MoeConfig",
        {
            "n_routed_experts": 10,
            "num_experts_per_tok": 3,
            "n_group": 5,
            "topk_group": 3,
            "n_shared_experts": 2,
            "moe_intermediate_size": 19,
            "routed_scaling_factor": 2.5,
            "head_dim": 16,
        },
        brief=True,
    ),
    Case(
        "glm4-moe-norms-tied",
        "Glm4MoeConfig",
        {
            "n_routed_experts": 7,
            "num_experts_per_tok": 7,  # no choice, which bfloat16 could make differently
            "norm_topk_prob": False,
            "moe_intermediate_size": 33,
            "first_k_dense_replace": 0,
            "num_key_value_heads": 1,
            "use_qk_norm": True,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "head_dim": 24,
            "rope_parameters": {"rope_theta": 1e4, "rope_type": "default", "partial_rotary_factor": 0.25},
        },
        brief=True,
    ),
    Case(
        "gpt-oss",
        "GptOssConfig",
        {
            "num_local_experts": 7,
            "num_experts_per_tok": 3,
            "intermediate_size": 21,
            "head_dim": 16,
            "sliding_window": 8,
            "swiglu_limit": 1.5,
        },
        brief=True,
    ),
    Case(
        "gpt-oss-tied",
        "GptOssConfig",
        {
            "num_local_experts": 5,
            "num_experts_per_tok": 5,
            "intermediate_size": 33,
            "num_attention_heads": 6,
            "num_key_value_heads": 3,
            "head_dim": 24,
            "sliding_window": 12,
            "attention_bias": False,
            "swiglu_alpha": 1.1,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_theta": 1e4, "rope_type": "default"},
        },
        brief=True,
    ),
]


@dataclass(frozen=True)
class Reference:
    """A checkpoint on disk and transformers' greedy outputs for some prompts."""

    case: Case
    path: Path
    prompts: list[list[int]]
    tokens: list[list[int]]
    logits: list[torch.Tensor]  # [steps, vocabulary] of each output

    def forced(self) -> list[list[int]]:
        """Return every prompt with each prefix of its output, for teacher forcing."""
        return [p + t[:step] for p, t in zip(self.prompts, self.tokens, strict=True) for step in range(len(t))]

    def prompt_logprobs(self) -> list[torch.Tensor]:
        """Return transformers' log-probabilities after each token of every prompt: [prompt tokens, vocabulary]."""
        model = self._open(torch.float32)
        with torch.no_grad():
            return [
                model(torch.tensor([prompt]), use_cache=False).logits[0].float().log_softmax(1)
                for prompt in self.prompts
            ]

    def _open(self, dtype: torch.dtype) -> transformers.PreTrainedModel:
        config = choose_eager(transformers.AutoConfig.from_pretrained(self.path))
        return transformers.AutoModelForCausalLM.from_pretrained(self.path, config=config, dtype=dtype).eval()

    def bf16_noise(self) -> float:
        """Return the largest difference of transformers' bf16 and fp32 logits over the teacher-forced prompts."""
        model = self._open(torch.bfloat16)
        with torch.no_grad():
            rows = [model(torch.tensor([ids]), use_cache=False).logits[0, -1].float() for ids in self.forced()]
        return (torch.stack(rows) - torch.cat(self.logits)).abs().max().item()


def make_prompts(seed: int, lengths: tuple[int, ...], shared: int) -> list[list[int]]:
    """Return random prompts. Those longer than `shared` have their first `shared` tokens in common."""
    generator = torch.Generator().manual_seed(seed)
    prefix = torch.randint(3, VOCAB, (shared,), generator=generator).tolist()
    prompts = []
    for length in lengths:
        tokens = torch.randint(3, VOCAB, (length,), generator=generator).tolist()
        prompts.append((prefix + tokens)[:length] if length > shared else tokens)
    return prompts


def make_reference(case: Case, folder: Path, seed: int, prompts: list[list[int]], steps: int) -> Reference:
    model = case.build(seed)
    path = folder / f"{case.name}-{seed}"
    model.save_pretrained(path)
    tokens, logits = [], []
    for prompt in prompts:
        out = model.generate(
            torch.tensor([prompt]),
            max_new_tokens=steps,
            do_sample=False,
            use_cache=False,  # with its cache, transformers 5.17 is wrong where Phi-3's factors switch
            output_logits=True,
            return_dict_in_generate=True,
        )
        tokens.append(out.sequences[0, len(prompt) :].tolist())
        logits.append(torch.cat(out.logits).float())
    return Reference(case, path, prompts, tokens, logits)
