"""What the person sees beside the output: progress, drawn over or now and then a line, and the closing figures."""

from __future__ import annotations

import shutil
import sys
import time
from typing import TextIO

_REDRAW_SECONDS = 0.1
_LINE_SECONDS = 20.0


class ProgressLine:
    """One line on stderr, drawn over in place; where stderr is a file, such as a job's log, a new line now and then.

    A `with` block leaves nothing of it behind.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._drawn = self._stream.isatty()
        self._last = 0.0 if self._drawn else time.monotonic()  # short work leaves nothing in a log

    def show(self, text: str) -> None:
        now = time.monotonic()
        if now - self._last < (_REDRAW_SECONDS if self._drawn else _LINE_SECONDS):
            return
        self._last = now
        if self._drawn:
            width = shutil.get_terminal_size().columns
            print(f"\r\x1b[K{text[: width - 1]}", end="", file=self._stream, flush=True)
        else:
            print(f"yalis: {text}", file=self._stream, flush=True)

    def clear(self) -> None:
        if self._drawn and self._last:
            print("\r\x1b[K", end="", file=self._stream, flush=True)
            self._last = 0.0

    def __enter__(self) -> ProgressLine:
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()


def tell(text: str) -> None:
    """A line for the person, beside the output."""
    print(f"yalis: {text}", file=sys.stderr, flush=True)


def duration(seconds: float) -> str:
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02}m" if hours else f"{minutes}m{rest:02}s"


def counted(results: int) -> str:
    return f"{results} result{'' if results == 1 else 's'}"


def speed(tokens: int, seconds: float) -> str:
    rate = tokens / seconds if seconds > 0 else 0.0
    return f"{tokens} token{'' if tokens == 1 else 's'} in {seconds:.2f} s, {rate:.1f} tokens/s"
