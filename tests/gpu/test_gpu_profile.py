"""A profile on a GPU: kernels inside CUDA graphs are seen, belong to their steps, and add up to the wall time."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from yalis.config import EngineConfig
from yalis.perfmodel.timeline import categorize
from yalis.study.profile import TOLERANCE, ProfilePlan, measure
from yalis.workloads import Workload

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

SHAPE = Path(__file__).parents[2] / "benchmarks" / "shapes" / "llama-3.2-1b.json"
LAYERS = 16
# All prompts in one step, long enough that kernels and not their launches set its time.
PROMPT = 2048
CONFIG = EngineConfig(
    model=str(SHAPE), load="random", dtype="bfloat16", device="cuda", max_batch_tokens=8 * PROMPT, max_model_len=4096
)
PLAN = ProfilePlan(Workload(8, PROMPT, 96), steps=32, repeats=2)


@pytest.mark.parametrize("eager", [False, True])
def test_the_parts_of_a_step(eager: bool) -> None:
    result = measure(replace(CONFIG, eager=eager), PLAN, "a test")
    for row in result.rows:
        print(row)  # shown in the test log
        assert row["accounted"] == pytest.approx(1, abs=TOLERANCE)
        assert row["matmul_ms"] > row["attention_ms"] > 0
        assert row["communication_ms"] == 0
    print({name: result.parameters[name] for name in ("unprofiled_decode_ms", "profiling_overhead")})
    prefill, decode = result.rows
    assert (prefill["steps"], decode["steps"]) == (2, 64)
    assert prefill["idle_ms"] < 0.5 * prefill["ms"]
    if not eager:
        assert decode["idle_ms"] < 0.3 * decode["ms"]
        assert abs(result.parameters["profiling_overhead"]) < 0.3
    names = result.parameters["names"]
    for phase, (found,) in names.items():
        for one in found:
            print(phase, one)
            assert one["category"] == categorize(one["name"], True)
    steps = PLAN.counted_steps + 1
    attention = sum(one["count"] for one in names["decode"][0] if one["category"] == "attention")
    matmul = sum(one["count"] for one in names["decode"][0] if one["category"] == "matmul")
    # Every layer's kernels in every step, none of another step's; the last step may have begun one more.
    assert steps * LAYERS <= attention <= 2 * (steps + 1) * LAYERS
    assert steps * (4 * LAYERS + 1) <= matmul <= 2 * (steps + 1) * (4 * LAYERS + 1)
    assert asdict(result)["notes"] == []
