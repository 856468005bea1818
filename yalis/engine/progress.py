"""Progress of a call to LLM.generate(), and the line that shows it on a terminal."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from yalis.errors import YalisError, count_of
from yalis.progress_line import ProgressLine

_BAR_WIDTH = 24


@dataclass(frozen=True)
class Progress:
    """How far a call to generate() is."""

    finished: int  # prompts
    total: int
    output_tokens: int  # generated in this call
    max_output_tokens: int = 0  # that this call can generate, within max_tokens and the context


@contextmanager
def progress_callback(
    progress: Callable[[Progress], None] | bool | None,
) -> Iterator[Callable[[Progress], None] | None]:
    """Yield the function to call after each step, or None.

    True and None show a line on stderr if that is a terminal, from the main thread only: lines of several threads would
    overwrite each other. The end of the block erases the line.
    """
    if callable(progress):
        yield progress
    elif progress is not None and not isinstance(progress, bool):
        raise YalisError(f"progress is {progress!r}; give a function that accepts a Progress, True or False")
    elif progress is False or not _is_terminal() or threading.current_thread() is not threading.main_thread():
        yield None
    else:
        start = time.monotonic()
        with ProgressLine() as line:
            yield lambda now: line.show(format_progress(now, time.monotonic() - start))


def _is_terminal() -> bool:
    return sys.stderr is not None and sys.stderr.isatty()


def format_progress(now: Progress, seconds: float) -> str:
    """Return "[####----] 12/48 prompts, 3456 tokens, 812 tokens/s"."""
    full = _BAR_WIDTH * now.finished // max(1, now.total)
    bar = "#" * full + "-" * (_BAR_WIDTH - full)
    rate = now.output_tokens / seconds if seconds > 0 else 0.0
    counts = f"{now.finished}/{count_of(now.total, 'prompt')}, {count_of(now.output_tokens, 'token')}"
    return f"[{bar}] {counts}, {rate:.0f} tokens/s"
