"""Runs the settings of a scaling study on this machine, one after the other."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from yalis.config import EngineConfig
from yalis.errors import YalisFailure
from yalis.launch.launchers import OPEN_MPI, OPEN_MPI_OVERSUBSCRIBE, launch_command
from yalis.launch.local import rank_environment
from yalis.study.lab.ranks import mpi_missing, mpi_version
from yalis.study.scaling.settings import EXITED, LOG, ScalingPlan, Setting, command_args, command_line
from yalis.study.scaling.summary import find_result

Report = Callable[[str], None]

_GRACE_S = 10.0  # for a command to exit after SIGTERM
_POLL_S = 0.2


def run_missing(config: EngineConfig, plan: ScalingPlan, settings: Sequence[Setting], report: Report) -> None:
    """Run every setting that has no result. A setting that fails leaves its log and no result."""
    missing = [setting for setting in settings if find_result(config, plan, setting) is None]
    for index, setting in enumerate(missing, 1):
        _run(config, plan, setting, report, f"setting {index} of {len(missing)}, {setting.folder}")


def _run(config: EngineConfig, plan: ScalingPlan, setting: Setting, report: Report, label: str) -> None:
    folder = make_folder(plan.folder / setting.folder)
    with (folder / LOG).open("w") as log:
        log.write(f"{command_line(config, plan, setting)}\n")
        log.flush()  # before the command writes to the same file
        if setting.allreduce == "mpi" and (reason := mpi_missing()):
            log.write(f"yalis: error: {reason}\n")
            return
        command = [*_launcher(setting), sys.executable, "-m", "yalis", *command_args(config, plan, setting)]
        process = None
        start = time.monotonic()
        try:
            with _signals_deferred():
                process = _start(command, log)
            if process is None:
                return
            while process.poll() is None:
                seconds = time.monotonic() - start
                report(f"{label}: {seconds:.0f} s")
                if seconds > 60 * plan.minutes:
                    _stop(process)
                    log.write(f"yalis: error: stopped after {plan.minutes:g} minutes; give a larger --minutes\n")
                    return
                time.sleep(_POLL_S)
        except BaseException:
            if process is not None:
                _stop(process)
            raise
        if process.returncode:
            log.write(f"{EXITED} {process.returncode}\n")


def _start(command: list[str], log: TextIO) -> subprocess.Popen[bytes] | None:
    try:
        return subprocess.Popen(
            command, env=rank_environment({}), stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
        )
    except OSError as error:
        log.write(f"yalis: error: {command[0]} could not be started: {error.strerror}\n")
        return None


@contextmanager
def _signals_deferred() -> Iterator[None]:
    """Deliver SIGINT and SIGTERM only on exit, so that a process that is being started is not lost."""
    received: list[int] = []
    handlers = {}
    for number in (signal.SIGINT, signal.SIGTERM):
        if callable(signal.getsignal(number)):  # leave ignored signals ignored
            handlers[number] = signal.signal(number, lambda number, frame: received.append(number))
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for signum in received:
            signal.raise_signal(signum)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Terminate a command. It stops its ranks, which also exit by themselves if it is killed."""
    process.terminate()
    try:
        process.wait(_GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def make_folder(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise YalisFailure(f"cannot create the folder {folder}: {error.strerror}; give another --out") from error
    return folder


def _launcher(setting: Setting) -> list[str]:
    """Return the launcher's command: mpirun for MPI ranks. In all other cases the first rank starts the others."""
    if setting.allreduce != "mpi":
        return []
    command = launch_command(OPEN_MPI.name, setting.ranks)
    if "Open MPI" in mpi_version():  # by default it needs one core per rank and refuses to run as root
        command += OPEN_MPI_OVERSUBSCRIBE
        command += ["--allow-run-as-root"] if os.geteuid() == 0 else []
    return command
