"""A file with the URL of this server, for clients that do not know on which node a scheduler started it."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from yalis.errors import YalisError, YalisFailure
from yalis.trusted_files import untrusted_reason


class Announcement:
    """The file of `--announce`. It exists while the server accepts requests; the end of a `with` block removes it.

    A client sends its API key to the URL in this file, so the folder must be one that no other user can write to.
    """

    def __init__(self, path: Path) -> None:
        """Check the path, before a model is loaded. A folder that does not exist is created for this user alone."""
        self.path = path.absolute()
        self._written: os.stat_result | None = None
        if self.path.is_dir():
            raise YalisError(f"--announce is {path}, which is a folder; give a file")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise YalisError(f"--announce is {path}, whose folder cannot be created: {error.strerror}") from error
        if reason := untrusted_reason(self.path.parent):
            raise YalisError(
                f"--announce is {path}, but {reason}: clients would send their keys to whatever another user writes "
                "there; give a file in a folder of your own"
            )
        if not os.access(self.path.parent, os.W_OK):
            raise YalisError(f"--announce is {path}, whose folder cannot be written to; give another file")

    def publish(self, url: str) -> None:
        """Write the URL and a newline, replacing the file of an earlier server at once. The file has mode 0600."""
        temporary = None
        try:
            handle, temporary = tempfile.mkstemp(dir=self.path.parent, prefix=f".{self.path.name}-")
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(f"{url}\n")
                file.flush()
                os.fsync(file.fileno())  # a requeued job may start on another node that reads the same file
                written = os.fstat(file.fileno())
            os.replace(temporary, self.path)
            self._written, temporary = written, None
        except OSError as error:
            raise YalisFailure(f"cannot write {self.path}: {error.strerror}; give another --announce") from error
        finally:
            if temporary is not None:
                Path(temporary).unlink(missing_ok=True)

    def withdraw(self) -> None:
        """Remove the file, unless another server has replaced it since, or it is gone. May be called twice."""
        written, self._written = self._written, None
        if written is None:
            return
        try:
            found = self.path.stat()
            if (found.st_dev, found.st_ino, found.st_mtime_ns) == (written.st_dev, written.st_ino, written.st_mtime_ns):
                self.path.unlink()
        except OSError:
            return  # removed by somebody else, or its file system is gone: there is nothing left to withdraw

    def __enter__(self) -> Announcement:
        return self

    def __exit__(self, *_: object) -> None:
        self.withdraw()
