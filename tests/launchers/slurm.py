"""A real Slurm of one node, for as long as a test needs it."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tests.system import needs

CPUS, GPUS = 8, 4  # what the node claims to have, whatever the machine has
_START_SECONDS = 30

_CONFIG = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmdPort={node_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/controller
SlurmdSpoolDir={folder}/node
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
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
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} Gres=gpu:{gpus} State=UNKNOWN
PartitionName=all Nodes={host} Default=YES MaxTime=INFINITE State=UP
"""


class Slurm:
    """munged, slurmctld and slurmd with a key, ports and state folders of their own, beside any the machine has."""

    def __init__(self) -> None:
        needs.root("starting Slurm")
        self._programs = {name: needs.program(name) for name in ("munged", "slurmctld", "slurmd", "setpriv")}
        for client in ("srun", "sbatch", "sinfo", "scancel", "squeue"):
            needs.program(client)
        self.folder = Path(tempfile.mkdtemp(prefix="slurm-"))  # short: a socket's path has at most 107 characters
        self.folder.chmod(0o755)
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("SLURM_")},
            "SLURM_CONF": str(self.folder / "slurm.conf"),
        }
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
        """A client's command; its output is captured, its exit status left to the caller."""
        return subprocess.run(
            argv,
            env={**self.environment, **(env or {})},
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
        )

    def batch(self, script: Path, *flags: str, timeout: float = 120) -> str:
        """What a job script wrote, once its job has ended."""
        output = self.folder / "job.out"
        submitted = self.run(["sbatch", "--parsable", f"--output={output}", *flags, str(script)])
        assert submitted.returncode == 0, submitted.stderr
        # `sbatch --wait` would look only every ten seconds.
        squeue = ["squeue", "--noheader", f"--jobs={submitted.stdout.strip()}"]
        if not self._wait_for(lambda: not self.run(squeue).stdout.strip(), timeout):
            raise TimeoutError(f"the job did not end within {timeout} s; it wrote:\n{output.read_text()}")
        return output.read_text()

    def close(self) -> None:
        if len(self._daemons) == 3:
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
        for name in ("controller", "node"):
            (self.folder / name).mkdir()
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        controller_port, node_port = _free_ports(2)
        host = socket.gethostname().split(".")[0]
        config = self.folder / "slurm.conf"
        config.write_text(
            _CONFIG.format(
                host=host,
                folder=self.folder,
                cpus=CPUS,
                gpus=GPUS,
                controller_port=controller_port,
                node_port=node_port,
            )
        )
        for gpu in range(GPUS):
            (self.folder / f"gpu{gpu}").touch()
        (self.folder / "gres.conf").write_text(f"AutoDetect=off\nName=gpu File={self.folder}/gpu[0-{GPUS - 1}]\n")
        files = ("socket", "key-file", "pid-file", "seed-file", "log-file")
        self._daemon(
            "munged",
            "--foreground",
            "--force",
            *(f"--{file}={self.folder}/munge.{file.split('-')[0]}" for file in files),
        )
        self._wait_for((self.folder / "munge.socket").exists)
        self._daemon("slurmctld", "-D", "-i", "-f", str(config))
        self._daemon("slurmd", "-D", "-f", str(config))
        if not self._wait_for(lambda: self.run(["sinfo", "--noheader", "--format=%T"]).stdout.split() == ["idle"]):
            logs = "".join(path.read_text(errors="replace")[-3000:] for path in sorted(self.folder.glob("*.log")))
            raise RuntimeError(f"Slurm was not ready after {_START_SECONDS} s:\n{logs}")

    def _daemon(self, name: str, *arguments: str) -> None:
        """In the foreground, and ended with this process even if that is killed."""
        log = (self.folder / f"{name}.log").open("wb")
        with log:
            self._daemons.append(
                subprocess.Popen(
                    [self._programs["setpriv"], "--pdeathsig=TERM", self._programs[name], *arguments],
                    env=self.environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,  # a Ctrl-C is for the tests; `close` ends the daemons in order
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
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()
