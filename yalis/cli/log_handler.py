"""Writes the log to stderr; messages of ranks other than 0 start with the rank."""

from __future__ import annotations

import logging
from collections.abc import Callable

from yalis import env


class _Formatter(logging.Formatter):
    def __init__(self, pattern: str, reword: Callable[[str], str]) -> None:
        super().__init__(pattern)
        self._reword = reword

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        return self._reword(text) if record.levelno >= logging.WARNING else text


def configure_logging(rank: int, reword: Callable[[str], str]) -> None:
    """Log this package's messages to stderr, from the level in $YALIS_LOG on. Warnings are written with `reword`."""
    root = logging.getLogger("yalis")
    handler = logging.StreamHandler()
    handler.setFormatter(_Formatter(f"yalis[{rank}] %(message)s" if rank else "yalis: %(message)s", reword))
    root.handlers[:] = [handler]
    root.setLevel(env.log_level().upper())
    root.propagate = False
