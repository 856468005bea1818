"""Build and run the user-space switch, switch.c."""

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
    """A running switch. Its ports are the TAP devices port0, port1, ... of its network namespace."""

    def __init__(self, enter: Sequence[str], ports: int, delay: float, rate: float) -> None:
        """`enter` is a command prefix that runs in the namespace. `rate` is in bits per second; 0 means no limit."""
        self.forwarded = self.dropped = 0
        command = [*enter, str(build()), f"{delay * 1e9:.0f}", f"{rate:.0f}", str(ports)]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # on Ctrl-C the lab ends the ranks first, then the switch
        )
        assert self.process.stdout is not None
        if self.process.stdout.readline() != "ready\n":
            _, errors = self.process.communicate()
            raise YalisFailure(f"the switch of the lab did not start: {errors.strip() or 'no error output'}")

    def stop(self) -> None:
        """End the switch, and read its frame counts."""
        if self.process.poll() is None:
            self.process.terminate()
            output, _ = self.process.communicate()
            if found := re.search(r"forwarded (\d+) dropped (\d+)", output):
                self.forwarded, self.dropped = int(found[1]), int(found[2])


def build() -> Path:
    """Return the program, from the cache or newly built. Raises `Unavailable` if it cannot be built."""
    compiler = need_compiler()

    def compile_into(folder: Path) -> Path:
        run_compiler([*compiler, *FLAGS, str(SOURCE), "-o", str(folder / "switch")])
        return folder / "switch"

    machine = run_compiler([*compiler, *FLAGS, "-dM", "-E", "-x", "c", "/dev/null"])
    return build_cached("switch", "", [SOURCE.read_bytes(), machine], compile_into)
