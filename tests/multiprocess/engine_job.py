"""Start jobs of real engines, wait for their end, and check that they leave no process or shared memory."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.multiprocess.launch_job import LAUNCHER_PREFIXES, ROOT, free_port

SHIM = Path(__file__).with_name("shim")


def environment(fault: str = "") -> dict[str, str]:
    kept = {
        name: value
        for name, value in os.environ.items()
        if name == "YALIS_CACHE" or not name.startswith(LAUNCHER_PREFIXES)
    }
    path = os.pathsep.join([str(ROOT), str(SHIM)])
    return {**kept, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "YALIS_TEST_FAULT": fault or "- - -"}


def shared_memory() -> set[str]:
    """Return the file names in /dev/shm."""
    return {path.name for path in Path("/dev/shm").glob("*")}


def _mapped_names() -> str:
    found = []
    for path in Path("/proc").glob("[0-9]*/maps"):
        try:
            found += [line for line in path.read_text().splitlines() if "/dev/shm/" in line]
        except OSError:  # the process has ended
            continue
    return "\n".join(found)


def processes_of(sessions: Sequence[int], mark: str) -> list[int]:
    """Return the pids in these sessions or with this mark in their environment, including zombies."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            session = int((path / "stat").read_text().rpartition(")")[2].split()[3])
            if session in sessions or mark.encode() in (path / "environ").read_bytes():
                found.append(int(path.name))
        except OSError:
            continue
    return found


class Ended:
    """A finished job: exit status, end time and stdout of each process, and the stderr of all of them."""

    def __init__(self, statuses: list[int], times: list[float], shown: list[Path]) -> None:
        self.statuses, self.times = statuses, times
        self.outputs = [path.with_suffix(".out").read_text() for path in shown]
        self.errors = "".join(path.with_suffix(".err").read_text() for path in shown)

    def within(self, seconds: float, note: Path) -> bool:
        """Return whether all processes ended within `seconds` after the fault."""
        assert note.exists(), self.errors
        return max(self.times) - float(note.read_text()) < seconds


class Job:
    """A running job; finish() checks that nothing of it is left."""

    def __init__(
        self, pids: list[int], mark: str, shown: list[Path], wait: Callable[[float], tuple[list[int], list[float]]]
    ) -> None:
        """Process i writes to shown[i] with the suffixes .out and .err. `wait` returns statuses and end times."""
        self.pids, self.mark, self._shown, self._wait = pids, mark, shown, wait
        self._shared = shared_memory()

    def finish(self, seconds: float = 60) -> Ended:
        try:
            statuses, times = self._wait(seconds)
            deadline = time.time() + 10  # a worker whose rank 0 died needs a moment to exit
            while (left := self.left()) and time.time() < deadline:
                time.sleep(0.05)
            assert not left, f"processes {left} are left"
            new = shared_memory() - self._shared
            mapped = _mapped_names() if new else ""  # other programs' files are mapped by a process
            assert not {name for name in new if name not in mapped}
            return Ended(statuses, [*times, time.time()], self._shown)
        finally:
            for pid in self.left():
                os.kill(pid, signal.SIGKILL)

    def left(self) -> list[int]:
        return processes_of(self.pids, self.mark)


class ForkServer:
    """A process that jobs are forked from; see fork_server.py."""

    def __init__(self, folder: Path, prefix: Sequence[str] = ()) -> None:
        """`prefix`: a command that runs the server in another place, such as a network namespace."""
        self._folder = folder
        self._process = subprocess.Popen(
            [*prefix, sys.executable, "-m", "tests.multiprocess.fork_server"],
            env=environment(),
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        self._messages: queue.Queue[dict[str, Any]] = queue.Queue()
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()
        self._receive(60)

    @property
    def pid(self) -> int:
        return self._process.pid

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._listener.join()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._messages.put(json.loads(line))

    def _receive(self, seconds: float) -> dict[str, Any]:
        try:
            return self._messages.get(timeout=seconds)
        except queue.Empty:
            raise AssertionError("the job did not end in time") from None

    def fork(self, jobs: Sequence[Mapping[str, Any]]) -> list[int]:
        """Fork a process for each of `jobs`, which are arguments of fork_server.run(), and return their pids.

        The next ones can be forked after wait_for_exit() has returned for each of these.
        """
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(jobs) + "\n")
        pids: list[int] = self._receive(10)["pids"]
        return pids

    def wait_for_exit(self, seconds: float) -> tuple[int, int, float]:
        """Return the position in `jobs`, exit status and time of the next process that ends."""
        message = self._receive(seconds)
        return message["number"], message["status"], message["at"]

    def start(
        self,
        argv: Sequence[str],
        ranks: int = 0,
        fault: str = "",
        each: Mapping[int, dict[str, Any]] | None = None,
        port: int | None = None,
    ) -> Job:
        """Start `argv` once, or on each of `ranks` ranks. `each` overrides "argv" or "cwd" of single ranks."""
        mark, port = uuid.uuid4().hex, port or free_port()
        shown = [self._folder / mark / str(rank) for rank in range(max(1, ranks))]
        shown[0].parent.mkdir()
        jobs = []
        for rank, path in enumerate(shown):
            variables = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": ranks}
            variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            env = {name: str(value) for name, value in variables.items()} if ranks else {}
            env |= {"YALIS_TEST_MARK": mark, "YALIS_TEST_FAULT": fault or "- - -"}
            own = (each or {}).get(rank, {})
            jobs.append({"argv": list(argv), "env": env, "cwd": str(self._folder), "shown": str(path), **own})
        pids = self.fork(jobs)

        def wait(seconds: float) -> tuple[list[int], list[float]]:
            deadline = time.time() + seconds
            statuses, times = [0] * len(jobs), [0.0] * len(jobs)
            try:
                for _ in jobs:
                    number, status, at = self.wait_for_exit(max(0.1, deadline - time.time()))
                    statuses[number], times[number] = status, at
            except AssertionError:
                for pid in processes_of(pids, mark):
                    os.kill(pid, signal.SIGKILL)
                for _ in range(times.count(0.0)):
                    self.wait_for_exit(10)
                raise
            return statuses, times

        return Job(pids, mark, shown, wait)

    def run(self, argv: Sequence[str], ranks: int = 0, **options: Any) -> Ended:
        return self.start(argv, ranks, **options).finish()


def start(command: Sequence[str], folder: Path, fault: str = "") -> Job:
    """Start a command in `folder`, as a user would type it."""
    mark = uuid.uuid4().hex
    shown = folder / "shown"
    with shown.with_suffix(".out").open("w") as out, shown.with_suffix(".err").open("w") as err:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env={**environment(fault), "YALIS_TEST_MARK": mark},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )

    def wait(seconds: float) -> tuple[list[int], list[float]]:
        try:
            return [process.wait(seconds)], [time.time()]
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()

    return Job([process.pid], mark, [shown], wait)
