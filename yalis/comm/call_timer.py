"""Times calls on communicators for profiling. Time spent waiting for other ranks is included."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from yalis.comm.base import Communicator
from yalis.kernels.native import CallListener, now

autograd: Any = torch.autograd  # its type stubs lack _enable_record_function

METHODS = ("all_reduce", "all_gather", "broadcast", "send", "recv", "barrier")


@contextmanager
def time_calls(groups: Iterable[Communicator], listener: CallListener) -> Iterator[None]:
    """Call `listener(name, begin, end)` for every call on these groups while the context is open.

    Outside of it, calls have no overhead. Groups of one rank are skipped.
    """
    unique_groups = [group for group in dict.fromkeys(groups) if group.size > 1]
    for group in unique_groups:
        for name in METHODS:
            setattr(group, name, _timed(name, getattr(group, name), listener))
    try:
        yield
    finally:
        for group in unique_groups:
            for name in METHODS:
                delattr(group, name)


def _timed(name: str, function: Callable[..., Any], listener: CallListener) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        begin = now()
        # torch's profiler must not record gloo's sends: it crashes if one completes after the profiler has stopped.
        autograd._enable_record_function(False)
        try:
            return function(*args, **kwargs)
        finally:
            autograd._enable_record_function(True)
            listener(name, begin, now())

    return call
