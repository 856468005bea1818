"""A pseudo-terminal to run commands on, where typing ^C sends SIGINT."""

from __future__ import annotations

import contextlib
import os
import pty
import select
import subprocess
import time
from typing import IO


class Terminal:
    """A command on its own pseudo-terminal; `stdout` redirects its output."""

    def __init__(self, command: list[str], stdout: IO[bytes] | None = None) -> None:
        self.master, slave = pty.openpty()
        self.process = subprocess.Popen(
            command,
            stdin=slave,
            stdout=stdout or slave,
            stderr=slave,
            start_new_session=True,
            preexec_fn=_set_controlling_terminal,
        )
        os.close(slave)
        self.seen = b""  # output after the last text that was waited for

    def wait_for(self, text: bytes, seconds: float = 90) -> bytes:
        end = time.monotonic() + seconds
        while text not in self.seen and time.monotonic() < end:
            if select.select([self.master], [], [], 0.1)[0]:
                self.seen += os.read(self.master, 4096)
        before, found, self.seen = self.seen.partition(text)
        assert found, before[-500:]
        return before + found

    def type(self, text: bytes) -> None:
        os.write(self.master, text)

    def end(self, seconds: float = 30) -> bytes:
        """Wait for the command to exit and return the rest of its output."""
        try:
            self.process.wait(seconds)
            with contextlib.suppress(OSError):  # raised once the command has closed the terminal
                while select.select([self.master], [], [], 0)[0]:
                    self.seen += os.read(self.master, 4096)
        finally:
            self.process.kill()
            self.process.wait()
            os.close(self.master)
        return self.seen


def _set_controlling_terminal() -> None:
    """Make stdin the controlling terminal, so that ^C sends SIGINT."""
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
