"""`yalis serve` in a process of its own, as a user starts it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.system.processes import environment


class ServeProcess:
    """A server on a free port. The end of the `with` block kills it if it still runs."""

    def __init__(self, model: str | Path, *flags: str, start_seconds: float = 90) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self.announced = Path(self._folder.name) / "url"
        self._errors = Path(self._folder.name) / "errors"
        argv = [sys.executable, "-m", "yalis", "serve", "--model", str(model), "--port", "0", "--threads", "1"]
        with self._errors.open("wb") as file:
            self.process = subprocess.Popen(
                [*argv, "--announce", str(self.announced), *flags],
                env=environment(),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
            )
        end = time.monotonic() + start_seconds
        while not self.announced.exists():
            if self.process.poll() is not None or time.monotonic() > end:
                self.process.kill()
                raise AssertionError(f"the server did not start:\n{self.errors}")
            time.sleep(0.02)
        self.port = int(self.announced.read_text().rpartition(":")[2])

    @property
    def errors(self) -> str:
        """What it has written to stderr."""
        return self._errors.read_text()

    @property
    def ranks(self) -> list[int]:
        """The process ids of all ranks."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return [self.process.pid, *map(int, children)]

    def wait(self, seconds: float = 30) -> int:
        """Wait for the end and return the exit status."""
        return self.process.wait(seconds)

    def __enter__(self) -> ServeProcess:
        return self

    def __exit__(self, *_: object) -> None:
        ranks: Sequence[int] = self.ranks if self.process.poll() is None else ()
        for rank in ranks:
            os.kill(rank, signal.SIGKILL)
        self.process.wait()
        self._folder.cleanup()
