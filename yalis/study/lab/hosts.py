"""A lab of hosts on one machine, for people without a cluster.

Hosts are network namespaces with addresses and names of their own. Without delay and rate they are joined by a bridge;
with them by netem on its ports where the kernel has that, and otherwise by a small switch in user space.
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

from yalis.errors import YalisError, YalisFailure
from yalis.kernels.compiler import Unavailable
from yalis.launch.local import rank_environment
from yalis.log import get_logger
from yalis.study.lab.switch import Switch

log = get_logger(__name__)

MOST_HOSTS = 200
_SWITCH = "yalis-switch"  # a namespace too: its end takes the bridge, or the switch and its devices, with it
_HOST = "yalis-host"
# Where only root writes, and the same for all: namespaces are, too.
_LOCK, _NAMES = (Path("/run") / f"yalis-hosts.{kind}" for kind in ("lock", "names"))
# Debian keeps `ip` and `tc` where a plain user's PATH does not look.
_ELSEWHERE = os.pathsep.join(["/usr/sbin", "/sbin"])
_BECOME = 'hostname "$1" && mount --bind "$2" /etc/hosts && shift 2 && exec "$@"'
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
_BITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}


def parse_delay(text: str) -> float:
    """Seconds of "1ms", "200us", "0.5s" or "0"."""
    found = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)\s*(s|ms|us)", text.strip())
    if text.strip() in ("0", "0.0"):
        return 0.0
    if not found or float(found[1]) * _SECONDS[found[2]] > 10:
        raise YalisError(f"{text!r} is no delay of a link; give one such as 1ms, 200us or 0, at most 10s")
    return float(found[1]) * _SECONDS[found[2]]


def parse_rate(text: str) -> float:
    """Bits a second of "10gbit", "500mbit"."""
    found = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)\s*(kbit|mbit|gbit)", text.strip().lower())
    if not found or float(found[1]) <= 0:
        raise YalisError(f"{text!r} is no rate of a link; give one such as 10gbit or 500mbit")
    return float(found[1]) * _BITS[found[2]]


def missing() -> str | None:
    """Why there can be no lab here: what is missing and what to do about it; None where there can be one."""
    if os.geteuid() != 0:
        return "hosts are network namespaces, which only root can make; type sudo before the same command"
    needed = {"ip": "iproute2", "unshare": "util-linux", "mount": "mount", "hostname": "hostname"}
    for program, package in needed.items():
        if find_program(program) is None:
            return f"hosts are made with `{program}`, which is not installed; on Debian type apt install {package}"
    tried = subprocess.run(["unshare", "--net", "--mount", "--uts", "true"], capture_output=True, text=True)
    if tried.returncode != 0:
        return (
            f"network namespaces are not allowed here ({tried.stderr.strip()}); in a container, start that with "
            "--privileged"
        )
    return None


def find_program(name: str) -> str | None:
    return shutil.which(name) or shutil.which(name, path=_ELSEWHERE)


def _leave(number: int, frame: object) -> NoReturn:
    """A SIGTERM ends the lab as Ctrl-C does."""
    raise SystemExit(128 + number)


class Lab:
    """`hosts` hosts under fixed names: what a killed run left is removed first, and a run beside this one waits."""

    def __init__(self, hosts: int, delay: float | str = 0.0, rate: float | str | None = None) -> None:
        """`delay`: one way between any two hosts, in seconds or such as "1ms"; `rate`: of a host's link, each way."""
        if not 1 <= hosts <= MOST_HOSTS:
            raise YalisError(f"a lab of {hosts} hosts cannot be made; accepted: 1 to {MOST_HOSTS}")
        if reason := missing():
            raise YalisError(reason)
        self.delay = parse_delay(delay) if isinstance(delay, str) else delay
        self.rate = parse_rate(rate) if isinstance(rate, str) else rate
        self.names = [f"{_HOST}{host}" for host in range(hosts)]
        self.addresses = [f"10.77.0.{host + 1}" for host in range(hosts)]
        #: what joins the hosts: "bridge", "netem" or "switch"
        self.network = ""
        self._ip_program = str(find_program("ip"))
        self._started: list[subprocess.Popen[Any]] = []
        self._switch: Switch | None = None
        self._on_term: Any = None

    def __enter__(self) -> Lab:
        # The kernel lets go of it when this process ends, however it ends; programs started here do not inherit it.
        self._lock = _LOCK.open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if socket.gethostname().startswith(_HOST):
                self._lock.close()
                raise YalisError("this is a host of a lab, and there is one lab at a time; run it outside") from None
            log.warning("waiting for another lab on this machine to end")
            fcntl.flock(self._lock, fcntl.LOCK_EX)
        try:
            if threading.current_thread() is threading.main_thread():
                self._on_term = signal.signal(signal.SIGTERM, _leave)
            self._remove()
            self._make()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._remove()
            for process in self._started:
                process.wait()
            _NAMES.unlink(missing_ok=True)
        finally:
            if self._on_term is not None:
                signal.signal(signal.SIGTERM, self._on_term)
                self._on_term = None
            self._lock.close()

    @property
    def dropped(self) -> int:
        """Frames that the switch had no room for; known once the hosts are gone."""
        return self._switch.dropped if self._switch else 0

    def command(self, host: int, argv: Sequence[str]) -> list[str]:
        """What runs `argv` on `host`, where host names are found."""
        return [*self.enter(self.names[host]), *argv]

    def enter(self, name: str) -> list[str]:
        """What makes the command behind it run on the host of this name."""
        inside = ["unshare", "--uts", "sh", "-c", _BECOME, "sh", name, str(_NAMES)]
        return [self._ip_program, "netns", "exec", name, *inside]

    def run(
        self, host: int, argv: Sequence[str], env: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[Any]:
        """A process on `host`, with this environment (a rank's, if none is given); it ends with the hosts."""
        environment = rank_environment({}) if env is None else dict(env)
        process = subprocess.Popen(self.command(host, argv), env=environment, stdin=subprocess.DEVNULL, **options)
        self._started.append(process)
        return process

    def _make(self) -> None:
        self._ip("netns", "add", _SWITCH)
        for name in self.names:
            self._ip("netns", "add", name)
        if not self.delay and not self.rate:
            self._join_by_bridge()
            self.network = "bridge"
        elif self._has_netem():
            self._join_by_bridge()
            self._shape()
            self.network = "netem"
        else:
            self._join_by_switch()
            self.network = "switch"
        for name, address in zip(self.names, self.addresses, strict=True):
            self._ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                self._ip("-n", name, "link", "set", device, "up")
        lines = ["127.0.0.1 localhost", *(f"{a} {n}" for a, n in zip(self.addresses, self.names, strict=True))]
        _NAMES.write_text("\n".join(lines) + "\n")

    def _join_by_bridge(self) -> None:
        self._ip("-n", _SWITCH, "link", "add", "bridge", "type", "bridge")
        self._ip("-n", _SWITCH, "link", "set", "bridge", "up")
        for port, name in enumerate(self.names):
            self._ip("-n", name, "link", "add", "eth0", "type", "veth", "peer", f"port{port}", "netns", _SWITCH)
            self._ip("-n", _SWITCH, "link", "set", f"port{port}", "master", "bridge", "up")

    def _has_netem(self) -> bool:
        """Whether this kernel delays packets itself; asking loads the module where there is one."""
        tc = find_program("tc")
        if tc is None:
            return False
        self._ip("-n", _SWITCH, "link", "set", "lo", "up")
        tried = [tc, "-n", _SWITCH, "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms"]
        return subprocess.run(tried, capture_output=True).returncode == 0

    def _shape(self) -> None:
        """Every packet passes one port on its way out of the bridge: that is its delay."""
        tc = str(find_program("tc"))
        rate = ["rate", f"{self.rate:.0f}bit"] if self.rate else []
        for name in self.names if rate else ():  # and on its way into it, at the sender
            self._do([tc, "-n", name, "qdisc", "add", "dev", "eth0", "root", "netem", *rate, "limit", "100000"])
        for port in range(len(self.names)):
            netem = ["netem", "delay", f"{self.delay * 1e6:.0f}us", *rate, "limit", "100000"]
            self._do([tc, "-n", _SWITCH, "qdisc", "add", "dev", f"port{port}", "root", *netem])

    def _join_by_switch(self) -> None:
        try:
            self._switch = Switch(
                [self._ip_program, "netns", "exec", _SWITCH], len(self.names), self.delay, self.rate or 0.0
            )
        except Unavailable as why:
            raise YalisFailure(
                f"this kernel has no netem, and the switch that would stand in for it cannot be built: {why}"
            ) from why
        self._started.append(self._switch.process)
        for port, name in enumerate(self.names):
            device = f"port{port}"
            address = f"02:00:00:00:{(port + 1) >> 8:02x}:{(port + 1) & 255:02x}"
            self._ip("-n", _SWITCH, "link", "set", device, "address", address, "txqueuelen", "10000")
            self._ip("-n", _SWITCH, "link", "set", device, "netns", name, "name", "eth0")

    def _remove(self) -> None:
        """Ends every process on the hosts, then the hosts; those of any earlier run too."""
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
                    process.poll()  # one that has ended counts until it is waited for
                time.sleep(0.05)
            self._ip("netns", "delete", name)
        for left in (*Path("/dev/shm").glob(f"*{_HOST}*"), *Path(tempfile.gettempdir()).glob(f"ompi.{_HOST}*")):
            shutil.rmtree(left, ignore_errors=True) if left.is_dir() else left.unlink(missing_ok=True)  # Open MPI's

    def _ip(self, *arguments: str) -> str:
        return self._do([self._ip_program, *arguments])

    def _do(self, command: list[str]) -> str:
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            raise YalisFailure(f"the lab of hosts failed: {' '.join(command)}: {done.stderr.strip()}")
        return done.stdout
