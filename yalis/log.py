"""Logging, one logger per module, with the rank in front when there is more than one.

A library leaves handlers to the program it is part of; the command line is that program and calls `configure_logging`.
"""

from __future__ import annotations

import logging

from yalis import env


def get_logger(name: str) -> logging.Logger:
    return logging.getLogger(name)


def configure_logging(rank: int) -> None:
    """Send this package's messages to standard error, from the level that the environment asks for."""
    root = logging.getLogger("yalis")
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(f"yalis[{rank}] %(message)s" if rank else "yalis: %(message)s"))
    root.handlers[:] = [handler]
    root.setLevel(env.log_level().upper())
    root.propagate = False
