"""Hosts as network namespaces: own addresses and names, joined by a bridge."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.system import needs
from tests.system.processes import environment

_SWITCH = "yalis-switch"  # a namespace too, so that deleting namespaces takes the bridge and all links with it
_LOCK, _NAMES = (Path(tempfile.gettempdir()) / f"yalis-hosts.{kind}" for kind in ("lock", "names"))


class Hosts:
    """`count` hosts under fixed names: what a killed run left is removed first, and a run beside this one waits."""

    def __init__(self, count: int) -> None:
        needs.namespaces()
        self._ip_program = needs.program("ip")
        self.names = [f"yalis-host{host}" for host in range(count)]
        self.addresses = [f"10.77.0.{host + 1}" for host in range(count)]
        self._started: list[subprocess.Popen[Any]] = []

    def __enter__(self) -> Hosts:
        self._lock = _LOCK.open("w")  # the kernel lets go of it when this process ends, however it ends
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        try:
            self._remove()
            self._make()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._remove()
        for process in self._started:
            process.wait()
        _NAMES.unlink(missing_ok=True)
        self._lock.close()

    def command(self, host: int, argv: Sequence[str]) -> list[str]:
        """What runs `argv` on `host`, where host names are found."""
        become = 'hostname "$1" && mount --bind "$2" /etc/hosts && shift 2 && exec "$@"'
        enter = [self._ip_program, "netns", "exec", self.names[host], "unshare", "--uts", "sh", "-c", become, "sh"]
        return [*enter, self.names[host], str(_NAMES), *argv]

    def run(
        self, host: int, argv: Sequence[str], env: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[Any]:
        """A process on `host`; it ends with the hosts."""
        process = subprocess.Popen(self.command(host, argv), env=environment(env), stdin=subprocess.DEVNULL, **options)
        self._started.append(process)
        return process

    def _make(self) -> None:
        self._ip("netns", "add", _SWITCH)
        self._ip("-n", _SWITCH, "link", "add", "bridge", "type", "bridge")
        self._ip("-n", _SWITCH, "link", "set", "bridge", "up")
        lines = ["127.0.0.1 localhost"]
        for port, (name, address) in enumerate(zip(self.names, self.addresses, strict=True)):
            self._ip("netns", "add", name)
            self._ip("-n", name, "link", "add", "eth0", "type", "veth", "peer", f"port{port}", "netns", _SWITCH)
            self._ip("-n", _SWITCH, "link", "set", f"port{port}", "master", "bridge", "up")
            self._ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                self._ip("-n", name, "link", "set", device, "up")
            lines.append(f"{address} {name}")
        _NAMES.write_text("\n".join(lines) + "\n")

    def _remove(self) -> None:
        """Ends every process on the hosts, then the hosts; those of any earlier run too."""
        for name in self._ip("netns", "list").split():
            if name != _SWITCH and not name.startswith("yalis-host"):
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

    def _ip(self, *arguments: str) -> str:
        done = subprocess.run([self._ip_program, *arguments], capture_output=True, text=True)
        if done.returncode != 0:
            raise RuntimeError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
        return done.stdout
