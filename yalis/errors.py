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

    `done` holds the partial results, if there are any. `printed`: the message is on stderr already.
    """

    exit_code = 1
    done: Any = None
    printed: bool = False


class PeerLost(YalisFailure):
    """Another rank cannot be reached: usually a consequence of its own error, which is then the one to report."""


class RankTraceback(Exception):
    """The traceback of an error on another rank, as text. It is the cause of the YalisFailure that reports it."""


class NotJoined(YalisFailure):
    """This rank could not join the job. It prints the error itself; all others are printed by rank 0."""


def count_of(number: int, noun: str) -> str:
    """Return "1 row" or "3 rows"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def describe_error(error: BaseException) -> str:
    """Return "RuntimeError: MESSAGE" with the first line of the message; without the type if it is for the user."""
    name = type(error).__name__
    if isinstance(error, MemoryError):
        return f"{name}: out of memory"
    message = first_line(error)
    return message if isinstance(error, YalisError) or message == name else f"{name}: {message}"


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's message, for use inside another message."""
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".:")
