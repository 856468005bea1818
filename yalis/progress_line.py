"""A progress line on stderr. The command line shows one, and LLM.generate() on a terminal."""

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
            self._write(f"\r\x1b[K{text[: width - 1]}")
        else:
            self._write(f"yalis: {text}\n")

    def clear(self) -> None:
        if self._is_terminal and self._last:
            self._write("\r\x1b[K")
            self._last = 0.0

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()

    def __enter__(self) -> ProgressLine:
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()
