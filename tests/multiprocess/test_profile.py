"""`yalis profile` over real ranks: each profiles itself, and rank 0 reports."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.families import CASES
from yalis.cli.main import main
from yalis.study import results
from yalis.study.results.kinds.profile import CATEGORIES


def test_every_rank_is_profiled(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # Two stages of two ranks: collectives within a stage, and sends between stages that outlive the profiler.
    (case,) = (case for case in CASES if case.name == "olmoe")
    case.build(seed=1).save_pretrained(tmp_path / "model")
    model, tmp_path = tmp_path / "model", tmp_path / "results"
    args = f"profile --tp 2 --pp 2 --allreduce torch --workload 4x12x9 --steps 4 --warmup 0 --repeats 2 --model {model}"
    args += " --expert-parallel"
    assert main([*args.split(), "--threads", "1", "--device", "cpu", "--out", str(tmp_path)]) == 0
    out, _ = capsys.readouterr()
    (path,) = tmp_path.iterdir()
    result = results.read(path)
    assert [(row["phase"], row["rank"]) for row in result.rows] == [
        (phase, rank) for phase in ("prefill", "decode") for rank in range(4)
    ]
    for row in result.rows:
        assert row["communication_ms"] > 0
        assert row["matmul_ms"] > 0
        assert row["ms"] == pytest.approx(sum(row[f"{category}_ms"] for category in CATEGORIES))
        assert 0.5 < row["accounted"] < 1.5  # roughly right even on a busy machine
    # A token for every sequence takes as long on one rank as on another.
    decode = [row["ms"] for row in result.rows if row["phase"] == "decode"]
    assert max(decode) < 1.5 * min(decode)
    assert {one["part"] for one in result.parameters["over_ranks"]} == {"all", *CATEGORIES}
    assert result.parameters["split"] == "tp2-pp2 ep torch"
    assert result.topology is not None
    assert result.topology["ranks"] == 4
    assert "max/mean" in out
    # The first stage has one layer, whose routers choose 4 experts for each token of the prompts.
    assert result.rows[0]["expert_pairs"] + result.rows[1]["expert_pairs"] == 2 * 4 * 12 * 4
    assert all(row["expert_pairs"] for row in result.rows)
    assert "expert load of each rank, over the mean: " in out
    table = results.kind_of(result).table(result)
    assert table.columns[-1].head == "expert load"
