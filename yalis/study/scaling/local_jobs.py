"""The settings of a scaling study as processes: started here one after the other, or as Slurm scripts to submit."""

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
from yalis.study.scaling.settings import ENDED, LOG, ScalingPlan, Setting, command_line, command_words
from yalis.study.scaling.summary import find_result

Report = Callable[[str], None]

_GRACE_S = 10.0  # for a command to end when asked to
_LOOK_S = 0.2


def run_missing(config: EngineConfig, plan: ScalingPlan, settings: Sequence[Setting], report: Report) -> None:
    """Run what has no result yet, one after the other, on this machine. What fails leaves its log and no result."""
    left = [setting for setting in settings if find_result(config, plan, setting) is None]
    for number, setting in enumerate(left, 1):
        _run(config, plan, setting, report, f"setting {number} of {len(left)}, {setting.folder}")


def _run(config: EngineConfig, plan: ScalingPlan, setting: Setting, report: Report, label: str) -> None:
    folder = make_folder(plan.folder / setting.folder)
    with (folder / LOG).open("w") as log:
        log.write(f"{command_line(config, plan, setting)}\n")
        log.flush()  # before the command writes there itself
        if setting.allreduce == "mpi" and (reason := mpi_missing()):
            log.write(f"yalis: error: {reason}\n")
            return
        words = [*_launcher(setting), sys.executable, "-m", "yalis", *command_words(config, plan, setting)]
        process = None
        begin = time.monotonic()
        try:
            with _signals_wait():
                process = _start(words, log)
            if process is None:
                return
            while process.poll() is None:
                spent = time.monotonic() - begin
                report(f"{label}: {spent:.0f} s")
                if spent > 60 * plan.minutes:
                    _end(process)
                    log.write(f"yalis: error: it took more than {plan.minutes:g} minutes, and was ended\n")
                    return
                time.sleep(_LOOK_S)
        except BaseException:
            if process is not None:
                _end(process)
            raise
        if process.returncode:
            log.write(f"{ENDED} {process.returncode}\n")


def _start(words: list[str], log: TextIO) -> subprocess.Popen[bytes] | None:
    try:
        return subprocess.Popen(
            words, env=rank_environment({}), stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
        )
    except OSError as error:
        log.write(f"yalis: error: {words[0]} could not be started: {error.strerror}\n")
        return None


@contextmanager
def _signals_wait() -> Iterator[None]:
    """Within, Ctrl-C and SIGTERM come when it is over: who they end must know a process that it has just started."""
    came: list[int] = []
    kept = {}
    for number in (signal.SIGINT, signal.SIGTERM):
        if callable(signal.getsignal(number)):  # and would be called here
            kept[number] = signal.signal(number, lambda number, frame: came.append(number))
    try:
        yield
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)
        for late in came:
            signal.raise_signal(late)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ask it to end; it takes its ranks with it, and they notice if it cannot."""
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
        raise YalisFailure(f"cannot make the folder {folder}: {error.strerror}; give another --out") from error
    return folder


def _launcher(setting: Setting) -> list[str]:
    """Ranks start each other, except that MPI's are started by mpirun."""
    if setting.allreduce != "mpi":
        return []
    words = launch_command(OPEN_MPI.name, setting.ranks)
    if "Open MPI" in mpi_version():  # which otherwise wants a core for each rank, and no root
        words += OPEN_MPI_OVERSUBSCRIBE
        words += ["--allow-run-as-root"] if os.geteuid() == 0 else []
    return words
