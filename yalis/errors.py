"""The exceptions whose message is a sentence for the user."""

from __future__ import annotations

from typing import Any


class YalisError(Exception):
    """Something the user can mend: what was wrong, what is accepted, what to type.

    The command line prints it as one line and exits non-zero; a traceback only with --debug.
    """

    exit_code = 2


class YalisFailure(YalisError):
    """The request was fine and the world was not: a full disk, a file that vanished.

    `done` is what there is of the work, where there is something.
    """

    exit_code = 1
    done: Any = None


class Rank0Unreachable(YalisFailure):
    """This rank could not reach rank 0. It prints the error itself; all others are printed by rank 0."""


def first_line(error: Exception) -> str:
    """What somebody else's exception says, short enough to stand inside a sentence."""
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".:")
