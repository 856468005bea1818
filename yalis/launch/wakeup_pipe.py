"""A pipe that wakes a thread from select(), and passes it the numbers of signals that this process receives."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import weakref

WAKE = 0  # the byte that wake() writes; other bytes are signal numbers


class WakeupPipe:
    """One thread waits on `fileno()`; any other thread wakes it.

    The end of the pipe is not a wake-up: a forked child has a copy of the writing end, so that the reading thread may
    never see one. Forked children close their copy and do not write their own signals into it.
    """

    def __init__(self) -> None:
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self.receives_signals = False
        self._previous = -1  # the wakeup fd that receive_signals() replaced
        _open.add(self)

    def fileno(self) -> int:
        return self._reader

    def receive_signals(self, replace: bool) -> None:
        """Pass signals to the reading thread from now on. Call this on the main thread.

        Python handlers run in the main thread, which may be stuck in a collective; the pipe works regardless.
        `replace`: also if the program has set a wakeup fd, which close() then restores. An event loop needs its own.
        """
        self._previous = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        self.receives_signals = replace or self._previous == -1
        if not self.receives_signals:
            signal.set_wakeup_fd(self._previous)

    def wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # the pipe is full: the thread wakes anyway
            os.write(self._writer, bytes([WAKE]))

    def read(self) -> bytes:
        """Wait for wake(), which gives a byte WAKE, or for signals, which give their numbers."""
        return os.read(self._reader, 64)

    def stop_receiving_signals(self) -> None:
        """Restore the wakeup fd that receive_signals() replaced. Only the main thread can do that."""
        if self.receives_signals:
            signal.set_wakeup_fd(self._previous)
            self.receives_signals = False

    def close(self) -> None:
        """Close the pipe, once no thread reads it. A pipe that receives signals is closed by the main thread only."""
        if self not in _open:  # a forked child has closed its copy
            return
        if self.receives_signals:
            if threading.current_thread() is not threading.main_thread():
                return
            self.stop_receiving_signals()
        _open.discard(self)
        os.close(self._reader)
        os.close(self._writer)

    def abandon(self) -> None:
        """Close the copy of a forked child."""
        self._previous = -1
        self.close()


_open: weakref.WeakSet[WakeupPipe] = weakref.WeakSet()


def _abandon_all() -> None:
    for pipe in list(_open):
        pipe.abandon()


os.register_at_fork(after_in_child=_abandon_all)
