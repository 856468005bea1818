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
                    env=rank_environment({**place, "YALIS_RANK": str(rank)}),
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
        try:
            if not self._wait(grace):
                self._signal(signal.SIGTERM)
                self._wait(1.0)
        finally:  # a Ctrl-C while waiting cuts it short
            self._signal(signal.SIGKILL)
            self._wait(10.0)

    def _signal(self, number: signal.Signals) -> None:
        for process in self.processes.values():
            process.send_signal(number)  # nothing happens to one that has ended

    def _wait(self, seconds: float) -> bool:
        """Whether all have ended within this time, or before."""
        deadline = time.monotonic() + seconds
        try:
            for process in self.processes.values():
                process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            return False
        return True


def plain_environment() -> dict[str, str]:
    """This process's, without a launcher's words."""
    return {
        name: value
        for name, value in env.variables().items()
        if name not in _TORCHRUN and not name.startswith(_LAUNCHERS)
    }


def rank_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """This process's, for a rank that it starts: with this package, and without another launcher's words."""
    kept = plain_environment()
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
