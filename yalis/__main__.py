"""The yalis command and `python -m yalis`. Handles signals before the slow import of the command line."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from types import FrameType


def main() -> int:
    """Run the command line; a signal before it has its own handlers (`cli/signals.py`) ends the process at once."""
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:  # ignored under nohup, for example
            signal.signal(number, _stop)
    from yalis.cli.main import main as run

    return run()


def _stop(number: int, frame: FrameType | None) -> None:
    """Exit without an exception, which an import in progress could catch."""
    with contextlib.suppress(OSError):  # stderr may be closed
        os.write(2, b"yalis: stopped\n")
    os._exit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
