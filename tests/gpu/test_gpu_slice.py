"""Slices on a GPU: decode steps are CUDA graphs, as on a rank of a real job, and sample what eager steps do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.unit.test_engine_slice_rank import CONFIG
from yalis.checkpoint.random import RandomCheckpoint
from yalis.config import EngineConfig
from yalis.engine.slice_rank import SliceRank
from yalis.spec import read_spec
from yalis.study.slice import Slice, SlicePlan, measure
from yalis.workloads import Workload

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

SHAPE = {**CONFIG, "hidden_size": 256, "intermediate_size": 330, "head_dim": 64, "vocab_size": 1003}
OUTPUT = 6


@pytest.mark.parametrize(("tp", "pp", "rank"), [((2, 1), 1, 1), ((3, 1), 1, 2), ((5, 1), 1, 4), ((2, 2), 1, 3),
                                                ((2, 1), 3, 0), ((2, 1), 3, 3), ((2, 1), 3, 5)])  # fmt: skip
def test_graphs_and_eager_steps_sample_the_same_tokens(tp: tuple[int, int], pp: int, rank: int) -> None:
    tokens, replays = [], []
    spec = read_spec(SHAPE, "tiny")
    for eager in (False, True):
        config = EngineConfig(
            "tiny", load="random", device="cuda", dtype="float32", kv_blocks=16, max_num_seqs=4, max_model_len=128,
            prefix_reuse=False, eager=eager, tp=tp, pp=pp,
        )  # fmt: skip
        part = Slice(config, rank, spec, RandomCheckpoint(SHAPE, 0, "tiny"))
        assert isinstance(part._ranks, SliceRank)
        vocabulary = part._ranks.runner.vocabulary
        prompts = [list(vocabulary)[i : i + 20] for i in range(3)]
        timing = part._run(prompts, OUTPUT)
        assert len(timing.steps) == OUTPUT - 1
        tokens.append(timing.tokens)
        replays.append(part._ranks.runner.executor.replays)
        part.close()
    assert replays == [OUTPUT - 1, 0]  # the prefill of three prompts runs eagerly
    if pp == 1:  # later stages receive other random hidden states each time
        assert tokens[0] == tokens[1]


def test_several_slices_in_one_process(tmp_path: Path) -> None:
    path = tmp_path / "tiny.json"
    path.write_text(json.dumps(SHAPE))
    plan = SlicePlan(((2, 1), (4, 1)), (Workload(1, 30, OUTPUT), Workload(3, 30, OUTPUT)), repeats=1)
    result = measure(EngineConfig(str(path), device="cuda", dtype="bfloat16"), plan, "yalis bench slice")
    assert [row["status"] for row in result.rows] == ["ok"] * 4
    assert [row["replays"] for row in result.rows] == [OUTPUT, OUTPUT - 1] * 2  # one short prompt is a graph too
    for row in result.rows:
        assert 0 < row["floor_ms"] < row["decode_ms"]
        assert row["host_ms"] > 0
