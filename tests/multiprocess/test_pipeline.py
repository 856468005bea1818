"""The measured pipeline bubble matches the formula, and micro-batches make it smaller."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.families import CASES

ROOT = Path(__file__).parents[2]


@pytest.mark.full
def test_idle_share_of_four_stages(tmp_path):
    case = replace(CASES[0], options={**CASES[0].options, "num_hidden_layers": 4})
    case.build(1).save_pretrained(tmp_path / "model")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
    command += [str(Path(__file__).with_name("run_pipeline.py")), str(tmp_path / "model"), str(tmp_path / "out.json")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert [row["micro_batches"] for row in rows] == [1, 2, 4, 8]
    for row in rows:
        assert row["ideal_idle_share"] == 3 / (row["micro_batches"] + 3)
        assert abs(row["idle_share"] - row["ideal_idle_share"]) < 0.1, row
    assert rows[2]["seconds"] < rows[1]["seconds"] < rows[0]["seconds"]
