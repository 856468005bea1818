"""What a batch system's notice does to a command."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

INTERRUPTED, TERMINATED = 128 + signal.SIGINT, 128 + signal.SIGTERM


@contextmanager
def sigterm_as_ctrl_c() -> Iterator[list[int]]:
    """SIGTERM, a scheduler's notice, acts as Ctrl-C does, even where Ctrl-C is ignored; gives whether it came."""
    terminated: list[int] = []
    postponed: list[int] = []
    foreign = None in (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM))  # could not be put back
    if foreign or threading.current_thread() is not threading.main_thread():
        yield terminated
        return

    def terminate(number: int, frame: FrameType | None) -> None:
        terminated.append(number)
        signal.raise_signal(signal.SIGINT)  # which a step of the engine holds back until it is whole

    def interrupt(number: int, frame: FrameType | None) -> None:
        if not terminated and ctrl_c is signal.SIG_IGN:
            return
        if _torch_is_loading() and not postponed:
            postponed.append(number)
            threading.Thread(target=_raise_when_loaded, daemon=True).start()
            return
        raise KeyboardInterrupt

    ctrl_c = signal.signal(signal.SIGINT, interrupt)
    term = signal.signal(signal.SIGTERM, terminate)
    try:
        yield terminated
    finally:
        signal.signal(signal.SIGTERM, term)
        signal.signal(signal.SIGINT, ctrl_c)


def _torch_is_loading() -> bool:
    """Whether its import is under way, in which an exception gets lost."""
    return bool(getattr(getattr(sys.modules.get("torch"), "__spec__", None), "_initializing", False))


def _raise_when_loaded() -> None:
    while _torch_is_loading():
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGINT)  # the main thread hears it
