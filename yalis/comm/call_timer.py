"""Telling whoever profiles how long this rank was inside its communicators, waiting for others included."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from yalis.comm.base import Communicator
from yalis.kernels.native import CallListener, now

autograd: Any = torch.autograd  # whose stubs lack the switch below

CALLS = ("all_reduce", "all_gather", "broadcast", "send", "recv", "barrier")


@contextmanager
def time_calls(groups: Iterable[Communicator], listener: CallListener) -> Iterator[None]:
    """Within, `listener` hears of every call on these groups. Outside, nothing stands before them."""
    several = [group for group in dict.fromkeys(groups) if group.size > 1]
    for group in several:
        for name in CALLS:
            setattr(group, name, _timing(name, getattr(group, name), listener))
    try:
        yield
    finally:
        for group in several:
            for name in CALLS:
                delattr(group, name)


def _timing(name: str, function: Callable[..., Any], listener: CallListener) -> Callable[..., Any]:
    def call(*arguments: Any, **named: Any) -> Any:
        begin = now()
        # torch's profiler must not follow gloo's sends: one that ends after the watch has crashed it.
        autograd._enable_record_function(False)
        try:
            return function(*arguments, **named)
        finally:
            autograd._enable_record_function(True)
            listener(name, begin, now())

    return call
