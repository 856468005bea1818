"""Programmatic dependent launch (PDL): a kernel starts while the previous kernel of its stream is still running.

A kernel launched this way prefetches its weights, which no kernel writes, and then waits for the previous launch to
finish before it touches anything else. Every PDL kernel waits, so waiting for the previous launch is waiting for all
earlier ones. An ordinary launch starts after the previous one has finished, so both types of launch may be mixed in a
stream. The all-reduce of nvrar may be launched this way too: it waits before it touches its buffers, because they need
operations that do not overlap. Between ranks PDL is off unless YALIS_PDL=all, until it has been measured.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

from yalis import env

MIN_COMPUTE_CAPABILITY = (9, 0)

_enabled: ContextVar[bool] = ContextVar("programmatic dependent launch", default=False)


@contextmanager
def enable_pdl(device: torch.device) -> Iterator[None]:
    """Within the block, launch the kernels of kernels/ops.py with PDL, if the device has it and $YALIS_PDL is not 0."""
    supported = device.type == "cuda" and torch.cuda.get_device_capability(device) >= MIN_COMPUTE_CAPABILITY
    token = _enabled.set(supported and env.pdl())
    try:
        yield
    finally:
        _enabled.reset(token)


def pdl_enabled() -> bool:
    """Whether kernels should be launched with PDL now."""
    return _enabled.get()


def pdl_option(pdl: bool) -> dict[str, Any]:
    """Return Triton's launch option for PDL. It is left out without PDL because the interpreter does not accept it."""
    return {"launch_pdl": True} if pdl else {}
