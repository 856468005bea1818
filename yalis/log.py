"""One logger per module. As a library, yalis installs no handlers; the command line does (cli/log_handler.py)."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import logging


def get_logger(name: str) -> logging.Logger:
    import logging  # a tenth of what a rank imports before it joins, so on first use

    return logging.getLogger(name)
