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
    joined: bool = False,
) -> Path:
    """Write a model. `kind`: type of its matrices, `extra`: more metadata, `factors`: RoPE tensors by GGUF name.

    `joined`: write gate and up of the experts as one tensor.
    """
    config = model.config
    family = _ARCHITECTURES.get(config.model_type, config.model_type)
    arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == family)
    writer = gguf.GGUFWriter(path, family)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_rope_dimension_count(int(head_dim * config.rope_parameters.get("partial_rotary_factor", 1.0)))
    if family in ("qwen3", "gemma2", "llama", "qwen3moe", "glm4moe", "gpt-oss"):
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    if family in ("gemma2", "phi3", "llama", "gpt-oss") and getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
    if family == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if family == "granite":
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    if hasattr(config, "num_experts_per_tok"):
        _add_experts(writer, config, family)
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

    stored_names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    for name, weight in _split_gate_up(model.state_dict(), family, joined).items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = weight.float().numpy()
        if family in ("llama", "granite") and ".q_proj." in name:
            values = interleave_heads(values, config.num_attention_heads)
        if family in ("llama", "granite") and ".k_proj." in name:
            values = interleave_heads(values, config.num_key_value_heads)
        if family == "gemma2" and name.endswith("norm.weight"):
            values = values + np.float32(1)
        if joined and ".gate_up_proj" in name:  # not in the package's table of every architecture
            stored = f"blk.{name.split('.')[2]}.ffn_gate_up_exps.{name.rpartition('.')[2]}"
        else:
            stored = stored_names.get_name(name, try_suffixes=(".weight", ".bias"))
        if name.endswith("shared_expert_gate.weight"):
            values = values[0]  # llama.cpp drops dimensions of size 1
        matrix = values.ndim > 1 and not name.endswith(".bias")
        as_kind = kind if matrix else gguf.GGMLQuantizationType.F32
        writer.add_tensor(stored, gguf.quantize(np.ascontiguousarray(values), as_kind), raw_dtype=as_kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


#: llama.cpp's name of an architecture, where it differs from model_type.
_ARCHITECTURES = {
    "mistral": "llama", "mixtral": "llama", "qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe", "glm4_moe": "glm4moe",
    "gpt_oss": "gpt-oss",
}  # fmt: skip


def _add_experts(writer: gguf.GGUFWriter, config: transformers.PreTrainedConfig, family: str) -> None:
    """Write the metadata of a mixture of experts."""
    writer.add_expert_count(config.num_local_experts if hasattr(config, "num_local_experts") else config.num_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    if family in ("qwen2moe", "qwen3moe", "glm4moe"):
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if family == "qwen2moe":
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    if family == "glm4moe":
        writer.add_expert_shared_count(config.n_shared_experts)
        writer.add_leading_dense_block_count(config.first_k_dense_replace)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        writer.add_expert_weights_scale(config.routed_scaling_factor)
        writer.add_expert_weights_norm(config.norm_topk_prob)
    if family == "gpt-oss":
        writer.add_expert_feed_forward_length(config.intermediate_size)
        rope = config.rope_parameters
        if rope["rope_type"] == "yarn":
            writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
            writer.add_rope_scaling_factor(rope["factor"])
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])


def _split_gate_up(state: dict[str, torch.Tensor], family: str, joined: bool) -> dict[str, torch.Tensor]:
    """Return the tensors with the names that llama.cpp's converter maps, fused experts as gate, up and down."""
    found: dict[str, torch.Tensor] = {}
    for name, value in state.items():
        if name.endswith(".sinks"):
            found[f"{name}.weight"] = value
            continue
        if name.endswith("e_score_correction_bias"):
            found[f"{name.removesuffix('_bias')}.bias"] = value
            continue
        if ".mlp.experts." not in name:
            found[name] = value
            continue
        is_bias = name.endswith("_bias")
        base = name.removesuffix("_bias")
        suffix = "bias" if is_bias else "weight"
        if family == "gpt-oss" and not is_bias:
            value = value.transpose(1, 2)
        if base.endswith("gate_up_proj"):
            halves = (value[:, ::2], value[:, 1::2]) if family == "gpt-oss" else value.chunk(2, dim=1)
            if joined:
                found[f"{base}.{suffix}"] = torch.cat(halves, dim=1)
                continue
            for part, half in zip(("gate_proj", "up_proj"), halves, strict=True):
                found[f"{base.removesuffix('gate_up_proj')}{part}.{suffix}"] = half
        else:
            found[f"{base}.{suffix}"] = value
    return found


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


def fuse_experts(tensors: dict[str, torch.Tensor], model: transformers.PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return tensors of a checkpoint with one matrix per expert under the names and in the layout of `model`."""
    found: dict[str, torch.Tensor] = {}
    experts: dict[str, dict[tuple[str, int], torch.Tensor]] = {}
    parts = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
    for name, value in tensors.items():
        name = name.replace("block_sparse_moe", "mlp")
        prefix, _, rest = name.partition(".experts.")
        if not rest:
            found[name] = value
            continue
        number, part, kind = rest.split(".")
        suffix = "" if kind == "weight" else "_bias"
        experts.setdefault(f"{prefix}.experts", {})[parts.get(part, part) + suffix, int(number)] = value
    for prefix, matrices in experts.items():
        count = 1 + max(number for _, number in matrices)
        stacks = {
            part: torch.stack([matrices[part, number] for number in range(count)]) for part, n in matrices if n == 0
        }
        for suffix in {"_bias" if part.endswith("_bias") else "" for part in stacks}:
            gate, up, down = (stacks[f"{part}_proj{suffix}"] for part in ("gate", "up", "down"))
            gate_up = torch.cat((gate, up), dim=1)
            if model.config.model_type == "gpt_oss":
                gate_up = torch.stack((gate, up), dim=2).flatten(1, 2)
                if not suffix:
                    gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
            found[f"{prefix}.gate_up_proj{suffix}"], found[f"{prefix}.down_proj{suffix}"] = gate_up, down
    return found
