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
from yalis.study.scaling.settings import LOG, ScalingPlan, Setting, command_args, command_line
from yalis.study.scaling.summary import find_result


@dataclass(frozen=True)
class SlurmPlan:
    """The resources that the job scripts request."""

    cpus_per_task: int = 8
    gpus: bool = True  # one per rank
    options: tuple[str, ...] = ()  # further sbatch options, such as --partition=gpu

    def __post_init__(self) -> None:
        if self.cpus_per_task < 1:
            raise YalisError(f"--cpus-per-task is {self.cpus_per_task}; give a whole number of at least 1")


def write_scripts(
    config: EngineConfig, plan: ScalingPlan, slurm: SlurmPlan, settings: Sequence[Setting], folder: Path
) -> list[Path]:
    """Write a job script for each setting without a result, and submit.sh, which is the last path returned."""
    missing = [setting for setting in settings if find_result(config, plan, setting) is None]
    make_folder(folder)
    scripts = []
    for setting in missing:
        make_folder(plan.folder / setting.folder)  # Slurm does not create the folder of --output
        path = folder / f"{setting.folder}.sh"
        _write(path, _script(config, plan, slurm, setting))
        scripts.append(path)
    lines = ["#!/bin/bash", "# Submits every setting of the study.", "set -e"]
    lines += [f"sbatch {shlex.quote(str(path.resolve()))}" for path in scripts]
    _write(folder / "submit.sh", "\n".join(lines) + "\n")
    return [*scripts, folder / "submit.sh"]


def _script(config: EngineConfig, plan: ScalingPlan, slurm: SlurmPlan, setting: Setting) -> str:
    plan = replace(plan, folder=plan.folder.resolve())
    nodes = -(-setting.ranks // plan.node_ranks)
    per_node = -(-setting.ranks // nodes)
    minutes = math.ceil(plan.minutes)
    options = [
        f"--job-name=yalis-{setting.folder}",
        f"--nodes={nodes}",
        f"--ntasks={setting.ranks}",
        f"--ntasks-per-node={per_node}",
        *([f"--gpus-per-node={per_node}"] if slurm.gpus else []),
        f"--cpus-per-task={slurm.cpus_per_task}",
        f"--time={minutes // 60:02}:{minutes % 60:02}:00",
        f"--output={shlex.quote(str(plan.folder / setting.folder / LOG))}",
        *slurm.options,
    ]
    srun, mpi = [SRUN.name], []
    if setting.allreduce == "mpi":  # srun must set up PMI for mpi4py
        srun, mpi = [SRUN.name, "--mpi=pmix"], ["# CHANGE --mpi to a type of `srun --mpi=list` that suits your MPI."]
    command = shlex.join([*srun, sys.executable, "-m", "yalis", *command_args(config, plan, setting)])
    return "\n".join(
        [
            "#!/bin/bash",
            f"# {setting.folder}: {plan.throughput.description} on {setting.ranks} ranks.",
            *(f"#SBATCH {one}" for one in options),
            "",
            "# CHANGE if your site needs modules, or its nodes have several network interfaces:",
            "# module load cuda",
            "# export NCCL_SOCKET_IFNAME=hsn GLOO_SOCKET_IFNAME=hsn0",
            "# Since Slurm 22.05 srun does not inherit --cpus-per-task from the job.",
            "export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK",
            f"cd {shlex.quote(str(Path.cwd()))} || exit",
            "",
            f"echo {shlex.quote(command_line(config, plan, setting))}",
            *mpi,
            command,
            "",
        ]
    )


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text)
        path.chmod(0o755)
    except OSError as error:
        raise YalisFailure(f"cannot write {path}: {error.strerror}; give another folder") from error
