"""SIGTERM and SIGUSR1, which batch systems send before they kill a job, stop a command as Ctrl-C does."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

INTERRUPTED, TERMINATED, USER_SIGNAL = (128 + number for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1))


@contextmanager
def sigterm_as_ctrl_c() -> Iterator[list[int]]:
    """Turn SIGTERM into a KeyboardInterrupt, even where Ctrl-C is ignored. Yields a list, non-empty once it came."""
    terminated: list[int] = []
    postponed: list[int] = []
    # Handlers that were not installed from Python cannot be restored.
    foreign = None in (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM))
    if foreign or threading.current_thread() is not threading.main_thread():
        yield terminated
        return

    def terminate(number: int, frame: FrameType | None) -> None:
        terminated.append(number)
        handler = signal.getsignal(signal.SIGINT)
        assert callable(handler)
        handler(signal.SIGINT, frame)  # an engine step in progress delays it until the step is complete

    def interrupt(number: int, frame: FrameType | None) -> None:
        if not terminated and sigint_handler is signal.SIG_IGN:
            return
        if _torch_is_loading() and not postponed:
            postponed.append(number)
            threading.Thread(target=_raise_when_loaded, daemon=True).start()
            return
        raise KeyboardInterrupt

    sigint_handler = signal.signal(signal.SIGINT, interrupt)
    sigterm_handler = signal.signal(signal.SIGTERM, terminate)
    try:
        yield terminated
    finally:
        signal.signal(signal.SIGTERM, sigterm_handler)
        signal.signal(signal.SIGINT, sigint_handler)


@contextmanager
def sigusr1_as_sigterm() -> Iterator[list[int]]:
    """Handle SIGUSR1 as SIGTERM is handled at that moment. Yields a list, non-empty once it came."""
    came: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield came
        return

    def handle(number: int, frame: FrameType | None) -> None:
        came.append(number)
        handler = signal.getsignal(signal.SIGTERM)
        if callable(handler):
            handler(signal.SIGTERM, frame)

    previous = signal.signal(signal.SIGUSR1, handle)
    try:
        yield came
    finally:
        signal.signal(signal.SIGUSR1, previous)


def ignore_sigusr1() -> None:
    """Ignore SIGUSR1, which Slurm sends to all ranks; rank 0 handles it later. It would end the process."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)


def _torch_is_loading() -> bool:
    """Return whether `import torch` is in progress; an exception raised inside it would be lost."""
    return bool(getattr(getattr(sys.modules.get("torch"), "__spec__", None), "_initializing", False))


def _raise_when_loaded() -> None:
    while _torch_is_loading():
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGINT)  # handled by the main thread
