"""Logging: one logger per module; messages of ranks other than 0 start with the rank.

As a library, yalis installs no handlers. Only the command line does, by calling `configure_logging`. `logging` is
imported on first use: it is a tenth of what a rank imports before it joins.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from yalis import env

if TYPE_CHECKING:
    import logging


def get_logger(name: str) -> logging.Logger:
    import logging

    return logging.getLogger(name)


def configure_logging(rank: int) -> None:
    """Log this package's messages to stderr, from the level in $YALIS_LOG on."""
    import logging

    root = logging.getLogger("yalis")
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(f"yalis[{rank}] %(message)s" if rank else "yalis: %(message)s"))
    root.handlers[:] = [handler]
    root.setLevel(env.log_level().upper())
    root.propagate = False
