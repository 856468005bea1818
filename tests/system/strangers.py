"""Run a function in a process of another user, possibly on another emulated host."""

from __future__ import annotations

import ctypes
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
    return call(_as_nobody, function, *args)


@contextmanager
def nobody_running(function: Callable[..., Any], *args: Any) -> Iterator[int]:
    """Run the function in a process of the user `nobody` during the block; it is killed at its end. Yields its pid."""
    with running(_as_nobody, function, *args) as pid:
        yield pid


def call(function: Callable[..., Any], *args: Any) -> Any:
    """Return what the function returns in a new process."""
    reader, writer = os.pipe()
    with running(_send_result, writer, function, *args):
        os.close(writer)
        with open(reader, "rb") as file:
            value, error = pickle.load(file)
    assert error is None, error
    return value


@contextmanager
def running(function: Callable[..., Any], *args: Any) -> Iterator[int]:
    """Run the function in a new process during the block; it is killed at its end. Yields its pid."""
    needs.root("running a process as another user")
    "".encode("idna")  # sockets need this module, and nobody may not be able to read the files of this Python
    pid = os.fork()
    if pid == 0:
        try:
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


def become_nobody() -> None:
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)


def enter_namespace(name: str) -> None:
    """Move this process to the network of a host of the lab."""
    with open(f"/run/netns/{name}") as file:
        assert ctypes.CDLL(None).setns(file.fileno(), 0) == 0


def _as_nobody(function: Callable[..., Any], *args: Any) -> Any:
    become_nobody()
    return function(*args)


def _send_result(writer: int, function: Callable[..., Any], *args: Any) -> None:
    value, error = None, None
    try:
        value = function(*args)
    except BaseException:
        error = traceback.format_exc()
    os.write(writer, pickle.dumps((value, error)))
