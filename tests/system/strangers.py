"""Run a function as another user."""

from __future__ import annotations

import os
import pickle
import signal
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tests.system import needs

NOBODY = 65534


def as_nobody(function: Callable[..., Any], *args: Any) -> Any:
    """Return what the function returns in a process of the user `nobody`."""
    reader, writer = os.pipe()
    with nobody_running(_send_result, writer, function, *args):
        os.close(writer)
        with open(reader, "rb") as file:
            value, error = pickle.load(file)
    assert error is None, error
    return value


@contextmanager
def nobody_running(function: Callable[..., Any], *args: Any) -> Iterator[int]:
    """Run the function in a process of the user `nobody` during the block; it is killed at its end. Yields its pid."""
    needs.root("running a process as another user")
    "".encode("idna")  # used by socket; nobody may not be able to import it, nor anything else
    pid = os.fork()
    if pid == 0:
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            function(*args)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    try:
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _send_result(writer: int, function: Callable[..., Any], *args: Any) -> None:
    value, error = None, None
    try:
        value = function(*args)
    except BaseException:
        error = traceback.format_exc()
    os.write(writer, pickle.dumps((value, error)))
