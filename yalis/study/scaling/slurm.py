"""Slurm job scripts for the settings of a scaling study."""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from yalis.config import EngineConfig
from yalis.errors import YalisError, YalisFailure
from yalis.launch.launchers import SRUN
from yalis.study.scaling.local_jobs import make_folder
from yalis.study.scaling.settings import LOG, ScalingPlan, Setting, command_line, command_words
from yalis.study.scaling.summary import find_result


@dataclass(frozen=True)
class SlurmPlan:
    """How the scripts ask for nodes."""

    cpus_per_task: int = 8
    gpus: bool = True  # one for each rank
    options: tuple[str, ...] = ()  # further words for sbatch, such as --partition=gpu

    def __post_init__(self) -> None:
        if self.cpus_per_task < 1:
            raise YalisError(f"cpus_per_task is {self.cpus_per_task}; give a whole number of at least 1")


def write_scripts(
    config: EngineConfig, plan: ScalingPlan, slurm: SlurmPlan, settings: Sequence[Setting], folder: Path
) -> list[Path]:
    """A job script for each setting without a result, and one that submits them all; returns that one last."""
    missing = [setting for setting in settings if find_result(config, plan, setting) is None]
    make_folder(folder)
    scripts = []
    for setting in missing:
        make_folder(plan.folder / setting.folder)  # Slurm makes no folder for a job's output
        path = folder / f"{setting.folder}.sh"
        _write(path, _script(config, plan, slurm, setting))
        scripts.append(path)
    lines = ["#!/bin/bash", "# Submits every setting of the study.", "set -e"]
    lines += [f"sbatch {shlex.quote(str(path.resolve()))}" for path in scripts]
    _write(folder / "submit.sh", "\n".join(lines) + "\n")
    return [*scripts, folder / "submit.sh"]


def _script(config: EngineConfig, plan: ScalingPlan, slurm: SlurmPlan, setting: Setting) -> str:
    there = replace(plan, folder=plan.folder.resolve())
    nodes = -(-setting.ranks // plan.node_ranks)
    per_node = -(-setting.ranks // nodes)
    minutes = math.ceil(plan.minutes)
    asked = [
        f"--job-name=yalis-{setting.folder}",
        f"--nodes={nodes}",
        f"--ntasks={setting.ranks}",
        f"--ntasks-per-node={per_node}",
        *([f"--gpus-per-node={per_node}"] if slurm.gpus else []),
        f"--cpus-per-task={slurm.cpus_per_task}",
        f"--time={minutes // 60:02}:{minutes % 60:02}:00",
        f"--output={shlex.quote(str(there.folder / setting.folder / LOG))}",
        *slurm.options,
    ]
    srun, mpi = [SRUN.name], []
    if setting.allreduce == "mpi":  # mpi4py has to be told by srun who its ranks are
        srun, mpi = [SRUN.name, "--mpi=pmix"], ["# CHANGE --mpi to what `srun --mpi=list` offers for the site's MPI."]
    words = shlex.join([*srun, sys.executable, "-m", "yalis", *command_words(config, there, setting)])
    return "\n".join(
        [
            "#!/bin/bash",
            f"# {setting.folder}: {plan.work.work} on {setting.ranks} ranks.",
            *(f"#SBATCH {one}" for one in asked),
            "",
            "# CHANGE where your site asks for modules, or nodes have several networks:",
            "# module load cuda",
            "# export NCCL_SOCKET_IFNAME=hsn GLOO_SOCKET_IFNAME=hsn0",
            "# Since Slurm 22.05 srun no longer takes this from the job.",
            "export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK",
            f"cd {shlex.quote(str(Path.cwd()))} || exit",
            "",
            f"echo {shlex.quote(command_line(config, plan, setting))}",
            *mpi,
            words,
            "",
        ]
    )


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text)
        path.chmod(0o755)
    except OSError as error:
        raise YalisFailure(f"cannot write {path}: {error.strerror}; give another folder") from error
