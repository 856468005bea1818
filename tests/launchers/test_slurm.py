"""The Slurm the tests start is a real one: what ranks are found from is what `srun` sets."""

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


def test_each_task_of_a_step_has_its_place(slurm: Slurm, host: str) -> None:
    step = slurm.run(["srun", "--ntasks=4", *SHOW])
    assert step.returncode == 0, step.stderr
    assert sorted(step.stdout.splitlines()) == [f"{rank} {rank} 0 4 {host}" for rank in range(4)]


def test_a_batch_script_is_no_step_and_its_steps_are(slurm: Slurm, host: str) -> None:
    script = slurm.folder / "steps.sh"
    show = f"{SHOW[0]} {SHOW[1]} '{SHOW[2]}'"
    script.write_text(f"#!/bin/bash\n#SBATCH --ntasks=2\n{show}\nsrun --quiet {show}\n")
    first, *step = slurm.batch(script).splitlines()
    assert first == "0 0 none none none"  # SLURM_PROCID alone does not mean that srun started a process
    assert sorted(step) == [f"{rank} {rank} 0 2 {host}" for rank in (0, 1)]


def test_nothing_is_left_when_slurm_ends() -> None:
    with Slurm() as short:
        folder = short.folder
        waiting = f"tail -f {folder}/slurm.conf"
        submitted = short.run(["sbatch", "--output=none", "--ntasks=2", f"--wrap=srun {waiting}"])
        assert submitted.returncode == 0, submitted.stderr
        end = time.monotonic() + 30
        while sum(command.endswith(f"bin/{waiting}") for command in commands()) < 2:
            assert time.monotonic() < end, "the job did not start"
            time.sleep(0.1)
    assert not [command for command in commands() if str(folder) in command]
    assert not folder.exists()
