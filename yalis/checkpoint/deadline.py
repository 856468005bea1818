"""Runs code that comes with a model, such as a chat template, with a time limit."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")


class _Expired(BaseException):
    """Raised in a thread that exceeds its time limit. Not an Exception, so that the code in it does not catch it."""


def call_with_deadline(function: Callable[[], Result], seconds: float) -> Result:
    """Return function(), or raise TimeoutError if it takes longer than `seconds`.

    It runs in a new thread, in which an exception is raised between two Python instructions at the deadline. A signal
    cannot be used instead: it interrupts only the main thread, and the caller may be another one.
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
