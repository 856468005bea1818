"""Ranks that rank 0 starts as processes on its own host."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from yalis.errors import YalisFailure
from yalis.host_memory import count_oom_kills
from yalis.launch.heartbeat import StoppedTimer
from yalis.launch.launchers import YALIS, environment_without_launcher


class LocalRanks:
    """The processes that rank 0 started. Each is its own session, so that Ctrl-C in a terminal reaches only rank 0."""

    def __init__(self, worker: Sequence[str], ranks: Sequence[int], variables: Mapping[str, str]) -> None:
        """Run `python -m WORKER` for each rank, or WORKER itself if it begins with an absolute path."""
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        self._stopped_timers: dict[int, StoppedTimer] = {}
        self._oom_kills = count_oom_kills()
        command = list(worker) if os.path.isabs(worker[0]) else [sys.executable, "-m", *worker]
        try:
            for rank in ranks:
                self.processes[rank] = subprocess.Popen(
                    command,
                    env=rank_environment({**variables, YALIS.rank_variable: str(rank)}),
                    stdin=subprocess.DEVNULL,
                    stdout=_standard_error(),  # stdout is for results, which rank 0 prints
                    start_new_session=True,
                )
                self._stopped_timers[rank] = StoppedTimer(self.processes[rank].pid)
        except OSError as error:
            self.stop(0)
            raise YalisFailure(f"rank {rank} could not be started: {error.strerror or error}") from error
        except BaseException:
            self.stop(0)
            raise

    def exit_status(self, rank: int, wait: float = 0.0) -> str | None:
        """Return how this rank's process ended, such as "killed by SIGKILL"; None if it runs after `wait` seconds."""
        try:
            status = self.processes[rank].wait(wait)
        except subprocess.TimeoutExpired:
            return None
        if status >= 0:
            return f"exit status {status}"
        cause = ""
        if -status == signal.SIGBUS:
            cause = ": a file was truncated while it was read, or /dev/shm is full"
        elif -status == signal.SIGKILL and count_oom_kills() > self._oom_kills:
            cause = ": the kernel ran out of memory"
        try:
            return f"killed by {signal.Signals(-status).name}{cause}"
        except ValueError:
            return f"killed by signal {-status}"

    def is_stopped(self, rank: int) -> bool:
        """Return whether this rank's process has been stopped (SIGSTOP) for JOIN_STOPPED_S. Call this repeatedly."""
        return self._stopped_timers[rank].expired()

    def kill(self, rank: int) -> None:
        """Send SIGKILL, which ends a stopped process too."""
        self.processes[rank].kill()

    def stop(self, grace: float) -> None:
        """Wait `grace` seconds for all processes to exit, then kill those that have not."""
        try:
            if not self._wait(grace):
                self._signal(signal.SIGTERM)
                self._wait(1.0)
        finally:  # also when Ctrl-C interrupts the wait
            self._signal(signal.SIGKILL)
            self._wait(10.0)

    def _signal(self, number: signal.Signals) -> None:
        for process in self.processes.values():
            process.send_signal(number)  # does nothing if it has exited

    def _wait(self, seconds: float) -> bool:
        """Return whether all processes have exited within this time."""
        deadline = time.monotonic() + seconds
        try:
            for process in self.processes.values():
                process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            return False
        return True


def rank_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for a rank that this process starts: launcher variables are removed."""
    variables = environment_without_launcher()
    # Import yalis from where this process did, and not from the current directory.
    source = str(Path(__file__).resolve().parents[2])
    if source not in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib")):
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, [source, variables.get("PYTHONPATH")]))
    return {**variables, "PYTHONSAFEPATH": "1", **extra}


def _standard_error() -> int:
    try:
        os.fstat(2)
    except OSError:
        return subprocess.DEVNULL
    return 2
