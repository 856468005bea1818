"""The one exception whose message is a sentence for the user."""

from __future__ import annotations


class YalisError(Exception):
    """Something the user can mend: what was wrong, what is accepted, what to type.

    The command line prints it as one line and exits non-zero; a traceback only with --debug.
    """
