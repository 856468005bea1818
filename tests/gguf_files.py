"""Writes transformers models as GGUF files, like llama.cpp's converter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers

from tests.families import Case

#: Sizes of a tiny model, with 12 dimensions per head.
SIZES = {
    "vocab_size": 251,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TINY = Case("tiny", "LlamaConfig", {**SIZES, "tie_word_embeddings": True})


def interleave_heads(weight: np.ndarray, heads: int) -> np.ndarray:
    """Return the rows of each head in llama.cpp's order, which its RoPE requires."""
    return weight.reshape(heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(
    path: Path,
    model: transformers.PreTrainedModel,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    tokens: list[str] | None = None,
    merges: list[str] | None = None,
    extra: dict[str, Any] | None = None,
    factors: dict[str, list[float]] | None = None,
) -> Path:
    """Write a model. `kind`: type of its matrices, `extra`: more metadata, `factors`: RoPE tensors by GGUF name."""
    config = model.config
    renamed = {"mistral": "llama", "gemma3_text": "gemma3", "olmo3": "olmo2"}
    family = renamed.get(config.model_type, config.model_type)
    rope = config.rope_parameters
    full, sliding = rope.get("full_attention", rope), rope.get("sliding_attention")
    arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == family)
    writer = gguf.GGUFWriter(path, family)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(full["rope_theta"])
    if sliding is not None:
        writer.add_rope_freq_base_swa(sliding["rope_theta"])
    if full["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(full["rope_type"]))
        writer.add_rope_scaling_factor(full["factor"])
    if full["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(full["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_attn_factor(full["attention_factor"])
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_rope_dimension_count(int(head_dim * full.get("partial_rotary_factor", 1.0)))
    if family in ("qwen3", "gemma2", "gemma3", "llama", "smollm3", "glm4", "seed_oss", "arcee", "ernie4_5"):
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    if family in ("gemma2", "gemma3", "phi3", "llama", "olmo2", "exaone4") and getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
        if family in ("olmo2", "exaone4"):
            writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
    if family == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
    if family in ("gemma2", "gemma3") and config.final_logit_softcapping:
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if family == "granite":
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    if tokens is not None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("default")
        writer.add_token_list(tokens)
        writer.add_token_types([3 if token.startswith("<|") else 1 for token in tokens])
        writer.add_token_merges(merges or [])
    for key, value in {"tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2, **(extra or {})}.items():
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        add[type(value)](key, value)
    for name, values in (factors or {}).items():
        writer.add_tensor(f"{name}.weight", np.array(values, dtype=np.float32))

    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = weight.float().numpy()
        interleaved = family in ("llama", "granite", "smollm3", "arcee")
        if interleaved and ".q_proj." in name:
            values = interleave_heads(values, config.num_attention_heads)
        if interleaved and ".k_proj." in name:
            values = interleave_heads(values, config.num_key_value_heads)
        if family in ("gemma2", "gemma3") and name.endswith("norm.weight"):
            values = values + np.float32(1)
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        as_kind = kind if values.ndim > 1 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(stored, gguf.quantize(np.ascontiguousarray(values), as_kind), raw_dtype=as_kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_matrix(path: Path, data: np.ndarray, kind: gguf.GGMLQuantizationType, hidden: int) -> Path:
    """Write a file with one encoded matrix, and the metadata needed to open it as a Llama."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(hidden)
    writer.add_block_count(1)
    writer.add_feed_forward_length(64)
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tensor("token_embd.weight", data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def read_all(checkpoint: Any) -> dict[str, torch.Tensor]:
    """Return all tensors of a checkpoint by name."""
    tensors = {}
    for name in checkpoint.names():
        lazy = checkpoint.find(name)
        tensors[name] = torch.full(lazy.shape, torch.nan)
        lazy.read_into(tensors[name])
    return tensors
