"""Target: config.json, for every family and RoPE scaling."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

from tests.fuzz.mutations import mutate_json_text
from tests.fuzz.target import SIZES, open_model
from yalis.families import FAMILIES

_ROPE: tuple[dict[str, Any], ...] = (
    {"rope_theta": 1e4},
    {"rope_scaling": {"type": "linear", "factor": 2.0}},
    {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "beta_fast": 32, "beta_slow": 1}},
    {
        "rope_scaling": {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        }
    },
    {
        "rope_scaling": {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4},
        "original_max_position_embeddings": 32,
    },
)  # fmt: skip
_FAMILY: dict[str, dict[str, Any]] = {
    "MistralForCausalLM": {"sliding_window": 16},
    "Qwen2ForCausalLM": {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1},
    "Gemma2ForCausalLM": {
        "sliding_window": 16, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0, "layer_types": ["sliding_attention", "full_attention"],
    },
    "Phi3ForCausalLM": {"sliding_window": None, "partial_rotary_factor": 1.0},
    "GraniteForCausalLM": {
        "attention_multiplier": 0.1, "embedding_multiplier": 12.0, "residual_multiplier": 0.2, "logits_scaling": 3.0,
    },
}  # fmt: skip


def make_config(rng: Random) -> dict[str, Any]:
    """Return a valid config.json."""
    architecture = rng.choice(list(FAMILIES))
    return {
        "architectures": [architecture],
        "model_type": FAMILIES[architecture].name,
        **SIZES,
        **rng.choice(_ROPE),
        **_FAMILY.get(architecture, {}),
        **rng.choice(({}, {}, {"quantization_config": {"quant_method": "gptq", "bits": 4}})),
    }


class ConfigTarget:
    name = "config.json"

    def make(self, rng: Random) -> bytes:
        return mutate_json_text(make_config(rng), rng)

    def run(self, data: bytes, folder: Path) -> None:
        (folder / "config.json").write_bytes(data)
        open_model(folder, load="random")
