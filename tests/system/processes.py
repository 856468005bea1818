"""The environment of processes that tests start, and the list of running processes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment for ranks of a test: one thread, this source tree, no variables of Slurm or Triton."""
    removed = ("TRITON_INTERPRET", "SLURM_")
    variables = {name: value for name, value in os.environ.items() if not name.startswith(removed)}
    return {**variables, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **(extra or {})}


def commands() -> list[str]:
    """Return the command lines of all processes."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.append(path.read_bytes().replace(b"\0", b" ").decode(errors="replace").strip())
        except OSError:  # the process has exited meanwhile
            continue
    return found
