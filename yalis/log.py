"""Logging, one logger per module, with the rank in front when there is more than one."""

from __future__ import annotations

import logging

from yalis import env

_ready = False


def get_logger(name: str) -> logging.Logger:
    _set_up()
    return logging.getLogger(name)


def _set_up() -> None:
    global _ready
    if _ready:
        return
    _ready = True
    root = logging.getLogger("yalis")
    handler = logging.StreamHandler()
    rank = env.rank()
    handler.setFormatter(logging.Formatter(f"yalis[{rank}] %(message)s" if rank else "yalis: %(message)s"))
    root.addHandler(handler)
    root.setLevel(env.log_level().upper())
    root.propagate = False
