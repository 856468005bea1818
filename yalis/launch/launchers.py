"""The supported launchers: the environment variables each one sets, and the command that starts ranks with it.

One `Launcher` record each. `endpoint.py` has the only other difference between them: how ranks find rank 0.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from yalis import env
from yalis.errors import YalisError
from yalis.launch.link import is_loopback
from yalis.launch.nodelist import expand_counts, expand_nodes

_FIRST_RESERVED_STEP = 0xFFFFFFF0  # Slurm's step ids from here on are batch scripts and interactive shells, not srun


class LaunchInfo(NamedTuple):
    """This process's rank in its job, as described by the launcher that started it."""

    launcher: str = ""  # name of the launcher; empty without one
    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int | None = 1  # ranks on this host; None if unknown
    address: str | None = None  # host of rank 0, if the launcher provides it
    port: int | None = None
    job: str = ""  # unique name of this job
    peer: str | None = None  # the second host of the job, if the launcher provides it
    has_store: bool = False  # address and port belong to the TCPStore of torchrun's agent
    parent_pid: int | None = None  # of rank 0, if it started this process
    join_timeout: int | None = None  # seconds, if rank 0 started this process

    @property
    def single_host(self) -> bool:
        """Whether all ranks are on this host; the same on every rank."""
        return self.local_size == self.size or (self.address is not None and is_loopback(self.address))


class Launcher(NamedTuple):
    """A program that starts ranks. `name` is what the user types, and is stored in results."""

    name: str
    rank_variable: str
    size_variables: tuple[str, ...]  # the first one that is set counts
    describe: Callable[[Mapping[str, str], int, int], LaunchInfo | None]  # None: these variables are not a launch
    command: Callable[[int, Sequence[int]], list[str]]  # see `launch_command`
    # Variables removed for processes that yalis starts: MPI, torch or yalis would read this process's rank from them.
    hidden_names: frozenset[str] = frozenset()
    hidden_prefixes: tuple[str, ...] = ()

    def detect(self, variables: Mapping[str, str]) -> LaunchInfo | None:
        """Return this process's launch info, or None if this launcher did not start it."""
        rank, size = _read_int(variables, self.rank_variable), _read_int(variables, *self.size_variables)
        return None if rank is None or size is None else self.describe(variables, rank, size)


def detect_launcher(variables: Mapping[str, str] | None = None) -> LaunchInfo:
    """Return how this process was launched. A launcher with a single rank counts as none."""
    variables = env.variables() if variables is None else variables
    for launcher in LAUNCHERS:
        if info := launcher.detect(variables):
            local_size = info.local_rank + 1 if info.local_size is None else info.local_size
            if not (0 <= info.rank < info.size and 0 <= info.local_rank < local_size <= info.size):
                raise YalisError(
                    f"the environment of {info.launcher} has rank {info.rank} of {info.size} and local rank "
                    f"{info.local_rank} of {local_size}, which is impossible; unset the variables that another "
                    "launcher left there"
                )
            return info if info.size > 1 else LaunchInfo()
    return LaunchInfo()


def process_rank() -> int:
    """Return this process's rank, for logging; 0 without a launcher. Unlike `detect_launcher` it never fails."""
    variables = env.variables()
    ranks = (_read_int(variables, launcher.rank_variable) for launcher in LAUNCHERS)
    return next((rank for rank in ranks if rank is not None), 0)


def launch_command(launcher: str, ranks: int, ranks_per_host: Sequence[int] = ()) -> list[str]:
    """Return the words to type before a command so that `launcher` runs it as `ranks` ranks; [] for no launcher.

    `ranks_per_host` adds the options that place the ranks on hosts.
    """
    record = next((one for one in LAUNCHERS if one.name == launcher), None)
    return record.command(ranks, ranks_per_host) if record else []


def environment_without_launcher() -> dict[str, str]:
    """Return this process's environment without the variables that describe its rank."""
    names = frozenset[str]().union(*(launcher.hidden_names for launcher in LAUNCHERS))
    prefixes = tuple(prefix for launcher in LAUNCHERS for prefix in launcher.hidden_prefixes)
    variables = env.variables()
    return {name: value for name, value in variables.items() if name not in names and not name.startswith(prefixes)}


def _read_int(variables: Mapping[str, str], *names: str) -> int | None:
    for name in names:
        if re.fullmatch(r"\d+", variables.get(name, "")):
            return int(variables[name])
    return None


def yalis_variables(size: int, address: str, port: int, job: str, secret: str, join_timeout: float) -> dict[str, str]:
    """Return the variables that rank 0 sets for the ranks it starts, all but the rank itself."""
    return {
        "YALIS_SIZE": str(size),
        "YALIS_ADDRESS": address,
        "YALIS_PORT": str(port),
        "YALIS_JOB": job,
        "YALIS_SECRET": secret,
        "YALIS_PARENT": str(os.getpid()),
        "YALIS_JOIN_TIMEOUT": str(math.ceil(join_timeout)),
    }


def _describe_yalis(variables: Mapping[str, str], rank: int, size: int) -> LaunchInfo:
    return LaunchInfo(
        "yalis",
        rank,
        size,
        rank,
        size,
        address=variables.get("YALIS_ADDRESS"),
        port=_read_int(variables, "YALIS_PORT"),
        job=variables.get("YALIS_JOB", ""),
        parent_pid=_read_int(variables, "YALIS_PARENT"),
        join_timeout=_read_int(variables, "YALIS_JOIN_TIMEOUT"),
    )


def torchrun_variables(
    rank: int, ranks_per_host: int, hosts: int, address: str, port: int, secret: str
) -> dict[str, str]:
    """Return the variables of a rank that is started as by torchrun, but without its store; includes YALIS_SECRET."""
    values = {
        "RANK": rank,
        "WORLD_SIZE": ranks_per_host * hosts,
        "LOCAL_RANK": rank % ranks_per_host,
        "LOCAL_WORLD_SIZE": ranks_per_host,
        "MASTER_ADDR": address,
        "MASTER_PORT": port,
        "YALIS_SECRET": secret,
    }
    return {name: str(value) for name, value in values.items()}


def _describe_torchrun(variables: Mapping[str, str], rank: int, size: int) -> LaunchInfo:
    run = variables.get("TORCHELASTIC_RUN_ID")
    return LaunchInfo(
        "torchrun",
        rank,
        size,
        _read_int(variables, "LOCAL_RANK") or 0,
        _read_int(variables, "LOCAL_WORLD_SIZE"),
        address=variables.get("MASTER_ADDR"),
        port=_read_int(variables, "MASTER_PORT"),
        job=f"torchrun {run or '-'} restart {variables.get('TORCHELASTIC_RESTART_COUNT', '0')}",
        has_store=run is not None and variables.get("TORCHELASTIC_USE_AGENT_STORE", "True") == "True",
    )


def _torchrun_command(ranks: int, ranks_per_host: Sequence[int]) -> list[str]:
    if not ranks_per_host:
        return ["torchrun", "--nproc-per-node", str(ranks)]
    nodes = ["--nnodes", str(len(ranks_per_host)), "--nproc-per-node", str(max(ranks_per_host))]
    return ["torchrun", *nodes, "--no-python"]


def _describe_open_mpi(variables: Mapping[str, str], rank: int, size: int) -> LaunchInfo:
    job = variables.get("PMIX_NAMESPACE") or variables.get("OMPI_MCA_ess_base_jobid") or os.getppid()
    return LaunchInfo(
        "mpirun",
        rank,
        size,
        _read_int(variables, "OMPI_COMM_WORLD_LOCAL_RANK") or 0,
        _read_int(variables, "OMPI_COMM_WORLD_LOCAL_SIZE"),
        address=variables.get("MASTER_ADDR"),
        port=_read_int(variables, "MASTER_PORT"),
        job=f"mpirun {job}",
    )


def _mpirun_command(ranks: int, ranks_per_host: Sequence[int]) -> list[str]:
    return ["mpirun", "-n", str(ranks)]  # hosts come from mpirun's hostfile or the batch system


def _describe_mpich(variables: Mapping[str, str], rank: int, size: int) -> LaunchInfo:
    slurm = SRUN.detect(variables)
    if slurm and (slurm.rank, slurm.size) == (rank, size):
        return slurm  # srun implements PMI too, and its variables include the nodes
    return LaunchInfo(
        "mpirun",
        rank,
        size,
        _read_int(variables, "MPI_LOCALRANKID", "PMI_LOCAL_RANK") or 0,
        _read_int(variables, "MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"),
        address=variables.get("MASTER_ADDR"),
        port=_read_int(variables, "MASTER_PORT"),
        job=f"mpirun {variables.get('PMI_JOBID') or variables.get('PMI_KVSNAME') or os.getppid()}",
    )


def _describe_srun(variables: Mapping[str, str], rank: int, size: int) -> LaunchInfo | None:
    step = _read_int(variables, "SLURM_STEP_ID", "SLURM_STEPID")
    if step is None or step >= _FIRST_RESERVED_STEP:
        return None
    nodes = expand_nodes(variables.get("SLURM_STEP_NODELIST") or variables.get("SLURM_NODELIST") or "")
    tasks = expand_counts(variables.get("SLURM_STEP_TASKS_PER_NODE") or variables.get("SLURM_TASKS_PER_NODE") or "")
    node = _read_int(variables, "SLURM_NODEID") or 0
    if node < len(tasks):
        local_size: int | None = tasks[node]
    else:
        local_size = size if len(nodes) == 1 else None
    first_node = "127.0.0.1" if local_size == size else nodes[0] if nodes else None
    return LaunchInfo(
        "srun",
        rank,
        size,
        _read_int(variables, "SLURM_LOCALID") or 0,
        local_size,
        address=variables.get("MASTER_ADDR") or first_node,
        port=_read_int(variables, "MASTER_PORT"),
        peer=nodes[1] if len(nodes) > 1 else None,
        job=f"srun {variables.get('SLURM_JOB_ID') or variables.get('SLURM_JOBID') or '-'}.{step}",
    )


def _srun_command(ranks: int, ranks_per_host: Sequence[int]) -> list[str]:
    nodes = ["-N", str(len(ranks_per_host))] if ranks_per_host else []
    return ["srun", *nodes, "-n", str(ranks)]


# Rank 0 itself starts the other ranks on its host, so there is no command to type.
YALIS = Launcher("yalis", "YALIS_RANK", ("YALIS_SIZE",), _describe_yalis, lambda ranks, ranks_per_host: [])
TORCHRUN = Launcher(
    "torchrun",
    "RANK",
    ("WORLD_SIZE",),
    _describe_torchrun,
    _torchrun_command,
    hidden_names=frozenset(
        {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "ROLE_WORLD_SIZE"}
    ),
    hidden_prefixes=("TORCHELASTIC_",),
)
OPEN_MPI = Launcher(
    "mpirun",
    "OMPI_COMM_WORLD_RANK",
    ("OMPI_COMM_WORLD_SIZE",),
    _describe_open_mpi,
    _mpirun_command,
    hidden_prefixes=("OMPI_COMM_WORLD_", "PMIX_"),
)
MPICH = Launcher(
    "mpirun",
    "PMI_RANK",
    ("PMI_SIZE",),
    _describe_mpich,
    _mpirun_command,
    hidden_prefixes=("PMI_", "MPI_LOCAL"),
)
SRUN = Launcher("srun", "SLURM_PROCID", ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"), _describe_srun, _srun_command)

# Innermost first: inside a Slurm allocation, the ranks of mpirun and torchrun have srun's variables too.
LAUNCHERS = (YALIS, TORCHRUN, OPEN_MPI, MPICH, SRUN)
_EXTERNAL = list(dict.fromkeys(launcher.name for launcher in LAUNCHERS if launcher is not YALIS))
EXTERNAL_LAUNCHERS = f"{', '.join(_EXTERNAL[:-1])} or {_EXTERNAL[-1]}"  # for messages

# Options of Open MPI's mpirun for more ranks than cores: waiting ranks must yield their core to the others.
OPEN_MPI_OVERSUBSCRIBE = ("--oversubscribe", "--bind-to", "none", "--mca", "mpi_yield_when_idle", "1")
