"""What a batch system's notice does to a command."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

INTERRUPTED, TERMINATED = 128 + signal.SIGINT, 128 + signal.SIGTERM


@contextmanager
def sigterm_as_ctrl_c() -> Iterator[list[int]]:
    """SIGTERM, a scheduler's notice, acts as Ctrl-C does, even where Ctrl-C is ignored; gives whether it came."""
    terminated: list[int] = []
    foreign = None in (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM))  # could not be put back
    if foreign or threading.current_thread() is not threading.main_thread():
        yield terminated
        return

    def terminate(number: int, frame: FrameType | None) -> None:
        terminated.append(number)
        signal.raise_signal(signal.SIGINT)  # which a step of the engine holds back until it is whole

    def interrupt(number: int, frame: FrameType | None) -> None:
        if terminated or ctrl_c is not signal.SIG_IGN:
            raise KeyboardInterrupt

    ctrl_c = signal.signal(signal.SIGINT, interrupt)
    term = signal.signal(signal.SIGTERM, terminate)
    try:
        yield terminated
    finally:
        signal.signal(signal.SIGTERM, term)
        signal.signal(signal.SIGINT, ctrl_c)
