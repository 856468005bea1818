"""Detects that a result file was removed, replaced or truncated while a job wrote it, and saves its results."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from collections.abc import Iterable
from itertools import count
from pathlib import Path

from yalis.errors import YalisFailure


class ResultsDisplaced(YalisFailure):
    """The file at the output path is not the one that was written. The message says where the results are saved."""


def find_change(path: Path, fd: int, size: int) -> str | None:
    """Return how a file of `size` bytes was changed since it was opened, such as "was removed or renamed".

    None if `path` still names the file of the descriptor and the file has that size.
    """
    try:
        opened = os.fstat(fd)
        named = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return "was removed or renamed"
    except OSError as error:  # such as ESTALE, if another host removed it from a network file system
        return f"cannot be reached any more ({error.strerror})"
    if not os.path.samestat(opened, named):
        return "was replaced by another file"
    if opened.st_size != size:
        return "was truncated" if opened.st_size < size else "was changed by another program"
    return None


def save_beside(path: Path, lines: Iterable[bytes], mode: int) -> tuple[Path, int]:
    """Write the lines to a new file next to `path`; returns that file and the number of lines.

    If the folder of `path` does not exist or cannot be written, the file is created in the current folder or in the
    temporary one. Raises OSError if none of them can be written. A file without lines is removed.
    """
    fd, saved = _create(path)
    try:
        number = 0
        with os.fdopen(fd, "wb") as file:
            for line in lines:
                file.write(line)
                number += 1
            file.flush()
            os.fchmod(file.fileno(), stat.S_IMODE(mode))
            os.fsync(file.fileno())
    except BaseException:
        saved.unlink(missing_ok=True)
        raise
    if not number:
        saved.unlink()
    return saved, number


def _create(path: Path) -> tuple[int, Path]:
    problem = OSError()
    for folder in (path.parent, Path.cwd(), Path(tempfile.gettempdir())):
        try:
            for number in count(1):
                saved = folder / (f"{path.name}.rescued" if number == 1 else f"{path.name}.rescued-{number}")
                with contextlib.suppress(FileExistsError):
                    return os.open(saved, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), saved
        except OSError as error:
            problem = error
    raise problem
