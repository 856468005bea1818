"""A scaling study as Slurm jobs: write the scripts, submit them to a real Slurm and gather the results."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.launchers.slurm import Slurm
from yalis.cli.main import main
from yalis.study import results


def test_a_study_as_slurm_jobs(slurm: Slurm, model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["bench", "scaling", "--out", str(tmp_path / "study"), "--ranks", "2", "--schemes", "tp"]
    args += ["--allreduce", "torch,mpi", "--workload", "2x6x4", "--repeats", "2", "--warmup", "0", "--threads", "1"]
    args += ["--device", "cpu", "--model", model, "--cpus-per-task", "1", "--sbatch=--partition=all"]
    assert main([*args, "--slurm", str(tmp_path / "scripts")]) == 0
    assert f"wrote 2 scripts; type `bash {tmp_path}/scripts/submit.sh`" in capsys.readouterr().err
    # This Slurm has no PMIx, so the MPI job fails; the study is summarized without it.
    (tmp_path / "scripts" / "tp2-mpi.sh").write_text("#!/bin/bash\n#SBATCH --output=/dev/null\nexit 1\n")
    submitted = slurm.run(["bash", str(tmp_path / "scripts" / "submit.sh")])
    assert submitted.returncode == 0, submitted.stderr
    deadline = time.monotonic() + 120
    while slurm.run(["squeue", "--noheader"]).stdout.strip():
        assert time.monotonic() < deadline
        time.sleep(0.2)
    log = (tmp_path / "study" / "tp2-torch" / "log.txt").read_text()
    assert main([*args, "--gather"]) == 1, log
    (path,) = (tmp_path / "study").glob("scaling-*.json")
    measured, missing = results.read(path).rows
    assert (measured["status"], measured["ranks"], measured["hosts"], measured["speedup"]) == ("ok", 2, 1, 1.0), log
    assert missing["status"] == "no result yet"
