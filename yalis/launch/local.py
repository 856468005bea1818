"""Ranks on this machine, started by rank 0."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from yalis import env
from yalis.errors import YalisFailure

# What a launcher of one rank set would mislead MPI, torch and ourselves in a process that it did not start.
_LAUNCHERS = ("OMPI_COMM_WORLD_", "PMIX_", "PMI_", "MPI_LOCAL", "TORCHELASTIC_")
_TORCHRUN = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "ROLE_WORLD_SIZE"}


class LocalRanks:
    """Processes by rank. Each has its own session, so a Ctrl-C in the terminal reaches rank 0 alone."""

    def __init__(self, worker: Sequence[str], ranks: Sequence[int], place: Mapping[str, str]) -> None:
        """Run `python -m WORKER` (or WORKER itself, where it begins with a path) for each rank."""
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        command = list(worker) if os.path.isabs(worker[0]) else [sys.executable, "-m", *worker]
        try:
            for rank in ranks:
                self.processes[rank] = subprocess.Popen(
                    command,
                    env=_environment({**place, "YALIS_RANK": str(rank)}),
                    stdin=subprocess.DEVNULL,
                    stdout=_standard_error(),  # results are rank 0's to print
                    start_new_session=True,
                )
        except OSError as error:
            self.stop(0)
            raise YalisFailure(f"rank {rank} could not be started: {error.strerror or error}") from error
        except BaseException:
            self.stop(0)
            raise

    def ended(self, rank: int, wait: float = 0.0) -> str | None:
        """How this rank's process ended, if it has."""
        try:
            status = self.processes[rank].wait(wait)
        except subprocess.TimeoutExpired:
            return None
        if status >= 0:
            return f"exit status {status}"
        try:
            return f"killed by {signal.Signals(-status).name}"
        except ValueError:
            return f"killed by signal {-status}"

    def stop(self, grace: float) -> None:
        """Wait for all to end on their own, then make them; none is left when this returns."""
        for end, seconds in ((None, grace), ("terminate", 1.0), ("kill", 10.0)):
            running = [process for process in self.processes.values() if process.poll() is None]
            if end:
                for process in running:
                    getattr(process, end)()
            deadline = time.monotonic() + seconds
            for process in running:
                try:
                    process.wait(max(0.0, deadline - time.monotonic()))
                except subprocess.TimeoutExpired:
                    break  # the time was for all of them


def _environment(extra: Mapping[str, str]) -> dict[str, str]:
    kept = {
        name: value
        for name, value in env.variables().items()
        if name not in _TORCHRUN and not name.startswith(_LAUNCHERS)
    }
    # The package as this process found it, and not whatever lies in the current directory.
    home = str(Path(__file__).resolve().parents[2])
    if home not in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib")):
        kept["PYTHONPATH"] = os.pathsep.join(filter(None, [home, kept.get("PYTHONPATH")]))
    return {**kept, "PYTHONSAFEPATH": "1", **extra}


def _standard_error() -> int:
    try:
        os.fstat(2)
    except OSError:
        return subprocess.DEVNULL
    return 2
