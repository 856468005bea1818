"""This process's place in a job, from what its launcher put into the environment."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from yalis import env
from yalis.errors import YalisError
from yalis.launch.nodelist import expand_counts, expand_nodes

_FIRST_SPECIAL_STEP = 0xFFFFFFF0  # Slurm numbers batch scripts and interactive shells from here on: no launch


@dataclass(frozen=True)
class Place:
    launcher: str = ""  # "yalis" (started by rank 0), "torchrun", "mpirun", "srun"; empty without one
    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    address: str | None = None  # where rank 0 is, as far as the launcher says
    port: int | None = None
    job: str = ""  # tells this job from others
    secret: str = ""  # known to the ranks of this job only; "yalis" makes one
    store: bool = False  # address and port are those of torchrun's own store
    parent: int | None = None  # pid of rank 0, if it started this process

    @property
    def one_machine(self) -> bool:
        return self.local_size == self.size


def find_place(variables: Mapping[str, str] | None = None) -> Place:
    """Where the launcher put this process; a launcher with one rank counts as none.

    mpirun inside a Slurm allocation leaves srun's variables in place too, so it is asked first.
    """
    values = env.variables() if variables is None else variables
    for find in (_own, _torchrun, _open_mpi, _mpich, _srun):
        if place := find(values):
            if not (0 <= place.rank < place.size and 0 <= place.local_rank < place.local_size <= place.size):
                raise YalisError(
                    f"{place.launcher}'s environment says rank {place.rank} of {place.size}, local rank "
                    f"{place.local_rank} of {place.local_size}, which cannot be; unset what another launcher left there"
                )
            return place if place.size > 1 else Place()
    return Place()


def _number(values: Mapping[str, str], *names: str) -> int | None:
    for name in names:
        if re.fullmatch(r"\d+", values.get(name, "")):
            return int(values[name])
    return None


def _own(values: Mapping[str, str]) -> Place | None:
    rank, size = _number(values, "YALIS_RANK"), _number(values, "YALIS_SIZE")
    if rank is None or size is None:
        return None
    return Place(
        "yalis",
        rank,
        size,
        rank,
        size,
        address=values.get("YALIS_ADDRESS"),
        port=_number(values, "YALIS_PORT"),
        job=values.get("YALIS_JOB", ""),
        secret=values.get("YALIS_SECRET", ""),
        parent=_number(values, "YALIS_PARENT"),
    )


def _torchrun(values: Mapping[str, str]) -> Place | None:
    rank, size = _number(values, "RANK"), _number(values, "WORLD_SIZE")
    if rank is None or size is None:
        return None
    local_rank = _number(values, "LOCAL_RANK") or 0
    run = values.get("TORCHELASTIC_RUN_ID")
    return Place(
        "torchrun",
        rank,
        size,
        local_rank,
        _number(values, "LOCAL_WORLD_SIZE") or local_rank + 1,
        address=values.get("MASTER_ADDR"),
        port=_number(values, "MASTER_PORT"),
        job=f"torchrun {run or '-'} restart {values.get('TORCHELASTIC_RESTART_COUNT', '0')}",
        store=run is not None and values.get("TORCHELASTIC_USE_AGENT_STORE", "True") == "True",
    )


def _open_mpi(values: Mapping[str, str]) -> Place | None:
    rank, size = _number(values, "OMPI_COMM_WORLD_RANK"), _number(values, "OMPI_COMM_WORLD_SIZE")
    if rank is None or size is None:
        return None
    return Place(
        "mpirun",
        rank,
        size,
        _number(values, "OMPI_COMM_WORLD_LOCAL_RANK") or 0,
        _number(values, "OMPI_COMM_WORLD_LOCAL_SIZE") or 1,
        address=values.get("MASTER_ADDR"),
        port=_number(values, "MASTER_PORT"),
        job=f"mpirun {values.get('PMIX_NAMESPACE') or values.get('OMPI_MCA_ess_base_jobid') or os.getppid()}",
    )


def _mpich(values: Mapping[str, str]) -> Place | None:
    rank, size = _number(values, "PMI_RANK"), _number(values, "PMI_SIZE")
    if rank is None or size is None:
        return None
    slurm = _srun(values)
    if slurm and (slurm.rank, slurm.size) == (rank, size):
        return slurm  # srun speaks PMI too, and knows the nodes
    return Place(
        "mpirun",
        rank,
        size,
        _number(values, "MPI_LOCALRANKID", "PMI_LOCAL_RANK") or 0,
        _number(values, "MPI_LOCALNRANKS", "PMI_LOCAL_SIZE") or 1,
        address=values.get("MASTER_ADDR"),
        port=_number(values, "MASTER_PORT"),
        job=f"mpirun {values.get('PMI_JOBID') or values.get('PMI_KVSNAME') or os.getppid()}",
    )


def _srun(values: Mapping[str, str]) -> Place | None:
    rank, step = _number(values, "SLURM_PROCID"), _number(values, "SLURM_STEP_ID", "SLURM_STEPID")
    size = _number(values, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    if rank is None or step is None or step >= _FIRST_SPECIAL_STEP or size is None:
        return None
    nodes = expand_nodes(values.get("SLURM_STEP_NODELIST") or values.get("SLURM_NODELIST") or "")
    counts = expand_counts(values.get("SLURM_STEP_TASKS_PER_NODE") or values.get("SLURM_TASKS_PER_NODE") or "")
    node = _number(values, "SLURM_NODEID") or 0
    local_rank = _number(values, "SLURM_LOCALID") or 0
    if node < len(counts):
        local_size = counts[node]
    else:
        local_size = size if len(nodes) == 1 else local_rank + 1
    first = "127.0.0.1" if local_size == size else nodes[0] if nodes else None
    return Place(
        "srun",
        rank,
        size,
        local_rank,
        local_size,
        address=values.get("MASTER_ADDR") or first,
        port=_number(values, "MASTER_PORT"),
        job=f"srun {values.get('SLURM_JOB_ID') or values.get('SLURM_JOBID') or '-'}.{step}",
    )
