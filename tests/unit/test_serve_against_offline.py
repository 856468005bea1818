"""`benchmarks/serve_on_one_gpu.sh` with a tiny shape on a CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.system.processes import ROOT, environment
from tests.unit.test_engine_slice_rank import CONFIG
from yalis.study import results


@pytest.mark.full
def test_the_server_is_compared_with_offline_generation(tmp_path: Path) -> None:
    shape = tmp_path / "tiny.json"
    shape.write_text(json.dumps({**CONFIG, "vocab_size": 300}))
    variables = {"MODEL": str(shape), "DTYPE": "float32", "WORK": "6x8x8", "POINTS": "2", "PYTHON": sys.executable}
    variables["FLAGS"] = "--threads 1 --concurrency 3 --least 0"
    done = subprocess.run(
        [str(ROOT / "benchmarks/serve_on_one_gpu.sh"), str(tmp_path / "out")],
        env=environment({**variables, "PATH": os.environ["PATH"]}),
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((tmp_path / "out" / "serve-against-offline.json").read_text())
    assert len(summary["offline_tokens_per_s"]) == len(summary["served_tokens_per_s"]) == 2
    rows = results.read(tmp_path / "out" / "serve.json").rows
    assert [(row["completed"], row["output_tokens"], row["concurrency"]) for row in rows] == [(6, 48, 3)] * 2
