"""The Slurm of the tests is a real one: srun sets the variables from which ranks are detected."""

from __future__ import annotations

import socket
import time

import pytest

from tests.launchers.slurm import Slurm
from tests.system.processes import commands

NAMES = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST")
SHOW = ["sh", "-c", "echo " + " ".join(f"${{{name}-none}}" for name in NAMES)]


@pytest.fixture(scope="module")
def host() -> str:
    return socket.gethostname().split(".")[0]


def test_srun_numbers_the_tasks_of_a_step(slurm: Slurm, host: str) -> None:
    step = slurm.run(["srun", "--ntasks=4", *SHOW])
    assert step.returncode == 0, step.stderr
    assert sorted(step.stdout.splitlines()) == [f"{rank} {rank} 0 4 {host}" for rank in range(4)]


def test_a_batch_script_is_not_a_step_but_its_sruns_are(slurm: Slurm, host: str) -> None:
    script = slurm.folder / "steps.sh"
    show = f"{SHOW[0]} {SHOW[1]} '{SHOW[2]}'"
    script.write_text(f"#!/bin/bash\n#SBATCH --ntasks=2\n{show}\nsrun --quiet {show}\n")
    first, *step = slurm.batch(script).splitlines()
    assert first == "0 0 none none none"  # SLURM_PROCID alone does not mean that srun started a process
    assert sorted(step) == [f"{rank} {rank} 0 2 {host}" for rank in (0, 1)]


def test_no_process_is_left_after_slurm_ends() -> None:
    with Slurm() as slurm:
        folder = slurm.folder
        waiting = f"tail -f {folder}/slurm.conf"
        submitted = slurm.run(["sbatch", "--output=none", "--ntasks=2", f"--wrap=srun {waiting}"])
        assert submitted.returncode == 0, submitted.stderr
        end = time.monotonic() + 30
        while sum(command.endswith(f"bin/{waiting}") for command in commands()) < 2:
            assert time.monotonic() < end, "the job did not start"
            time.sleep(0.1)
    assert not [command for command in commands() if str(folder) in command]
    assert not folder.exists()
