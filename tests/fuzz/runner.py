"""Runs inputs in child processes and replaces a child that died."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from tests.fuzz.limits import WATCHDOG_S

Item = tuple[str, int]  # target and index
FAILURES = ("exception", "memory", "time", "crash")


@dataclass(frozen=True)
class Outcome:
    """The outcome of one input."""

    target: str
    index: int
    outcome: str  # accepted | refused, or one of FAILURES
    message: str
    seconds: float
    bytes: int  # growth of the resident memory, at its peak


def run_inputs(items: Sequence[Item], seed: int, processes: int, report: Callable[[Outcome], None]) -> None:
    """Run the inputs in `processes` children; calls `report` with each outcome, one call at a time."""
    lock = threading.Lock()
    cache = tempfile.TemporaryDirectory()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "YALIS_CACHE": cache.name}

    def run_share(share: list[Item]) -> None:
        while share:
            for outcome in _run_child(share, seed, environment):
                share = share[1:]
                with lock:
                    report(outcome)

    with cache, ThreadPoolExecutor(processes) as pool:
        list(pool.map(run_share, [list(items[i::processes]) for i in range(processes)]))


def _run_child(share: list[Item], seed: int, environment: dict[str, str]) -> Iterator[Outcome]:
    """Run a child over the inputs and yield their outcomes; the last is that of the input that ended the child."""
    ours, theirs = os.pipe()
    with tempfile.TemporaryFile() as errors:
        command = [sys.executable, "-X", "faulthandler", "-m", "tests.fuzz.child", str(seed), str(theirs)]
        child = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            pass_fds=(theirs,),
            env=environment,
        )
        os.close(theirs)
        assert child.stdin is not None
        child.stdin.write("".join(json.dumps(item) + "\n" for item in share).encode())
        child.stdin.close()
        begun: Item | None = None
        with os.fdopen(ours) as lines:
            for line in lines:
                message = json.loads(line)
                if "begin" in message:
                    begun = tuple(message["begin"])
                else:
                    assert begun is not None
                    yield Outcome(*begun, **message)
                    begun = None
        status = child.wait()
        errors.seek(0)
        text = errors.read().decode(errors="replace")
        if begun is not None:
            yield _describe_death(begun, status, text)
        elif status:
            raise RuntimeError(f"a child ended with status {status} between two inputs:\n{text[-3000:]}")


def _describe_death(item: Item, status: int, text: str) -> Outcome:
    """Return the outcome of the input that ended its child, from the stack that faulthandler wrote."""
    frames = [line.strip() for line in text.splitlines() if line.lstrip().startswith("File ")]
    where = next((frame for frame in frames if "/yalis/" in frame), frames[0] if frames else "no stack")
    if "Timeout (" in text:
        return Outcome(*item, "time", where, WATCHDOG_S, 0)
    cause = signal.Signals(-status).name if status < 0 else f"exit status {status}"
    return Outcome(*item, "crash", f"{cause} at {where}", 0.0, 0)
