"""Inject a fault into one rank of a test job: $YALIS_TEST_FAULT is "RANK ACTION MOMENT [NOTE]".

`shim/sitecustomize.py` calls `install` in ranks started by rank 0 or torchrun, `fork_server.py` in its own ranks. The
time is written into the file NOTE right before the action. The action "pause" then waits for the file NOTE.go, so that
the test can inject a fault from outside.
"""

from __future__ import annotations

import os
import resource
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
        if action == "pause":
            wait_for(Path(f"{note[0]}.go"))
        else:
            ACTIONS[action]()

    if moment == "arriving":
        act()
    elif moment == "join":
        _before_joining(rank, act)
    elif moment in READS:
        from yalis.checkpoint.safetensors import SafetensorsTensor

        _before(SafetensorsTensor, "read_into", READS[moment], act)
    elif moment in STEPS:
        from yalis.engine.runner import Runner

        _before(Runner, "launch", STEPS[moment], act)
    elif moment == "connecting":
        from yalis.comm.torch_dist import TorchGroup

        _before(TorchGroup, "all_gather", 1, act)  # while the ranks of a host share their memory
    elif moment == "connect":
        from yalis.parallel.plan import Grid

        _before(Grid, "open", 1, act)
    elif moment == "warm-up":
        from yalis.engine.executor import StepExecutor

        _before(StepExecutor, "warm_up", 1, act)
    elif moment == "shutdown":
        from yalis.engine.replica_ranks import ReplicaRanks

        _before(ReplicaRanks, "close", 1, act)


def _before_joining(rank: str, act: Callable[[], None]) -> None:
    """Call `act` when rank 0 has authenticated the first connection, or before another rank opens its first one."""
    if rank == "0":
        from yalis.launch.rendezvous import RendezvousServer

        _before(RendezvousServer, "_accept", 1, act)
        return
    from yalis.launch.rendezvous import RankClient

    _before(RankClient, "join", 1, act)


def _before(owner: Any, name: str, number: int, act: Callable[[], None]) -> None:
    """Call `act` before the `number`th call of a method or function."""
    calls = 0
    method = getattr(owner, name)

    def counted(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == number:
            act()
        return method(*args, **options)

    setattr(owner, name, counted)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fail() -> None:
    raise RuntimeError("a bug")  # the type that the collectives of torch raise when a peer has died


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def exhaust_memory() -> None:
    """Raise MemoryError, with no memory left for the code that handles it."""
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size, resource.getrlimit(resource.RLIMIT_AS)[1]))
    bytearray(1 << 34)


def terminate() -> None:
    """Send SIGTERM to this rank while the job has much work left."""
    os.kill(os.getpid(), signal.SIGTERM)
    slow_down()


def wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(0.01)


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
    "memory": exhaust_memory,
    "term": terminate,
    "stop": stop,
    "sleep": sleep,
    "slow": slow_down,
    "age": age,
    "note": lambda: None,
}
