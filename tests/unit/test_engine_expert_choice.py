"""Whole experts or slices: what the model of their cost says, and what is chosen."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from yalis.config import EngineConfig
from yalis.engine.expert_choice import ExpertChoice, choose_experts, resolve_experts
from yalis.errors import YalisError
from yalis.moe import MoESpec
from yalis.parallel.plan import Split
from yalis.perfmodel.expert_split import CPU_COSTS, GPU_COSTS, cost_per_token
from yalis.spec import ModelSpec, read_spec

QWEN3_30B: dict[str, Any] = {
    "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48,
    "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8,
    "moe_intermediate_size": 768, "vocab_size": 151936, "max_position_embeddings": 40960,
}  # fmt: skip
MOE = MoESpec(128, 8, 768, (True,), True)


def choose(config: EngineConfig, **changes: Any) -> ExpertChoice:
    spec: ModelSpec = read_spec({**QWEN3_30B, **changes})
    return choose_experts(config, spec, "it", 2, on_gpu=True)


def relative(rows: int, *steps: int) -> float:
    """Return the cost of whole experts over that of slices."""
    whole, slices = (cost_per_token(MOE, 2048, rows, one, 2, steps, GPU_COSTS) for one in (True, False))
    return whole / slices


def test_costs() -> None:
    assert relative(1, 64) == pytest.approx(1)
    # The 8 experts of one token are spread unevenly over the rows. A full step reads all experts of all ranks.
    assert 1.5 < relative(4, 1) < 4
    assert 0.95 < relative(4, 64) < 1.05
    # Slices of 48 take as long as of 64, and each rank moves the rows of all pairs.
    assert relative(16, 2048) < 0.5
    # One row reads each of its experts once.
    read = 128 * 3 * 2048 * 768 * 2
    assert cost_per_token(MOE, 2048, 1, True, 2, (10**6,), CPU_COSTS) > read / 10**6
    single = MoESpec(1, 1, 16, (True,), True)
    assert cost_per_token(single, 16, 1, True, 2, (4,), CPU_COSTS) == cost_per_token(
        single, 16, 1, False, 2, (4,), CPU_COSTS
    )


def test_choices() -> None:
    asked = EngineConfig(tp=(2, 1), expert_parallel=True)
    assert choose(asked) == ExpertChoice(Split(2, expert_parallel=True))
    full = choose(EngineConfig(tp=(16, 1)))
    assert full.split.expert_parallel
    assert full.reason.startswith("whole experts on each rank: modelled ")
    alone = choose(EngineConfig(tp=(16, 1), max_num_seqs=1))
    assert not alone.split.expert_parallel
    assert "more expensive in steps of 1 sequence and of 2048 prompt tokens" in alone.reason
    even = choose(EngineConfig(tp=(2, 1)))
    assert not even.split.expert_parallel
    assert "less than 5% cheaper" in even.reason
    grid = choose(EngineConfig(tp=(16, 2)))
    assert not grid.split.expert_parallel
    assert "16 times the bytes" in grid.reason


def test_one_possibility_leaves_no_choice() -> None:
    narrow = choose(EngineConfig(tp=(16, 1)), moe_intermediate_size=8)
    assert (narrow.split.expert_parallel, narrow.reason) == (
        True, "whole experts on each rank: 16 rows cannot have slices of every expert",
    )  # fmt: skip
    few = choose(EngineConfig(tp=(16, 1)), num_experts=8)
    assert (few.split.expert_parallel, few.reason) == (
        False, "a slice of every expert on each rank: 16 rows for 8 experts",
    )  # fmt: skip
    with pytest.raises(YalisError, match="tp 64 leaves ranks without a shard: it has 32 heads and an MLP width of 768"):
        choose(EngineConfig(tp=(64, 1)))
    with pytest.raises(YalisError, match="tp 64 leaves ranks without a shard: it has 32 heads; give tp 1 to 32"):
        choose(EngineConfig(tp=(64, 1), expert_parallel=True))
    spec = read_spec(QWEN3_30B)
    config = EngineConfig(tp=(16, 1), device="cpu", dtype="bfloat16")
    assert resolve_experts(config, spec, "it").expert_parallel is True
    assert resolve_experts(replace(config, expert_parallel=False), spec, "it").expert_parallel is False
    assert resolve_experts(replace(config, tp=(1, 1)), spec, "it").expert_parallel is False
    one_row = choose(EngineConfig(expert_parallel=True))
    assert not one_row.split.expert_parallel
