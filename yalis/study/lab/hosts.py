"""A lab: several emulated hosts on one machine, for use without a cluster.

Each host is a network namespace with its own address and name. A bridge connects them. A delay and a rate limit are
added with netem if the kernel has it, otherwise a switch in user space replaces the bridge.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from yalis.errors import YalisError, YalisFailure, count_of
from yalis.host_memory import read_host_memory
from yalis.kernels.compiler import Unavailable
from yalis.launch.local import rank_environment
from yalis.log import get_logger
from yalis.study.lab.switch import Switch

log = get_logger(__name__)

MAX_HOSTS = 200
_RANK_BYTES = 2**29  # memory of a Python process that has imported torch, rounded up
_SWITCH = "yalis-switch"  # the namespace of the bridge or switch; deleting it deletes its devices
_HOST = "yalis-host"
# Fixed paths that only root can write: namespaces are global to the machine and need root too.
_LOCK, _HOSTS_FILE = (Path("/run") / f"yalis-hosts.{suffix}" for suffix in ("lock", "names"))
# Debian installs `ip` and `tc` here, which is not in the PATH of ordinary users.
_SBIN_PATH = os.pathsep.join(["/usr/sbin", "/sbin"])
_SET_HOST_NAME = 'hostname "$1" && mount --bind "$2" /etc/hosts && shift 2 && exec "$@"'
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
_BITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}


def parse_delay(text: str) -> float:
    """Parse a delay such as "1ms", "200us", "0.5s" or "0" into seconds."""
    found = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)\s*(s|ms|us)", text.strip())
    if text.strip() in ("0", "0.0"):
        return 0.0
    if not found or float(found[1]) * _SECONDS[found[2]] > 10:
        raise YalisError(f"{text!r} is not a link delay; give one such as 1ms, 200us or 0, at most 10s")
    return float(found[1]) * _SECONDS[found[2]]


def parse_rate(text: str) -> float:
    """Parse a rate such as "10gbit" or "500mbit" into bits per second."""
    found = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)\s*(kbit|mbit|gbit)", text.strip().lower())
    if not found or float(found[1]) <= 0:
        raise YalisError(f"{text!r} is not a link rate; give one such as 10gbit or 500mbit")
    return float(found[1]) * _BITS[found[2]]


def missing() -> str | None:
    """Return why a lab cannot be created here and what to do about it; None if it can."""
    if os.geteuid() != 0:
        return "hosts are network namespaces, which only root can create; type sudo before the same command"
    needed = {"ip": "iproute2", "unshare": "util-linux", "mount": "mount", "hostname": "hostname"}
    for program, package in needed.items():
        if find_program(program) is None:
            return f"creating hosts needs `{program}`, which is not installed; on Debian type apt install {package}"
    tried = subprocess.run(["unshare", "--net", "--mount", "--uts", "true"], capture_output=True, text=True)
    if tried.returncode != 0:
        return (
            f"network namespaces are not allowed here ({tried.stderr.strip()}); if this is a container, start it with "
            "--privileged"
        )
    return None


def check_memory(ranks: int) -> None:
    """Raise YalisError if the available memory of this machine is too small for this many ranks."""
    available = read_host_memory().available
    if available is not None and ranks > (most := max(1, available // _RANK_BYTES)):
        raise YalisError(
            f"{ranks} ranks need about {ranks * _RANK_BYTES / 2**30:g} GiB of memory, of which "
            f"{available / 2**30:.1f} GiB are available; give at most {count_of(most, 'rank')} (hosts x ranks per host)"
        )


def find_program(name: str) -> str | None:
    return shutil.which(name) or shutil.which(name, path=_SBIN_PATH)


def _exit_on_signal(number: int, frame: object) -> NoReturn:
    """Handle SIGTERM like Ctrl-C, so that the lab is removed."""
    raise SystemExit(128 + number)


class Lab:
    """Creates hosts on entry and removes them on exit.

    Host names are fixed, so there is one lab per machine at a time. Hosts that a killed process left are removed first,
    and a second lab waits for the first to end."""

    def __init__(self, hosts: int, delay: float | str = 0.0, rate: float | str | None = None) -> None:
        """`delay` is one-way between any two hosts, in seconds or a string such as "1ms".

        `rate` limits each direction of a host's link, in bits per second or a string such as "10gbit"."""
        if not 1 <= hosts <= MAX_HOSTS:
            raise YalisError(f"a lab cannot have {hosts} hosts; accepted: 1 to {MAX_HOSTS}")
        if reason := missing():
            raise YalisError(reason)
        self.delay = parse_delay(delay) if isinstance(delay, str) else delay
        self.rate = parse_rate(rate) if isinstance(rate, str) else rate
        self.names = [f"{_HOST}{host}" for host in range(hosts)]
        self.addresses = [f"10.77.0.{host + 1}" for host in range(hosts)]
        #: how hosts are connected: "bridge", "netem" (on a bridge) or "switch"
        self.network = ""
        self._ip_program = str(find_program("ip"))
        self._started: list[subprocess.Popen[Any]] = []
        self._switch: Switch | None = None
        self._on_term: Any = None

    def __enter__(self) -> Lab:
        # The kernel releases the lock when this process ends in any way. Child processes do not inherit it.
        self._lock = _LOCK.open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if socket.gethostname().startswith(_HOST):
                self._lock.close()
                raise YalisError(
                    "this is a host of a lab, and there is one lab per machine; run the command outside of it"
                ) from None
            log.warning("waiting until another lab on this machine ends")
            fcntl.flock(self._lock, fcntl.LOCK_EX)
        try:
            if threading.current_thread() is threading.main_thread():
                self._on_term = signal.signal(signal.SIGTERM, _exit_on_signal)
            self._remove()
            self._create()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._remove()
            for process in self._started:
                process.wait()
            _HOSTS_FILE.unlink(missing_ok=True)
        finally:
            if self._on_term is not None:
                signal.signal(signal.SIGTERM, self._on_term)
                self._on_term = None
            self._lock.close()

    @property
    def dropped(self) -> int:
        """Frames the switch dropped because a queue was full; known after the lab has ended."""
        return self._switch.dropped if self._switch else 0

    def command(self, host: int, argv: Sequence[str]) -> list[str]:
        """Return the command that runs `argv` on `host`, where the names of all hosts resolve."""
        return [*self.enter(self.names[host]), *argv]

    def enter(self, name: str) -> list[str]:
        """Return a command prefix that runs the rest of the command on the host of this name."""
        set_name = ["unshare", "--uts", "sh", "-c", _SET_HOST_NAME, "sh", name, str(_HOSTS_FILE)]
        return [self._ip_program, "netns", "exec", name, *set_name]

    def run(
        self, host: int, argv: Sequence[str], env: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[Any]:
        """Start a process on `host`, by default with the environment of a rank. It is killed when the lab ends."""
        environment = rank_environment({}) if env is None else dict(env)
        process = subprocess.Popen(self.command(host, argv), env=environment, stdin=subprocess.DEVNULL, **options)
        self._started.append(process)
        return process

    def _create(self) -> None:
        self._ip("netns", "add", _SWITCH)
        for name in self.names:
            self._ip("netns", "add", name)
        if not self.delay and not self.rate:
            self._connect_by_bridge()
            self.network = "bridge"
        elif self._has_netem():
            self._connect_by_bridge()
            self._shape()
            self.network = "netem"
        else:
            self._connect_by_switch()
            self.network = "switch"
        for name, address in zip(self.names, self.addresses, strict=True):
            self._ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                self._ip("-n", name, "link", "set", device, "up")
        lines = ["127.0.0.1 localhost", *(f"{a} {n}" for a, n in zip(self.addresses, self.names, strict=True))]
        _HOSTS_FILE.write_text("\n".join(lines) + "\n")

    def _connect_by_bridge(self) -> None:
        self._ip("-n", _SWITCH, "link", "add", "bridge", "type", "bridge")
        self._ip("-n", _SWITCH, "link", "set", "bridge", "up")
        for port, name in enumerate(self.names):
            self._ip("-n", name, "link", "add", "eth0", "type", "veth", "peer", f"port{port}", "netns", _SWITCH)
            self._ip("-n", _SWITCH, "link", "set", f"port{port}", "master", "bridge", "up")

    def _has_netem(self) -> bool:
        """Return whether the kernel has netem. Trying it loads the module if there is one."""
        tc = find_program("tc")
        if tc is None:
            return False
        self._ip("-n", _SWITCH, "link", "set", "lo", "up")
        tried = [tc, "-n", _SWITCH, "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms"]
        return subprocess.run(tried, capture_output=True).returncode == 0

    def _shape(self) -> None:
        """Add the delay to the bridge ports: every packet leaves the bridge through one port."""
        tc = str(find_program("tc"))
        rate = ["rate", f"{self.rate:.0f}bit"] if self.rate else []
        for name in self.names if rate else ():  # also limit the rate from the sender into the bridge
            self._run_command(
                [tc, "-n", name, "qdisc", "add", "dev", "eth0", "root", "netem", *rate, "limit", "100000"]
            )
        for port in range(len(self.names)):
            netem = ["netem", "delay", f"{self.delay * 1e6:.0f}us", *rate, "limit", "100000"]
            self._run_command([tc, "-n", _SWITCH, "qdisc", "add", "dev", f"port{port}", "root", *netem])

    def _connect_by_switch(self) -> None:
        try:
            self._switch = Switch(
                [self._ip_program, "netns", "exec", _SWITCH], len(self.names), self.delay, self.rate or 0.0
            )
        except Unavailable as why:
            raise YalisFailure(
                f"this kernel has no netem, and the switch that replaces it cannot be built: {why}"
            ) from why
        self._started.append(self._switch.process)
        for port, name in enumerate(self.names):
            device = f"port{port}"
            address = f"02:00:00:00:{(port + 1) >> 8:02x}:{(port + 1) & 255:02x}"
            self._ip("-n", _SWITCH, "link", "set", device, "address", address, "txqueuelen", "10000")
            self._ip("-n", _SWITCH, "link", "set", device, "netns", name, "name", "eth0")

    def _remove(self) -> None:
        """Kill every process on the hosts and delete the hosts, including those of earlier runs."""
        if self._switch:
            self._switch.stop()
        for name in self._ip("netns", "list").split():
            if name != _SWITCH and not name.startswith(_HOST):
                continue
            while pids := self._ip("netns", "pids", name).split():
                for pid in pids:
                    try:
                        os.kill(int(pid), signal.SIGKILL)
                    except ProcessLookupError:
                        continue
                for process in self._started:
                    process.poll()  # reap it: `ip netns pids` lists zombies too
                time.sleep(0.05)
            self._ip("netns", "delete", name)
        for path in (*Path("/dev/shm").glob(f"*{_HOST}*"), *Path(tempfile.gettempdir()).glob(f"ompi.{_HOST}*")):
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)  # of Open MPI

    def _ip(self, *arguments: str) -> str:
        return self._run_command([self._ip_program, *arguments])

    def _run_command(self, command: list[str]) -> str:
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            raise YalisFailure(f"creating or removing hosts failed: {' '.join(command)}: {done.stderr.strip()}")
        return done.stdout
