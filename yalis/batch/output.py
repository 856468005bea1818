"""The result file of an offline job: whole lines only, each id once, one writer, resumed where it stopped.

An answer, with "logprobs" when asked for, and with "completions" (all n, the first included) when n > 1:

    {"custom_id": ..., "digest": ..., "text": ..., "token_ids": [...], "finish_reason": ..., "prompt_tokens": ...,
     "output_tokens": ..., "error": null}

A line of the input that could not be used:

    {"custom_id": ..., "digest": ..., "error": {"line": N, "message": ...}}

`digest` stands for what was asked (prompt, sampling, model), so that a result is never taken for that of another line.
`output_tokens` counts all n completions. There are no times in it, so that two runs of a job can be compared.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from yalis.errors import YalisError, YalisFailure
from yalis.types import Completion, RequestOutput

_START = b'{"custom_id": "'  # how every line of ours begins
_NO_LOCKS_HERE = {errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL}
_SYNC_SECONDS = 5.0


def answer(output: RequestOutput) -> dict[str, Any]:
    """A request's result as a flat object."""
    first = completion_fields(output.completions[0])
    first["prompt_tokens"] = len(output.prompt_token_ids)
    first["output_tokens"] = sum(len(completion.token_ids) for completion in output.completions)
    if len(output.completions) > 1:
        first["completions"] = [completion_fields(completion) for completion in output.completions]
    return first


def completion_fields(completion: Completion) -> dict[str, Any]:
    """One of a request's completions as a flat object."""
    told: dict[str, Any] = {
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
    }
    if completion.logprobs is not None:
        told["logprobs"] = [
            {
                "token_id": one.token_id,
                "logprob": _finite(one.logprob),
                "top": {str(token): _finite(value) for token, value in one.top.items()},
            }
            for one in completion.logprobs
        ]
    return told


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None  # JSON has no infinity


class ResultFile:
    """Opened, locked, checked and cut back to whole lines; then written a line at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.digests: dict[str, str | None] = {}  # of every id that is there
        self.errors: dict[str, str] = {}  # the message of those of them that are errors
        self.locked = True
        self._fd, self._created = _open(path)
        try:
            self.locked = self._lock(self._fd)
            self._check_in_place()
            self._end = self._load()
            os.ftruncate(self._fd, self._end)
        except BaseException:
            os.close(self._fd)
            raise
        self._synced = time.monotonic()

    def write(self, custom_id: str, digest: str, fields: dict[str, Any]) -> None:
        """Append one line, whole or not at all."""
        if custom_id in self.digests:
            raise AssertionError(f"{custom_id!r} is already in {self.path}")
        # ASCII, because some readers take U+2028 for the end of a line.
        row = {"custom_id": custom_id, "digest": digest, **fields}
        line = json.dumps(row, allow_nan=False).encode("ascii") + b"\n"
        try:
            written = 0
            while written < len(line):  # one call, unless the disk takes only a part
                written += os.pwrite(self._fd, line[written:], self._end + written)
            if time.monotonic() - self._synced > _SYNC_SECONDS:
                os.fsync(self._fd)  # so that a power cut loses seconds, not hours
                self._synced = time.monotonic()
        except OSError as error:
            self._cut_back()
            raise YalisFailure(
                f"could not write to {self.path}: {error.strerror}; it holds {len(self.digests)} whole "
                f"result{'' if len(self.digests) == 1 else 's'}, "
                "so make room and run again to continue"
            ) from error
        except BaseException:
            self._cut_back()
            raise
        self._end += len(line)
        self._note(custom_id, digest, fields.get("error"))

    def drop(self, ids: set[str]) -> None:
        """Take these results out. A file without them takes the place of this one, whole or not at all."""
        if not ids:
            return
        place = Path(os.path.realpath(self.path))  # a link stays one
        try:
            fd, made = tempfile.mkstemp(dir=place.parent, prefix=f".{place.name}-")
        except OSError as error:
            raise YalisFailure(f"cannot write beside {self.path}: {error.strerror}; no result was taken out") from error
        try:
            self._lock(fd)  # before it has the name, so that no other job gets between
            with os.fdopen(os.dup(fd), "wb") as file:
                file.writelines(raw for raw in self._lines() if json.loads(raw)["custom_id"] not in ids)
            os.fchmod(fd, stat.S_IMODE(os.fstat(self._fd).st_mode))
            os.fsync(fd)
            os.replace(made, place)
        except BaseException as error:
            os.close(fd)
            with contextlib.suppress(OSError):
                os.unlink(made)
            if isinstance(error, OSError):
                told = f"could not write beside {self.path}: {error.strerror}; no result was taken out"
                raise YalisFailure(told) from error
            raise
        os.close(self._fd)
        self._fd, self._end = fd, os.fstat(fd).st_size
        _sync_folder(place.parent)  # or a power cut could bring the old file back, without the results still to come
        for custom_id in ids:
            del self.digests[custom_id]
            self.errors.pop(custom_id, None)

    def close(self) -> None:
        """Have the disk hold everything, and give the lock back. A file that we made and left empty goes."""
        if self._fd < 0:
            return
        fd, self._fd = self._fd, -1
        try:
            if self._created and not self._end and self.locked:
                self._remove(fd)
            os.fsync(fd)
        except OSError as error:
            told = f"could not write to {self.path}: {error.strerror}; make room and run again to continue"
            raise YalisFailure(told) from error
        finally:
            os.close(fd)

    def _remove(self, fd: int) -> None:
        """Safe under the lock: a job that opened it meanwhile finds it out of place."""
        with contextlib.suppress(OSError):
            if os.path.samestat(os.fstat(fd), os.stat(self.path)):
                os.unlink(self.path)

    def _cut_back(self) -> None:
        with contextlib.suppress(OSError):  # the next run cuts the torn line if this one cannot
            os.ftruncate(self._fd, self._end)

    def _lock(self, fd: int) -> bool:
        try:
            import fcntl

            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise self._taken() from None
        except ImportError:
            return False
        except OSError as error:  # parallel file systems may be mounted without locks
            if error.errno not in _NO_LOCKS_HERE:
                raise YalisError(f"cannot lock {self.path}: {error.strerror}; give a file on another disk") from error
            return False
        return True

    def _check_in_place(self) -> None:
        """Another job may have put a new file here between our opening this one and locking it."""
        try:
            in_place = os.path.samestat(os.fstat(self._fd), os.stat(self.path))
        except FileNotFoundError:
            in_place = False
        if not in_place:
            raise self._taken()

    def _taken(self) -> YalisError:
        return YalisError(f"another job is writing to {self.path}; wait for it, or give another file")

    def _load(self) -> int:
        """Read the ids that are there; returns where the last whole line ends."""
        end = 0
        for number, raw in enumerate(self._lines(), 1):
            if not raw.endswith(b"\n"):
                self._check_torn(raw)
                break
            self._take(number, raw)
            end += len(raw)
        return end

    def _lines(self) -> Iterator[bytes]:
        with os.fdopen(os.dup(self._fd), "rb") as file:
            file.seek(0)
            yield from file

    def _take(self, number: int, raw: bytes) -> None:
        try:
            row = json.loads(raw)
            custom_id, error = row["custom_id"], row["error"]
        except (ValueError, KeyError, TypeError, RecursionError):
            raise YalisError(
                f"line {number} of {self.path} is not a result of yalis batch; give another file, or take that line out"
            ) from None
        if not isinstance(custom_id, str) or custom_id in self.digests:
            raise YalisError(
                f"line {number} of {self.path} has custom_id {custom_id!r} a second time; "
                "give another file, or take that line out"
            )
        self._note(custom_id, row.get("digest"), error)

    def _note(self, custom_id: str, digest: str | None, error: Any) -> None:
        self.digests[custom_id] = digest
        if error is not None:
            self.errors[custom_id] = str(error.get("message")) if isinstance(error, dict) else str(error)

    def _check_torn(self, raw: bytes) -> None:
        """A last line without its end is cut off, but only if it can be one of ours."""
        common = min(len(raw), len(_START))
        if raw[:common] != _START[:common] and raw.strip(b"\0"):  # zeros: what a power cut may leave
            raise YalisError(f"{self.path} does not end with a result of yalis batch; give another file")


def _open(path: Path) -> tuple[int, bool]:
    """Its descriptor, and whether this made the file."""
    flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0)
    try:
        with contextlib.suppress(FileExistsError):
            return os.open(path, flags | os.O_EXCL, 0o666), True
        fd = os.open(path, flags, 0o666)
    except OSError as error:
        raise _unwritable(path, error) from error
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise YalisError(f"{path} is not a plain file, so results could not be resumed; give a file")
    return fd, False


def _unwritable(path: Path, error: OSError) -> YalisError:
    folder = Path(os.path.realpath(path)).parent if path.is_symlink() else path.parent
    if isinstance(error, FileNotFoundError) and not folder.exists():
        return YalisError(
            f"cannot write to {path}: there is no folder {folder}; make it first, or give a file elsewhere"
        )
    return YalisError(f"cannot write to {path}: {error.strerror}; give a file elsewhere")


def _sync_folder(folder: Path) -> None:
    with contextlib.suppress(OSError):  # not every file system lets a folder be opened
        fd = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
