"""How much memory a piece of work took at most, beyond what the process held before."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

_RESET, _STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")


def peak_extra_bytes(work: Callable[[], None]) -> int:
    """Resident memory, file pages included, measured by the kernel."""
    try:
        _RESET.write_text("5")
    except OSError:
        pytest.skip("the kernel does not let the peak of resident memory be reset")
    before = _kilobytes("VmRSS")
    work()
    return (_kilobytes("VmHWM") - before) * 1024


def _kilobytes(name: str) -> int:
    return int(next(line for line in _STATUS.read_text().splitlines() if line.startswith(name)).split()[1])
