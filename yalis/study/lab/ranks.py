"""Start ranks on the hosts of a lab, directly or with mpirun."""

from __future__ import annotations

import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO

from yalis.errors import YalisError
from yalis.launch.launchers import (
    OPEN_MPI,
    OPEN_MPI_OVERSUBSCRIBE,
    environment_without_launcher,
    torchrun_variables,
)
from yalis.launch.local import rank_environment
from yalis.launch.secret import new_secret
from yalis.study.lab.hosts import Lab, find_program

_GRACE_S = 2.0  # for ranks to exit after SIGTERM, or to report why they failed too
_EXIT_S = 20.0  # for ranks to exit after rank 0 is done
PORT = 29600  # of rank 0; every port is free in a new network namespace

# As root, with more ranks than cores (so that a waiting rank yields), and only over the links of the lab.
_MPIRUN = (
    *("--allow-run-as-root", *OPEN_MPI_OVERSUBSCRIBE),
    *("--mca", "btl", "tcp,vader,self", "--mca", "btl_tcp_if_include", "eth0", "--mca", "oob_tcp_if_include", "eth0"),
)


def mpi_missing() -> str | None:
    """Return which part of MPI is missing and how to install it; None if ranks can use it."""
    if find_program(OPEN_MPI.name) is None:
        return "mpirun is not installed; on Debian type apt install openmpi-bin"
    if find_spec("mpi4py") is None:
        return "mpi4py is not installed; type pip install mpi4py"
    return None


def mpi_version() -> str:
    """Return the version line of mpirun, such as "mpirun (Open MPI) 4.1.6"."""
    return subprocess.run([OPEN_MPI.name, "--version"], capture_output=True, text=True).stdout.partition("\n")[0]


def realtime_prefix() -> list[str]:
    """Return a command prefix for real-time scheduling; empty if that is not allowed.

    With more ranks than cores, time slices of the scheduler would otherwise dominate the measurement."""
    prefix = ["chrt", "--rr", "1"]
    if find_program("chrt") is None or subprocess.run([*prefix, "true"], capture_output=True).returncode != 0:
        return []
    return prefix


@contextmanager
def running_ranks(
    lab: Lab, per_host: int, command: Sequence[str], mpi: Sequence[str] | None = None
) -> Iterator[tuple[subprocess.Popen[str], IO[str]]]:
    """Run `command` on every host, `per_host` times, until the `with` block ends.

    Yields the process that has the output of rank 0, and a file with the error output of all ranks. `mpi` has extra
    arguments for mpirun; None starts the ranks directly."""
    with (
        TemporaryDirectory(prefix="yalis-lab-") as folder,
        (Path(folder) / "errors").open("w+") as errors,
        _running(
            lab, per_host, command, mpi, Path(folder), subprocess.PIPE, errors, realtime=True, from_package=True
        ) as ranks,
    ):
        yield ranks[0], errors
        deadline = time.monotonic() + _EXIT_S
        while any(rank.poll() is None for rank in ranks) and time.monotonic() < deadline:
            time.sleep(0.02)


def run(
    lab: Lab, per_host: int, command: Sequence[str], mpi: Sequence[str] | None = None, realtime: bool = False
) -> int:
    """Run `command` on every host, `per_host` times, and wait for it. Returns an exit status as a shell does.

    Rank 0 writes to standard output and the others to standard error; none has input. If a rank fails, the others are
    ended. `realtime` gives ranks real-time priority, for measurements."""
    with (
        TemporaryDirectory(prefix="yalis-lab-") as folder,
        _running(lab, per_host, command, mpi, Path(folder), None, sys.stderr, realtime, from_package=False) as ranks,
    ):
        running = list(ranks)
        while running:
            for rank in list(running):
                status = rank.poll()
                if status:
                    time.sleep(_GRACE_S)  # the other ranks may fail too, and report why
                    return status if status > 0 else 128 - status
                if status == 0:
                    running.remove(rank)
            time.sleep(0.05)
        return 0


@contextmanager
def _running(
    lab: Lab, per_host: int, command: Sequence[str], mpi: Sequence[str] | None, folder: Path, out: int | None,
    errors: IO[str], realtime: bool, from_package: bool,
) -> Iterator[list[subprocess.Popen[str]]]:  # fmt: skip
    """`from_package`: the command is a module of this package, so the ranks need its PYTHONPATH."""
    prefixed = [*(realtime_prefix() if realtime else []), *command]
    base = rank_environment({}) if from_package else environment_without_launcher()
    if mpi is None:
        ranks = _start_ranks(lab, per_host, prefixed, base, out, errors)
    else:
        ranks = [_start_mpirun(lab, per_host, prefixed, base, mpi, folder, out, errors)]
    try:
        yield ranks
    finally:
        for rank in ranks:
            rank.terminate()  # mpirun ends its ranks and removes its files
        deadline = time.monotonic() + _GRACE_S
        while any(rank.poll() is None for rank in ranks) and time.monotonic() < deadline:
            time.sleep(0.02)
        for rank in ranks:
            rank.kill()
            rank.wait()


def _start_ranks(
    lab: Lab, per_host: int, command: list[str], base: dict[str, str], out: int | None, errors: IO[str]
) -> list[subprocess.Popen[str]]:
    ranks = []
    secret = new_secret()
    for rank in range(len(lab.names) * per_host):
        variables = torchrun_variables(rank, per_host, len(lab.names), lab.addresses[0], PORT, secret)
        environment = {**base, **variables}
        stdout = errors if rank else out
        ranks.append(lab.run(rank // per_host, command, environment, stdout=stdout, stderr=errors, text=True))
    return ranks


def _start_mpirun(
    lab: Lab, per_host: int, command: list[str], base: dict[str, str], parameters: Sequence[str], folder: Path,
    out: int | None, errors: IO[str],
) -> subprocess.Popen[str]:  # fmt: skip
    if reason := mpi_missing():
        raise YalisError(f"mpirun cannot start ranks here: {reason}, or leave mpi out")
    agent = folder / "agent.sh"  # replaces ssh: agent.sh HOST COMMAND...
    enter = shlex.join(lab.enter("HOST")).replace("HOST", '"$host"')
    agent.write_text(f'#!/bin/sh\nhost=$1\nshift\nexec {enter} sh -c "$*"\n')
    agent.chmod(0o755)
    hosts = ",".join(f"{name}:{per_host}" for name in lab.names)
    mpirun = [OPEN_MPI.name, *_MPIRUN, "--mca", "plm_rsh_agent", str(agent), *parameters, "--host", hosts, *command]
    return lab.run(0, mpirun, base, stdout=out, stderr=errors, text=True)
