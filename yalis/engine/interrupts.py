"""Ctrl-C between steps instead of inside one, and what it leaves."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class Stopped(KeyboardInterrupt):
    """A Ctrl-C whose words say what became of the work; `done` is what there is of it."""

    def __init__(self, words: str, done: Any = None) -> None:
        super().__init__(words)
        self.done = done


@contextmanager
def if_stopped(words: str) -> Iterator[None]:
    """A Ctrl-C inside the block is told with these words, unless somebody inside knew better ones."""
    try:
        yield
    except Stopped:
        raise
    except KeyboardInterrupt as interrupt:
        raise Stopped(words) from interrupt


@contextmanager
def interrupts_held() -> Iterator[None]:
    """A Ctrl-C inside the block takes effect when it is left, so that the scheduler never loses a plan.

    A second one takes effect at once. Only the main thread receives Ctrl-C, so nothing is done in others, nor where
    the program ignores it.
    """
    if threading.current_thread() is not threading.main_thread() or not callable(signal.getsignal(signal.SIGINT)):
        yield
        return
    held: list[int] = []

    def hold(number: int, frame: FrameType | None) -> None:
        if held:
            raise KeyboardInterrupt
        held.append(number)

    before = signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if held:
            signal.raise_signal(signal.SIGINT)
