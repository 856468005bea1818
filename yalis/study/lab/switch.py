"""The switch in user space: building and running switch.c."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

from yalis.errors import YalisFailure
from yalis.kernels.compiler import build_cached, need_compiler, run_compiler

SOURCE = Path(__file__).with_name("switch.c")
FLAGS = ("-std=gnu11", "-O2")


class Switch:
    """A running switch. Its ports are the devices port0, port1, ... of the network namespace that it runs in."""

    def __init__(self, enter: Sequence[str], ports: int, delay: float, rate: float) -> None:
        """`enter`: words before a command that make it run in the namespace. `rate`: bits a second; 0: no limit."""
        self.forwarded = self.dropped = 0
        command = [*enter, str(build()), f"{delay * 1e9:.0f}", f"{rate:.0f}", str(ports)]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # a Ctrl-C is for the lab, which ends the ranks before their network
        )
        assert self.process.stdout is not None
        if self.process.stdout.readline() != "ready\n":
            _, said = self.process.communicate()
            raise YalisFailure(f"the switch between the lab's hosts did not start: {said.strip() or 'it said nothing'}")

    def stop(self) -> None:
        """End it, and learn what it did."""
        if self.process.poll() is None:
            self.process.terminate()
            said, _ = self.process.communicate()
            if found := re.search(r"forwarded (\d+) dropped (\d+)", said):
                self.forwarded, self.dropped = int(found[1]), int(found[2])


def build() -> Path:
    """The program, from the cache or built now; raises Unavailable where it cannot be."""
    compiler = need_compiler()

    def compile(at: Path) -> Path:
        run_compiler([*compiler, *FLAGS, str(SOURCE), "-o", str(at / "switch")])
        return at / "switch"

    machine = run_compiler([*compiler, *FLAGS, "-dM", "-E", "-x", "c", "/dev/null"])
    return build_cached("switch", "", [SOURCE.read_bytes(), machine], compile)
