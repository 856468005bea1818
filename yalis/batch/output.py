"""The result file of a batch job: complete lines only, each id once, one writer at a time, resumable.

A flat result has "logprobs" and "prompt_logprobs" (null for the first token) if they were requested, and "completions"
(all n, including the first) if n > 1:

    {"custom_id": ..., "digest": ..., "text": ..., "token_ids": [...], "finish_reason": ..., "prompt_tokens": ...,
     "output_tokens": ..., "error": null}

The flat result of an input line that could not be run is an error:

    {"custom_id": ..., "digest": ..., "error": {"line": N, "message": ...}}

`digest` identifies the request (prompt, sampling, model), so that a result is never mistaken for that of another line.
`output_tokens` counts all n completions. A result in the OpenAI format (`formats.py`) has a "response" instead.
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

from yalis.batch.rescue import ResultsDisplaced, find_change, save_beside
from yalis.errors import YalisError, YalisFailure, count_of
from yalis.types import Completion, RequestOutput, TokenLogprobs

_LINE_START = b'{"custom_id": "'  # how write() begins every line
_NO_LOCK_SUPPORT = {errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL}
_SYNC_SECONDS = 5.0


def result_fields(output: RequestOutput) -> dict[str, Any]:
    """Return a request's result as a flat JSON object."""
    first = completion_fields(output.completions[0])
    first["prompt_tokens"] = len(output.prompt_token_ids)
    first["output_tokens"] = sum(len(completion.token_ids) for completion in output.completions)
    if len(output.completions) > 1:
        first["completions"] = [completion_fields(completion) for completion in output.completions]
    return {**first, **prompt_logprob_fields(output)}


def prompt_logprob_fields(output: RequestOutput) -> dict[str, Any]:
    """Return the log-probabilities of the prompt as a field of a result, if they were requested."""
    if output.prompt_logprobs is None:
        return {}
    return {"prompt_logprobs": [None if one is None else _logprob_fields(one) for one in output.prompt_logprobs]}


def completion_fields(completion: Completion) -> dict[str, Any]:
    """Return one completion as a flat JSON object."""
    fields: dict[str, Any] = {
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
    }
    if completion.logprobs is not None:
        fields["logprobs"] = [_logprob_fields(token) for token in completion.logprobs]
    return fields


def _logprob_fields(token: TokenLogprobs) -> dict[str, Any]:
    return {
        "token_id": token.token_id,
        "logprob": _finite(token.logprob),
        "top": {str(id): _finite(value) for id, value in token.top.items()},
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None  # JSON has no infinity


class ResultFile:
    """Opening the file locks it, reads its results and removes an incomplete last line. write() appends a line."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.digests: dict[str, str | None] = {}  # of every result in the file, by id
        self.errors: dict[str, str] = {}  # messages of the results that are errors, by id
        self.format: str | None = None  # "flat" or "openai", the format of the first result; None without results
        self.locked = True
        self._displaced = False
        self._fd, self._created = _open(path)
        try:
            self.locked = self._lock(self._fd)
            self._check_not_replaced()
            self._end = self._load()
            os.ftruncate(self._fd, self._end)
        except BaseException:
            os.close(self._fd)
            raise
        self._synced = time.monotonic()

    def write(self, custom_id: str, digest: str, fields: dict[str, Any]) -> None:
        """Append one result. If that fails, no part of the line stays in the file.

        Raises ResultsDisplaced if another program has changed the file. Its size is compared before every write, which
        would leave a hole in a truncated file; its path only at every sync.
        """
        if custom_id in self.digests:
            raise AssertionError(f"{custom_id!r} is already in {self.path}")
        # ASCII, because some readers treat U+2028 as the end of a line.
        row = {"custom_id": custom_id, "digest": digest, **fields}
        line = json.dumps(row, allow_nan=False).encode("ascii") + b"\n"
        sync = time.monotonic() - self._synced > _SYNC_SECONDS
        self._check_size()
        try:
            written = 0
            while written < len(line):  # usually one call, but a write may be short
                written += os.pwrite(self._fd, line[written:], self._end + written)
            if sync:
                os.fsync(self._fd)  # a power failure loses at most the results since the last sync
                self._synced = time.monotonic()
        except OSError as error:
            self._truncate()
            self.verify()
            raise YalisFailure(
                f"could not write to {self.path}: {error.strerror}; it holds "
                f"{count_of(len(self.digests), 'complete result')}; "
                "free some disk space and run the same command again to continue"
            ) from error
        except BaseException:
            self._truncate()
            raise
        self._end += len(line)
        self._record(custom_id, digest, fields.get("error"))
        if sync:
            self.verify()

    def verify(self) -> None:
        """Raise ResultsDisplaced if the path does not name the file that was written, or the file has another size.

        Its results are then saved in a file next to it. They are read through the descriptor, because the file may have
        been removed. After it has raised once, this does nothing.
        """
        if self._displaced or not self._end:
            return
        change = find_change(self.path, self._fd, self._end)
        if change is None:
            return
        self._displaced = True
        problem = f"{self.path} {change} while the job ran"
        results = f"its {count_of(len(self.digests), 'result')}"
        try:
            saved, number = save_beside(self.path, self._intact_lines(), os.fstat(self._fd).st_mode)
        except OSError as error:
            lost = f"{results} could not be saved ({error.strerror}); run the same command again to compute them again"
            raise ResultsDisplaced(f"{problem}, and {lost}") from error
        if not number:
            raise ResultsDisplaced(f"{problem}, and {results} are lost; run the same command again")
        kept = results if number == len(self.digests) else f"{number} of {results}"
        raise ResultsDisplaced(
            f"{problem}; {kept} {'is' if number == 1 else 'are'} saved in {saved}: "
            f"run the same command with {saved} instead of {self.path} to continue"
        )

    def remove(self, ids: set[str]) -> None:
        """Remove these results. The file is replaced atomically by one without them."""
        if not ids:
            return
        path = Path(os.path.realpath(self.path))  # a symbolic link stays in place
        try:
            fd, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
        except OSError as error:
            raise YalisFailure(
                f"cannot create a file next to {self.path}: {error.strerror}; no result was removed"
            ) from error
        try:
            self._lock(fd)  # before the rename, so that no other job can lock it first
            with os.fdopen(os.dup(fd), "wb") as file:
                file.writelines(raw for raw in self._lines() if json.loads(raw)["custom_id"] not in ids)
            os.fchmod(fd, stat.S_IMODE(os.fstat(self._fd).st_mode))
            os.fsync(fd)
            os.replace(temporary, path)
        except BaseException as error:
            os.close(fd)
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            if isinstance(error, OSError):
                raise YalisFailure(f"could not replace {self.path}: {error.strerror}; no result was removed") from error
            raise
        os.close(self._fd)
        self._fd, self._end = fd, os.fstat(fd).st_size
        _sync_folder(path.parent)  # otherwise a power failure could bring the old file back and lose later results
        for custom_id in ids:
            del self.digests[custom_id]
            self.errors.pop(custom_id, None)

    def close(self) -> None:
        """Sync the file to disk, verify() it and release the lock. If it was created here and is empty, remove it."""
        if self._fd < 0:
            return
        try:
            if self._created and not self._end and self.locked:
                self._unlink()
            self.verify()
            os.fsync(self._fd)
        except OSError as error:
            raise YalisFailure(
                f"could not write to {self.path}: {error.strerror}; "
                "free some disk space and run the same command again to continue"
            ) from error
        finally:
            os.close(self._fd)
            self._fd = -1

    def _check_size(self) -> None:
        with contextlib.suppress(OSError):
            if os.fstat(self._fd).st_size == self._end:
                return
        self.verify()

    def _unlink(self) -> None:
        """Unlink the file while it is locked: a job that has opened it meanwhile fails in _check_not_replaced()."""
        with contextlib.suppress(OSError):
            if os.path.samestat(os.fstat(self._fd), os.stat(self.path)):
                os.unlink(self.path)

    def _truncate(self) -> None:
        with contextlib.suppress(OSError):  # the next run removes the incomplete line
            if os.fstat(self._fd).st_size > self._end:  # ftruncate would also extend a file, with zeros
                os.ftruncate(self._fd, self._end)

    def _lock(self, fd: int) -> bool:
        try:
            import fcntl

            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise self._in_use() from None
        except ImportError:
            return False
        except OSError as error:  # parallel file systems may be mounted without locks
            if error.errno not in _NO_LOCK_SUPPORT:
                raise YalisError(f"cannot lock {self.path}: {error.strerror}; give a file on another disk") from error
            return False
        return True

    def _check_not_replaced(self) -> None:
        """Raise YalisError if another job replaced the file between opening and locking it."""
        try:
            unchanged = os.path.samestat(os.fstat(self._fd), os.stat(self.path))
        except FileNotFoundError:
            unchanged = False
        if not unchanged:
            raise self._in_use()

    def _in_use(self) -> YalisError:
        return YalisError(f"another job is writing to {self.path}; wait for it, or give another file")

    def _load(self) -> int:
        """Read the existing results; returns the offset at which the last complete line ends."""
        end = 0
        for line_number, raw in enumerate(self._lines(), 1):
            if not raw.endswith(b"\n"):
                self._check_incomplete(raw)
                break
            self._load_line(line_number, raw)
            end += len(raw)
        return end

    def _lines(self) -> Iterator[bytes]:
        with os.fdopen(os.dup(self._fd), "rb") as file:
            file.seek(0)
            yield from file

    def _intact_lines(self) -> Iterator[bytes]:
        """Yield the lines that are still as they were written: another program may have changed the file."""
        unseen = dict(self.digests)
        for raw in self._lines():
            with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
                row = json.loads(raw)
                custom_id = row["custom_id"]
                if raw.endswith(b"\n") and custom_id in unseen and unseen[custom_id] == row.get("digest"):
                    del unseen[custom_id]
                    yield raw

    def _load_line(self, line_number: int, raw: bytes) -> None:
        try:
            row = json.loads(raw)
            custom_id, error = row["custom_id"], row["error"]
        except (ValueError, KeyError, TypeError, RecursionError):
            raise YalisError(
                f"line {line_number} of {self.path} is not a result of yalis batch; "
                "give another file, or remove that line"
            ) from None
        if not isinstance(custom_id, str) or custom_id in self.digests:
            raise YalisError(
                f"line {line_number} of {self.path} has custom_id {custom_id!r} a second time; "
                "give another file, or remove that line"
            )
        self.format = self.format or ("openai" if "response" in row else "flat")
        self._record(custom_id, row.get("digest"), error)

    def _record(self, custom_id: str, digest: str | None, error: Any) -> None:
        self.digests[custom_id] = digest
        if error is not None:
            self.errors[custom_id] = str(error.get("message")) if isinstance(error, dict) else str(error)

    def _check_incomplete(self, raw: bytes) -> None:
        """Raise YalisError if the last line, which has no newline, cannot be the beginning of a result."""
        common = min(len(raw), len(_LINE_START))
        if raw[:common] != _LINE_START[:common] and raw.strip(b"\0"):  # a power failure may leave zeros
            raise YalisError(f"{self.path} does not end with a result of yalis batch; give another file")


def _open(path: Path) -> tuple[int, bool]:
    """Open the file for reading and writing; returns its descriptor and whether this call created it."""
    flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0)
    try:
        with contextlib.suppress(FileExistsError):
            return os.open(path, flags | os.O_EXCL, 0o666), True
        fd = os.open(path, flags, 0o666)
    except OSError as error:
        raise _unwritable(path, error) from error
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise YalisError(f"{path} is not a regular file, so the job could not be resumed; give a file")
    return fd, False


def _unwritable(path: Path, error: OSError) -> YalisError:
    folder = Path(os.path.realpath(path)).parent if path.is_symlink() else path.parent
    if isinstance(error, FileNotFoundError) and not folder.exists():
        return YalisError(
            f"cannot write to {path}: there is no folder {folder}; create it first, or give a file elsewhere"
        )
    return YalisError(f"cannot write to {path}: {error.strerror}; give a file elsewhere")


def _sync_folder(folder: Path) -> None:
    with contextlib.suppress(OSError):  # not every file system allows opening a folder
        fd = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
