"""Jobs of launch_rank processes: start them, read their output, and check that no process is left over."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
HOST = socket.gethostname()
LAUNCHER_PREFIXES = ("YALIS_", "OMPI_", "PMI", "SLURM_", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "TORCHELASTIC_")


class Job:
    """A job of real processes. Without `ranks`, rank 0 starts the others.

    With `ranks`, these ranks are started with torchrun's environment variables but without its store.
    """

    def __init__(
        self,
        scenario: str,
        size: int,
        timeout: float = 30,
        ranks: list[int] | None = None,
        port: int | None = None,
        restart: int = 0,
        world: int | None = None,
        secret: str | None = None,
    ) -> None:
        self.mark = uuid.uuid4().hex
        self.port = port or free_port()
        environment = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHER_PREFIXES)}
        environment |= {"YALIS_TEST_MARK": self.mark, "PYTHONPATH": str(ROOT)}
        if secret is not None:
            environment["YALIS_SECRET"] = secret
        command = [sys.executable, "-m", "tests.multiprocess.launch_rank", scenario, str(size), str(timeout)]
        self.processes = []
        for rank in [0] if ranks is None else ranks:
            variables = {"RANK": rank, "WORLD_SIZE": world or size, "LOCAL_RANK": rank}
            variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": self.port, "TORCHELASTIC_RESTART_COUNT": restart}
            extra = {} if ranks is None else {name: str(value) for name, value in variables.items()}
            self.processes.append(
                subprocess.Popen(
                    command,
                    env=environment | extra,
                    cwd=ROOT,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                    start_new_session=True,
                )
            )

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        for pid in self.left():
            os.kill(pid, signal.SIGKILL)
        for process in self.processes:
            process.communicate()

    @property
    def rank0(self) -> subprocess.Popen[str]:
        return self.processes[0]

    def read(self) -> Any:
        """Return the next JSON line that rank 0 prints."""
        assert self.rank0.stdout is not None
        line = self.rank0.stdout.readline()
        assert line, self.rank0.communicate()[1]
        return json.loads(line)

    def finish(self, within: float) -> tuple[list[int], str, str]:
        """Return exit statuses, rank 0's stdout and the stderr of all ranks. Fails if a process of the job is left."""
        deadline = time.monotonic() + within
        outputs = [process.communicate(timeout=max(0.1, deadline - time.monotonic())) for process in self.processes]
        while (left := self.left()) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not left
        return [process.returncode for process in self.processes], outputs[0][0], "".join(err for _, err in outputs)

    def left(self) -> list[int]:
        """Return the pids of this job's processes, including orphans."""
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            try:
                if self.mark.encode() in (path / "environ").read_bytes():
                    found.append(int(path.name))
            except OSError:
                continue
        return found


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])
