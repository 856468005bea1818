"""Runs code that comes with a model, such as a chat template, for a limited time."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")


class _Expired(BaseException):
    """Raised in a thread whose time is over. Not an Exception, so that no handler on the way catches it."""


def call_with_deadline(function: Callable[[], Result], seconds: float) -> Result:
    """Return function(), or raise TimeoutError if it takes longer than `seconds`.

    It runs in a thread of its own, which is ended by an exception between two Python instructions. A thread is needed
    because a Python call can be interrupted only from another one, and the caller need not be the main thread.
    """
    results: list[Result] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            results.append(function())
        except Exception as error:
            errors.append(error)
        except _Expired:
            pass

    thread = threading.Thread(target=run, name="yalis-deadline", daemon=True)
    thread.start()
    thread.join(seconds)
    if results:
        return results[0]
    if errors:
        raise errors[0]
    assert thread.ident is not None
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(_Expired))
    raise TimeoutError(f"it ran for more than {seconds:g} s")
