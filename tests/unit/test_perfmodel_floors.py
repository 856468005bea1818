"""Floors against published figures, and against sums computed the slow way."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest

from yalis.perfmodel.floors import ModelDims, decode_work, floor_s, prefill_work

LLAMA_8B = ModelDims(
    hidden=4096, layers=32, heads=32, kv_heads=8, head_dim=128, intermediate=14336, vocab=128256, tied=False
)
SMOLLM2 = ModelDims(
    hidden=576, layers=30, heads=9, kv_heads=3, head_dim=64, intermediate=1536, vocab=49152, tied=True,
    weight_bytes=4, kv_bytes=4,
)  # fmt: skip
H200_READ, H200_FLOPS = 4.65e12, 790e12


def decode_ms(batch: int, context: float) -> float:
    work = decode_work(LLAMA_8B, [context] * batch)
    return 1e3 * floor_s(work.bytes, work.flops, H200_READ, H200_FLOPS)


def test_parameter_counts_match_the_published_ones() -> None:
    assert LLAMA_8B.params == 8_030_261_248
    assert SMOLLM2.params == 134_515_008


@pytest.mark.parametrize(
    ("batch", "context", "milliseconds"),
    [(1, 128, 3.23), (16, 256, 3.34), (16, (2480 + 2990) / 2, 4.46), (64, 512 + 128, 4.4)],
)
def test_decode_floors_of_llama_8b_on_an_h200(batch: int, context: float, milliseconds: float) -> None:
    assert decode_ms(batch, context) == pytest.approx(milliseconds, rel=0.005)


def prefill_s(lengths: list[int]) -> float:
    work = prefill_work(LLAMA_8B, lengths)
    return floor_s(work.bytes, work.flops, H200_READ, H200_FLOPS)


def test_prefill_floors_of_llama_8b_on_an_h200() -> None:
    assert prefill_s([2480] * 16) == pytest.approx(0.74, rel=0.01)
    assert prefill_s([16]) == pytest.approx(
        1e-3 * decode_ms(1, 0), rel=1e-4
    )  # short prompts are bound by reading the weights


def test_floor_of_a_whole_job() -> None:
    prefill = prefill_s([2480] * 16)
    decode = sum(decode_ms(16, 2480 + step) for step in range(2048)) / 1e3
    assert prefill + decode == pytest.approx(10.6, rel=0.005)


QWEN3_30B_A3B = ModelDims(
    hidden=2048, layers=48, heads=32, kv_heads=4, head_dim=128, intermediate=6144, vocab=151936, tied=False,
    qk_norm=True, expert_layers=48, experts=128, top_k=8, routed_experts=128, expert_width=768,
)  # fmt: skip


def test_experts_of_qwen3_30b_a3b() -> None:
    """30.5 billion parameters, of which 3.3 billion serve a token; a step reads those that its tokens reach."""
    dims = QWEN3_30B_A3B
    assert dims.params == 30_532_122_624
    assert dims.active_params + 2 * dims.table_params + dims.small_params == pytest.approx(3.35e9, rel=0.01)
    one = decode_work(dims, [0])
    assert one.weight_bytes == 2 * (dims.active_params + dims.head_params + dims.small_params + dims.hidden)
    assert 1e3 * floor_s(one.bytes, one.flops, H200_READ, H200_FLOPS) == pytest.approx(1.31, rel=0.01)
    assert decode_work(dims, [0] * 2).flops == 2 * one.flops
    two, many = dims.read_params(2) - dims.active_params, dims.matrix_params - dims.active_params
    assert two == pytest.approx(many / 120 * 8 * (1 - 8 / 128))  # 8 more of the other 120, unless both chose them
    assert dims.read_params(1000) == pytest.approx(dims.matrix_params)


def test_smollm2_reads_538_megabytes_per_step() -> None:
    work = decode_work(SMOLLM2, [0])
    assert work.bytes == pytest.approx(538e6, rel=0.001)
    assert work.weight_bytes == SMOLLM2.params * 4  # tied: the table is read once, as lm_head
    assert 1e3 * floor_s(work.bytes, work.flops, 26.8e9, 1e15) == pytest.approx(20, rel=0.01)


def test_decode_becomes_compute_bound_near_170_sequences() -> None:
    def is_memory_bound(batch: int) -> bool:
        work = decode_work(LLAMA_8B, [0] * batch)
        return work.bytes / H200_READ > work.flops / H200_FLOPS

    assert is_memory_bound(165)
    assert not is_memory_bound(175)


def test_an_untied_embedding_table_costs_only_the_rows_looked_up() -> None:
    tied = dataclasses.replace(LLAMA_8B, tied=True)
    more = decode_work(LLAMA_8B, [10] * 3).weight_bytes - decode_work(tied, [10] * 3).weight_bytes
    assert more == 3 * 4096 * 2
    assert LLAMA_8B.params - tied.params == 128256 * 4096


def test_prefill_computes_lm_head_for_sampled_rows_only() -> None:
    per_row = 2 * 128256 * 4096
    assert prefill_work(LLAMA_8B, [7, 9]).flops - prefill_work(LLAMA_8B, [7, 9], sampled_rows=0).flops == 2 * per_row


@pytest.mark.parametrize("window", [None, 1, 5, 12, 40])
def test_attention_counts_each_visible_pair(window: int | None) -> None:
    dims = dataclasses.replace(SMOLLM2, windows=(window,) * 30)
    pairs = sum(q - k < (window or 99) for q in range(12) for k in range(q + 1))
    without = 2 * dims.matrix_params * 12
    assert prefill_work(dims, [12], sampled_rows=0).flops - without == 4 * 9 * 64 * 30 * pairs
    assert decode_work(dims, [12]).kv_bytes == min(12, window or 12) * 2 * 30 * 3 * 64 * 4


def test_parameter_counts_of_all_families_match_transformers() -> None:
    import torch
    from transformers import (
        AutoModelForCausalLM,
        Gemma2Config,
        Glm4MoeConfig,
        GptOssConfig,
        GraniteConfig,
        LlamaConfig,
        MixtralConfig,
        OlmoeConfig,
        Phi3Config,
        Qwen2Config,
        Qwen2MoeConfig,
        Qwen3Config,
        Qwen3MoeConfig,
    )

    from yalis.spec import read_spec

    sizes = {
        "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "intermediate_size": 96, "vocab_size": 101, "head_dim": 16, "pad_token_id": 0,
    }  # fmt: skip
    kinds = (LlamaConfig, Gemma2Config, Phi3Config, Qwen2Config, Qwen3Config, GraniteConfig)
    configs = [kind(**sizes) for kind in kinds]
    experts = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "mlp_only_layers": [1]}
    experts["shared_expert_intermediate_size"] = 40
    configs += [kind(**sizes, **experts) for kind in (MixtralConfig, OlmoeConfig, Qwen2MoeConfig, Qwen3MoeConfig)]
    experts = {"num_local_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    configs.append(GptOssConfig(**sizes, **experts))
    configs.append(Glm4MoeConfig(**sizes, **experts, n_shared_experts=2, use_qk_norm=True))
    configs.append(LlamaConfig(**sizes, attention_bias=True, mlp_bias=True, tie_word_embeddings=True))
    for config in configs:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        fields = config.to_dict() | {"architectures": [type(model).__name__]}
        weights = [*model.parameters(), *(b for name, b in model.named_buffers() if name.endswith("correction_bias"))]
        assert ModelDims.of(read_spec(fields), 2, 2).params == sum(weight.numel() for weight in weights), config


def test_floors_do_not_import_torch() -> None:
    code = "import sys, yalis.perfmodel.floors; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
