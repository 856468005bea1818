"""Ranks on the hosts of a lab, started plainly or by mpirun."""

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
from yalis.study.lab.hosts import Lab, find_program

_GRACE_S = 2.0  # for ranks to end when asked to
_LEAVE_S = 20.0  # for ranks to end when their work is done
PORT = 29600  # of rank 0; hosts of a lab have all ports to themselves

# As root, on fewer cores than ranks, where a rank that waits must let the others work; over the lab's links alone.
_MPIRUN = (
    *("--allow-run-as-root", *OPEN_MPI_OVERSUBSCRIBE),
    *("--mca", "btl", "tcp,vader,self", "--mca", "btl_tcp_if_include", "eth0", "--mca", "oob_tcp_if_include", "eth0"),
)


def mpi_missing() -> str | None:
    """What of MPI is missing here and how to install it."""
    if find_program(OPEN_MPI.name) is None:
        return "mpirun is not installed; on Debian type apt install openmpi-bin"
    if find_spec("mpi4py") is None:
        return "mpi4py is not installed; type pip install mpi4py"
    return None


def mpi_version() -> str:
    """ "mpirun (Open MPI) 4.1.6"."""
    return subprocess.run([OPEN_MPI.name, "--version"], capture_output=True, text=True).stdout.partition("\n")[0]


def realtime() -> list[str]:
    """Words before a command that put its process before ordinary ones, where that is allowed.

    With fewer cores than ranks the scheduler's turns would otherwise be most of what is measured.
    """
    words = ["chrt", "--rr", "1"]
    if find_program("chrt") is None or subprocess.run([*words, "true"], capture_output=True).returncode != 0:
        return []
    return words


@contextmanager
def started(
    lab: Lab, per_host: int, command: Sequence[str], mpi: Sequence[str] | None = None
) -> Iterator[tuple[subprocess.Popen[str], IO[str]]]:
    """`command` on every host, `per_host` times; ended with the block.

    Gives the process whose output is rank 0's, and a file of what all ranks complain of. `mpi`: parameters of Open
    MPI, where mpirun is to start the ranks.
    """
    with (
        TemporaryDirectory(prefix="yalis-lab-") as folder,
        (Path(folder) / "errors").open("w+") as errors,
        _running(
            lab, per_host, command, mpi, Path(folder), subprocess.PIPE, errors, first_in_line=True, own=True
        ) as ranks,
    ):
        yield ranks[0], errors
        deadline = time.monotonic() + _LEAVE_S
        while any(rank.poll() is None for rank in ranks) and time.monotonic() < deadline:
            time.sleep(0.02)


def run(
    lab: Lab, per_host: int, command: Sequence[str], mpi: Sequence[str] | None = None, first_in_line: bool = False
) -> int:
    """`command` on every host, `per_host` times: rank 0 writes to our output, the others to the error output, and
    nobody reads input. The first rank that fails ends the others; returns its status, as a shell would say it.

    `first_in_line`: ranks come before ordinary processes, for measuring.
    """
    with (
        TemporaryDirectory(prefix="yalis-lab-") as folder,
        _running(lab, per_host, command, mpi, Path(folder), None, sys.stderr, first_in_line, own=False) as ranks,
    ):
        running = list(ranks)
        while running:
            for rank in list(running):
                status = rank.poll()
                if status:
                    time.sleep(_GRACE_S)  # in which the others may come to the same end, and say why
                    return status if status > 0 else 128 - status
                if status == 0:
                    running.remove(rank)
            time.sleep(0.05)
        return 0


@contextmanager
def _running(
    lab: Lab, per_host: int, command: Sequence[str], mpi: Sequence[str] | None, folder: Path, out: int | None,
    errors: IO[str], first_in_line: bool, own: bool,
) -> Iterator[list[subprocess.Popen[str]]]:  # fmt: skip
    """`own`: the command is a part of this package, which the ranks must find."""
    words = [*(realtime() if first_in_line else []), *command]
    base = rank_environment({}) if own else environment_without_launcher()
    if mpi is None:
        ranks = _plain(lab, per_host, words, base, out, errors)
    else:
        ranks = [_mpirun(lab, per_host, words, base, mpi, folder, out, errors)]
    try:
        yield ranks
    finally:
        for rank in ranks:
            rank.terminate()  # mpirun takes its ranks and files with it
        deadline = time.monotonic() + _GRACE_S
        while any(rank.poll() is None for rank in ranks) and time.monotonic() < deadline:
            time.sleep(0.02)
        for rank in ranks:
            rank.kill()
            rank.wait()


def _plain(
    lab: Lab, per_host: int, command: list[str], base: dict[str, str], out: int | None, errors: IO[str]
) -> list[subprocess.Popen[str]]:
    ranks = []
    for rank in range(len(lab.names) * per_host):
        variables = torchrun_variables(rank, per_host, len(lab.names), lab.addresses[0], PORT)
        environment = {**base, **variables}
        said = errors if rank else out
        ranks.append(lab.run(rank // per_host, command, environment, stdout=said, stderr=errors, text=True))
    return ranks


def _mpirun(
    lab: Lab, per_host: int, command: list[str], base: dict[str, str], parameters: Sequence[str], folder: Path,
    out: int | None, errors: IO[str],
) -> subprocess.Popen[str]:  # fmt: skip
    if reason := mpi_missing():
        raise YalisError(f"mpirun cannot start ranks here: {reason}, or leave mpi out")
    agent = folder / "agent.sh"  # in place of ssh: agent.sh HOST COMMAND...
    enter = shlex.join(lab.enter("HOST")).replace("HOST", '"$host"')
    agent.write_text(f'#!/bin/sh\nhost=$1\nshift\nexec {enter} sh -c "$*"\n')
    agent.chmod(0o755)
    hosts = ",".join(f"{name}:{per_host}" for name in lab.names)
    mpirun = [OPEN_MPI.name, *_MPIRUN, "--mca", "plm_rsh_agent", str(agent), *parameters, "--host", hosts, *command]
    return lab.run(0, mpirun, base, stdout=out, stderr=errors, text=True)
