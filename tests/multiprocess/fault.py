"""Inject a fault into one rank of a test job: $YALIS_TEST_FAULT is "RANK ACTION MOMENT [NOTE]".

`shim/sitecustomize.py` calls `install` in ranks started by rank 0 or torchrun, `fork_server.py` in its own ranks. The
time is written into the file NOTE right before the action.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

VARIABLE = "YALIS_TEST_FAULT"
READS = {"reading": 1, "loading": 3}  # which tensor of a checkpoint
STEPS = {"prefill": 1, "decode": 6}  # which step of an engine


def own_rank() -> str:
    return os.environ.get("YALIS_RANK") or os.environ.get("RANK") or "0"


def install() -> None:
    rank, action, moment, *note = os.environ.get(VARIABLE, "- - -").split()
    if rank != own_rank():
        return

    def act() -> None:
        for path in note:
            Path(path).write_text(str(time.time()))
        ACTIONS[action]()

    if moment == "arriving":
        act()
    elif moment in READS:
        from yalis.checkpoint.safetensors import SafetensorsTensor

        _before(SafetensorsTensor, "read_into", READS[moment], act)
    elif moment in STEPS:
        from yalis.engine.runner import Runner

        _before(Runner, "launch", STEPS[moment], act)


def _before(owner: type, name: str, number: int, act: Callable[[], None]) -> None:
    """Call `act` before the `number`th call of a method."""
    calls = 0
    method = getattr(owner, name)

    def counted(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == number:
            act()
        return method(*args)

    setattr(owner, name, counted)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fail() -> None:
    raise RuntimeError("a bug")  # the type that the collectives of torch raise when a peer has died


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def sleep() -> None:
    time.sleep(100)


def slow_down() -> None:
    """Delay every further step, so that the test finds the job running."""
    from yalis.engine.runner import Runner

    launch = Runner.launch

    def slowly(self: Runner, plan: Any) -> Any:
        time.sleep(0.1)
        return launch(self, plan)

    Runner.launch = slowly  # type: ignore[method-assign]


def age() -> None:
    """Report another version of yalis."""
    from yalis.launch import rendezvous

    rendezvous.__version__ = "0.0.0.other"


ACTIONS = {
    "kill": die,
    "raise": fail,
    "stop": stop,
    "sleep": sleep,
    "slow": slow_down,
    "age": age,
    "note": lambda: None,
}
