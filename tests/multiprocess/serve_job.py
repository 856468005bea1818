"""A `yalis serve` process, its URL, and the pids of the ranks that it has started."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
from openai import OpenAI


class ServeJob:
    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.process, self._log = process, log
        self.url = self._wait_for_url()
        self.openai = OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)

    @property
    def log(self) -> str:
        return self._log.read_text()

    def worker_pids(self) -> list[int]:
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return [pid for pid in map(int, children) if b"yalis" in Path(f"/proc/{pid}/cmdline").read_bytes()]

    def metric(self, name: str) -> float:
        text = httpx.get(f"{self.url}/metrics").text
        return float(re.search(rf"^yalis:{name}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)[1])  # type: ignore[index]

    def wait_for(self, name: str, value: float, seconds: float = 20) -> None:
        deadline = time.monotonic() + seconds
        while (found := self.metric(name)) != value:
            assert time.monotonic() < deadline, f"{name} is {found} instead of {value}"
            time.sleep(0.02)

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def wait(self, seconds: float = 30) -> int:
        return self.process.wait(seconds)

    def _wait_for_url(self) -> str:
        deadline = time.monotonic() + 90
        while time.monotonic() < deadline and self.process.poll() is None:
            if found := re.search(r"serving \S+ on (http://\S+)", self.log):
                return found[1]
            time.sleep(0.05)
        raise AssertionError(f"the server is not ready: {self.log}")


@contextmanager
def serve(folder: Path, model: str, *flags: str) -> Iterator[ServeJob]:
    log = folder / "log"
    command = [sys.executable, "-m", "yalis", "serve", "--model", model, "--port", "0", "--device", "cpu", *flags]
    with log.open("wb") as file:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(command, stdout=file, stderr=file, env=environment, start_new_session=True)
    try:
        yield ServeJob(process, log)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
