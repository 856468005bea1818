"""Lanes: isolated environments that each run one job at a time, from a fork server.

As root, a lane has its own network namespace and /dev/shm, so that everything found there was left by its jobs.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.faults.cases import LAUNCHED, SELF_STARTED, Case
from tests.multiprocess.engine_job import ForkServer
from yalis.env import cache_dir
from yalis.launch.launchers import torchrun_variables
from yalis.study.lab.hosts import Lab, missing

_PRIVATE_MEMORY = 'mount -t tmpfs tmpfs /dev/shm && exec "$@"'
_ISOLATE = ("unshare", "--mount", "--net", "sh", "-c", f"ip link set lo up && {_PRIVATE_MEMORY}", "sh")
PORT = 29600
FOLDERS = ("home", "tmp", "run")  # $HOME, $TMPDIR and $XDG_RUNTIME_DIR of a job


class ProcessTable:
    """The processes of this machine, read at most every 0.1 s for all lanes together."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._time = 0.0
        self._marks: dict[tuple[str, str], str] = {}  # by pid and start time
        self._table: list[tuple[int, int, str]] = []

    def find(self, leaders: Sequence[int], mark: str, since: float) -> set[int]:
        """Return the running processes that are in `leaders`, are in a session of one of them, or have this mark.

        The table is read again if it is older than `since`. A zombie does not count as running: its parent is a stopped
        rank 0, or is about to reap it.
        """
        with self._lock:
            if self._time < max(since, time.monotonic() - 0.1):
                self._time = time.monotonic()
                self._read()
            return {pid for pid, session, found in self._table if pid in leaders or session in leaders or found == mark}

    def _read(self) -> None:
        table, marks = [], {}
        for path in Path("/proc").iterdir():
            if not path.name.isdigit():
                continue
            try:
                fields = (path / "stat").read_text().rpartition(")")[2].split()
                if fields[0] == "Z":
                    continue
                key = (path.name, fields[19])
                if not (mark := self._marks.get(key)):
                    _, _, rest = (path / "environ").read_bytes().partition(b"YALIS_TEST_MARK=")
                    mark = rest.partition(b"\0")[0].decode()
            except OSError:  # it has ended
                continue
            marks[key] = mark
            table.append((int(path.name), int(fields[3]), mark))
        self._table, self._marks = table, marks


class RunningJob:
    """The processes of one case. All ranks append their output to the same two files."""

    def __init__(self, servers: list[ForkServer], pids: list[int], mark: str, folder: Path) -> None:
        """servers[i] forked the process with pids[i]: rank i."""
        self.pids, self.folder = pids, folder
        self.statuses: dict[int, int] = {}
        self._servers, self._mark, self._started = servers, mark, time.monotonic()

    def running(self, table: ProcessTable) -> set[int]:
        """Return the pids of the processes that still run."""
        return table.find(self.pids, self._mark, self._started)

    def reap(self, seconds: float) -> None:
        """Read the exit status of every forked process. Call after all of them have ended."""
        for server in dict.fromkeys(self._servers):
            ranks = [rank for rank, owner in enumerate(self._servers) if owner is server]
            for _ in ranks:
                number, status, _ = server.wait_for_exit(seconds)
                self.statuses[ranks[number]] = status

    @property
    def output(self) -> str:
        return (self.folder / "shown.out").read_text()

    @property
    def errors(self) -> str:
        return (self.folder / "shown.err").read_text()


class Lane:
    """One fork server for jobs on one host, or two for jobs on a pair of hosts."""

    def __init__(self, folder: Path, lab: Lab | None = None, first_host: int = 0) -> None:
        self._folder, self._lab, self._first_host = folder, lab, first_host
        if lab is None:
            self.isolated = missing() is None
            prefixes: list[Sequence[str]] = [_ISOLATE if self.isolated else ()]
        else:
            self.isolated = True
            inner = ("sh", "-c", _PRIVATE_MEMORY, "sh")
            prefixes = [lab.command(host, inner) for host in (first_host, first_host + 1)]
        self._servers = [ForkServer(folder, prefix) for prefix in prefixes]

    def close(self) -> None:
        for server in self._servers:
            server.close()

    def start(self, case: Case, argv: Sequence[str], fault: str) -> RunningJob:
        mark = uuid.uuid4().hex
        folder = self._folder / mark
        for name in FOLDERS:
            (folder / name).mkdir(mode=0o700, parents=True)
        common = {
            "YALIS_TEST_MARK": mark,
            "YALIS_TEST_FAULT": fault.replace("FOLDER", str(folder)),
            "YALIS_CACHE": str(cache_dir()),
            "HOME": str(folder / "home"),
            "TMPDIR": str(folder / "tmp"),
            "XDG_RUNTIME_DIR": str(folder / "run"),
        }
        per_host = 2 if case.start == LAUNCHED else 1
        address = self._lab.addresses[self._first_host] if self._lab else "127.0.0.1"
        servers = self._servers * per_host
        jobs = []
        for rank in range(len(servers)):
            env = dict(common)
            if case.start != SELF_STARTED:
                env |= torchrun_variables(rank, per_host, len(self._servers), address, PORT, secret=mark)
            jobs.append({"argv": list(argv), "env": env, "cwd": str(folder), "shown": str(folder / "shown")})
        if len(self._servers) == 1:
            pids = self._servers[0].fork(jobs)
        else:
            pids = [pid for server, job in zip(servers, jobs, strict=True) for pid in server.fork([job])]
        return RunningJob(servers, pids, mark, folder)

    @contextlib.contextmanager
    def network_fault(self, case: Case) -> Iterator[None]:
        """Disconnect the host of the case's rank during the block: its link is down, or packets are lost silently."""
        assert self._lab is not None
        host = self._first_host + case.rank
        if case.fault == "link-down":
            device = ["-n", self._lab.names[host], "link", "set", "eth0"]
            cut, mend = ["down"], ["up"]
        else:
            device = ["-n", "yalis-switch", "link", "set", f"port{host}"]
            cut, mend = ["nomaster"], ["master", "bridge"]
        subprocess.run(["ip", *device, *cut], check=True)
        try:
            yield
        finally:
            subprocess.run(["ip", *device, *mend], check=True)

    def listening_ports(self) -> set[tuple[int, str]]:
        """Return the addresses on which sockets of this lane listen; empty if the lane has no network of its own."""
        found = set()
        for server in self._servers if self.isolated else ():
            for name in ("tcp", "tcp6"):
                lines = Path(f"/proc/{server.pid}/net/{name}").read_text().splitlines()[1:]
                found |= {(server.pid, line.split()[1]) for line in lines if line.split()[3] == "0A"}
        return found

    def shared_memory(self) -> set[tuple[int, str]]:
        """Return the names in this lane's /dev/shm."""
        return {(one.pid, name) for one in self._servers for name in os.listdir(f"/proc/{one.pid}/root/dev/shm")}
