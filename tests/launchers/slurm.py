"""A real Slurm that tests start and stop."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tests.multihost.hosts import Hosts
from tests.system import needs
from tests.system.processes import environment

CPUS, GPUS = 8, 4  # configured for each node, whatever the machine has
_START_SECONDS = 30

_CONFIG = """\
ClusterName=test
SlurmctldHost={first}({address})
SlurmctldPort={controller_port}
SlurmdPort={node_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/controller
SlurmdSpoolDir={folder}/node-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldSyslogDebug=quiet
SlurmdSyslogDebug=quiet
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SchedulerType=sched/builtin
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0,sched_interval=1
GresTypes=gpu
KillWait=2
ReturnToService=2
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class Slurm:
    """munged, slurmctld and slurmd with their own key, ports and state folders, separate from an installed Slurm.

    The nodes are this machine, or each of `hosts`. Clients run on the first node.
    """

    def __init__(self, hosts: Hosts | None = None) -> None:
        needs.root("starting Slurm")
        self._programs = {name: needs.program(name) for name in ("munged", "slurmctld", "slurmd", "setpriv")}
        for client in ("srun", "sbatch", "sinfo", "scancel", "squeue"):
            needs.program(client)
        self.folder = Path(tempfile.mkdtemp(prefix="slurm-"))  # short, because a socket path has at most 107 characters
        self.folder.chmod(0o755)
        self._environment = environment(
            {"SLURM_CONF": f"{self.folder}/slurm.conf", "YALIS_MUNGE_SOCKET": f"{self.folder}/munge.socket"}
        )
        self._hosts = hosts
        self.nodes = hosts.names if hosts else [socket.gethostname().split(".")[0]]
        self._daemons: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Slurm:
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(
        self, argv: Sequence[str], *, env: Mapping[str, str] | None = None, timeout: float = 120
    ) -> subprocess.CompletedProcess[str]:
        """Run a Slurm client and capture its output; the caller checks the exit status."""
        return subprocess.run(
            self._command(0, argv),
            env={**self._environment, **(env or {})},
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
        )

    def batch(
        self,
        script: Path,
        *flags: str,
        arguments: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        timeout: float = 120,
    ) -> str:
        """Submit a job script with these arguments, wait for its end and return its output."""
        output = self.folder / "job.out"
        submit = ["sbatch", "--parsable", f"--output={output}", *flags, str(script), *arguments]
        submitted = self.run(submit, env=env)
        assert submitted.returncode == 0, submitted.stderr
        # Faster than `sbatch --wait`, which polls every ten seconds.
        squeue = ["squeue", "--noheader", f"--jobs={submitted.stdout.strip()}"]
        if not self._wait_for(lambda: not self.run(squeue).stdout.strip(), timeout):
            raise TimeoutError(f"the job did not end within {timeout} s; it wrote:\n{output.read_text()}")
        return output.read_text()

    def close(self) -> None:
        if len(self._daemons) == 2 + len(self.nodes):
            self.run(["scancel", "--signal=KILL", "--full", "--user=root"], timeout=20)
            self.run(["scancel", "--user=root"], timeout=20)
            self._wait_for(lambda: not self.run(["squeue", "--noheader"]).stdout.strip())
        for daemon in reversed(self._daemons):
            daemon.terminate()
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        self._daemons.clear()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _start(self) -> None:
        for name in ("controller", *(f"node-{node}" for node in self.nodes)):
            (self.folder / name).mkdir()
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        addresses = self._hosts.addresses if self._hosts else ["127.0.0.1"]
        controller_port, node_port = _free_ports(2)
        text = _CONFIG.format(
            folder=self.folder,
            first=self.nodes[0],
            address=addresses[0],
            controller_port=controller_port,
            node_port=node_port,
        )
        for name, address in zip(self.nodes, addresses, strict=True):
            text += f"NodeName={name} NodeAddr={address} CPUs={CPUS} Gres=gpu:{GPUS} State=UNKNOWN\n"
        config = self.folder / "slurm.conf"
        config.write_text(text)
        # Cgroups are not used, but without a configured plugin slurmd searches for one and exits if there is none.
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n")
        for gpu in range(GPUS):
            (self.folder / f"gpu{gpu}").touch()
        (self.folder / "gres.conf").write_text(f"AutoDetect=off\nName=gpu File={self.folder}/gpu[0-{GPUS - 1}]\n")
        files = ("socket", "key-file", "pid-file", "seed-file", "log-file")
        self._daemon(
            0,
            "munged",
            "--foreground",
            "--force",
            *(f"--{file}={self.folder}/munge.{file.split('-')[0]}" for file in files),
        )
        self._wait_for((self.folder / "munge.socket").exists)
        self._daemon(0, "slurmctld", "-D", "-i", "-f", str(config))
        for node in range(len(self.nodes)):
            self._daemon(node, "slurmd", "-D", "-f", str(config))
        sinfo = ["sinfo", "--noheader", "--Node", "--format=%T"]
        if not self._wait_for(lambda: self.run(sinfo).stdout.split() == ["idle"] * len(self.nodes)):
            logs = "".join(path.read_text(errors="replace")[-3000:] for path in sorted(self.folder.glob("*.log")))
            raise RuntimeError(f"Slurm was not ready after {_START_SECONDS} s:\n{logs}")

    def _command(self, node: int, argv: Sequence[str]) -> list[str]:
        return self._hosts.command(node, argv) if self._hosts else list(argv)

    def _daemon(self, node: int, name: str, *arguments: str) -> None:
        """Start a daemon in the foreground; it ends with this process, even if that is killed."""
        argv = [self._programs["setpriv"], "--pdeathsig=TERM", self._programs[name], *arguments]
        with (self.folder / f"{name}-{self.nodes[node]}.log").open("wb") as log:
            self._daemons.append(
                subprocess.Popen(
                    self._command(node, argv),
                    env=self._environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,  # Ctrl-C must not reach it; `close` stops the daemons in order
                )
            )

    def _wait_for(self, ready: Callable[[], bool], seconds: float = _START_SECONDS) -> bool:
        end = time.monotonic() + seconds
        while not ready():
            if time.monotonic() > end or any(daemon.poll() is not None for daemon in self._daemons):
                return False
            time.sleep(0.1)
        return True


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for sock in sockets:
            sock.bind(("127.0.0.1", 0))
        return [sock.getsockname()[1] for sock in sockets]
    finally:
        for sock in sockets:
            sock.close()
