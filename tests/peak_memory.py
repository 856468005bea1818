"""Measure the peak memory of a function."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

_RESET, _STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")


def peak_extra_bytes(work: Callable[[], None]) -> int:
    """Return the peak resident memory of `work` above the current one, in bytes; file pages are included."""
    try:
        _RESET.write_text("5")
    except OSError:
        pytest.skip("the kernel does not allow resetting the peak of resident memory")
    before = _kilobytes("VmRSS")
    work()
    return (_kilobytes("VmHWM") - before) * 1024


def _kilobytes(name: str) -> int:
    return int(next(line for line in _STATUS.read_text().splitlines() if line.startswith(name)).split()[1])
