"""The command line under Slurm."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.launchers.launch import YALIS
from tests.launchers.slurm import Slurm
from tests.system.processes import ROOT
from yalis import LLM, SamplingParams

PROMPT = "The capital of France is"


def test_srun_prints_the_text_of_one_rank_once(slurm: Slurm) -> None:
    with LLM(dtype="float32") as llm:
        (expected,) = llm.generate(PROMPT, SamplingParams(max_tokens=8))
    assert expected.text.startswith(" Paris")
    step = slurm.run(
        ["srun", "--ntasks=2", YALIS, "generate", "--tp", "2", "--dtype", "float32", "--max-tokens", "8", PROMPT]
    )
    assert step.returncode == 0, step.stderr
    assert step.stdout == expected.text + "\n"


def test_bench_allreduce_under_srun(slurm: Slurm) -> None:
    argv = ["--sizes", "8K", "--repeats", "3", "--device", "cpu", "--backends", "torch,hierarchical", "--json"]
    step = slurm.run(["srun", "--ntasks=2", YALIS, "bench", "allreduce", *argv])
    assert step.returncode == 0, step.stderr
    rows = json.loads(step.stdout)["rows"]
    assert {row["backend"] for row in rows} == {"torch", "hierarchical"}
    assert all(row["status"] == "ok" and row["median_us"] > 0 for row in rows)


@pytest.mark.parametrize("script", sorted((ROOT / "slurm").glob("*.sh")), ids=lambda path: path.stem)
def test_slurm_accepts_the_job_scripts(slurm: Slurm, script: Path) -> None:
    # With fewer nodes and cores than they request, to fit the test cluster.
    checked = slurm.run(["sbatch", "--test-only", "--nodes=1", "--cpus-per-task=1", str(script)])
    assert checked.returncode == 0, checked.stderr
