"""Exceptions whose message is written for the user, and phrases for such messages."""

from __future__ import annotations

from typing import Any


class YalisError(Exception):
    """Invalid input that the user can correct. The message: what was wrong, what is accepted, what to type.

    A setting is named as a keyword argument: `max_model_len=`, `kv_blocks=512`. The command line prints such names as
    flags, on one line, and exits with `exit_code`; --debug adds the traceback.
    """

    exit_code = 2


class YalisFailure(YalisError):
    """A valid request failed for an external reason, such as a full disk or a rank that died.

    `done` holds the partial results, if there are any.
    """

    exit_code = 1
    done: Any = None


class Rank0Unreachable(YalisFailure):
    """This rank could not reach rank 0. It prints the error itself; all others are printed by rank 0."""


def count_of(number: int, noun: str) -> str:
    """Return "1 row" or "3 rows"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def first_line(error: Exception) -> str:
    """Return the first line of an exception's message, for use inside another message."""
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".:")
