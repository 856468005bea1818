"""Status output on stderr: a progress line, notes, and the formatting of durations and rates."""

from __future__ import annotations

import shutil
import sys
import time
from typing import TextIO

_REDRAW_SECONDS = 0.1
_LINE_SECONDS = 20.0


class ProgressLine:
    """A progress line on stderr: redrawn in place on a terminal, a new line every 20 seconds in a log file.

    The end of the `with` block erases it from the terminal.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._is_terminal = self._stream.isatty()
        self._last = 0.0 if self._is_terminal else time.monotonic()  # short runs write nothing to a log

    def show(self, text: str) -> None:
        now = time.monotonic()
        if now - self._last < (_REDRAW_SECONDS if self._is_terminal else _LINE_SECONDS):
            return
        self._last = now
        if self._is_terminal:
            width = shutil.get_terminal_size().columns
            print(f"\r\x1b[K{text[: width - 1]}", end="", file=self._stream, flush=True)
        else:
            print(f"yalis: {text}", file=self._stream, flush=True)

    def clear(self) -> None:
        if self._is_terminal and self._last:
            print("\r\x1b[K", end="", file=self._stream, flush=True)
            self._last = 0.0

    def __enter__(self) -> ProgressLine:
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()


def print_status(text: str) -> None:
    """Print a line for the user to stderr; stdout is for results."""
    print(f"yalis: {text}", file=sys.stderr, flush=True)


def format_duration(seconds: float) -> str:
    """Return "42s", "3m05s" or "2h07m"."""
    rounded = round(seconds)
    if rounded < 60:
        return f"{rounded}s"
    minutes, rest = divmod(rounded, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02}m" if hours else f"{minutes}m{rest:02}s"


def count_results(results: int) -> str:
    """Return "1 result" or "3 results"."""
    return f"{results} result{'' if results == 1 else 's'}"


def format_speed(tokens: int, seconds: float) -> str:
    rate = tokens / seconds if seconds > 0 else 0.0
    return f"{tokens} token{'' if tokens == 1 else 's'} in {seconds:.2f} s, {rate:.1f} tokens/s"
