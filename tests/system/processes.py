"""Processes of the tests: what they inherit, and which ones there are."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's, less what other tests and an allocation around them left; ranks import this tree's package."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("TRITON_INTERPRET", "SLURM_"))}
    return {**kept, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **(extra or {})}


def commands() -> list[str]:
    """The command line of every process."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.append(path.read_bytes().replace(b"\0", b" ").decode(errors="replace").strip())
        except OSError:  # it ended meanwhile
            continue
    return found
