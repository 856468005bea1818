"""Dependent launches: a kernel begins while the one before it in its stream still runs.

It asks for its weights, which nobody writes, and waits for the launch before to end before it touches anything else.
Every kernel that is launched so waits: who waits for the last has waited for all. Any other launch begins when the one
before it has ended, and is over when it ends itself, so both kinds may take turns in a stream. Where ranks communicate
it stays off: the buffers of nvrar rely on launches that begin in turn.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

from yalis import env

OLDEST_GPU = (9, 0)

_wanted: ContextVar[bool] = ContextVar("dependent launches", default=False)


@contextmanager
def dependent_launches(device: torch.device) -> Iterator[None]:
    """Within, what kernels/ops.py launches on this device is dependent, where it can be and $YALIS_PDL is not 0."""
    able = device.type == "cuda" and torch.cuda.get_device_capability(device) >= OLDEST_GPU and env.pdl()
    token = _wanted.set(able)
    try:
        yield
    finally:
        _wanted.reset(token)


def wanted() -> bool:
    """Whether a launch should be dependent now."""
    return _wanted.get()


def option(pdl: bool) -> dict[str, Any]:
    """The launch option of a dependent launch; the interpreter knows no such option."""
    return {"launch_pdl": True} if pdl else {}
