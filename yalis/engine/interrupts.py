"""Ctrl-C takes effect between steps, not inside one, and carries partial results."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class Stopped(KeyboardInterrupt):
    """A Ctrl-C with a message on how much work was done; `done` has the partial results."""

    def __init__(self, message: str, done: Any = None) -> None:
        super().__init__(message)
        self.done = done


@contextmanager
def if_stopped(message: str) -> Iterator[None]:
    """Turn a Ctrl-C inside the block into Stopped(message), unless it is a Stopped already."""
    try:
        yield
    except Stopped:
        raise
    except KeyboardInterrupt as interrupt:
        raise Stopped(message) from interrupt


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Delay a Ctrl-C until the end of the block, so that no launched step is lost. A second Ctrl-C acts at once.

    Does nothing outside the main thread, which is the one that receives Ctrl-C, or where the program ignores SIGINT.
    """
    previous = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(previous):
        yield
        return
    held: list[int] = []

    def hold(signum: int, frame: FrameType | None) -> None:
        if held:
            raise KeyboardInterrupt
        held.append(signum)

    signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
        if held:
            previous(signal.SIGINT, None)  # not a new signal, which the liveness monitor would count
