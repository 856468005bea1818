"""The result file of an offline job: whole lines only, each id once, one writer, resumed where it stopped.

An answer, with "logprobs" when asked for, and with "completions" (all n, the first included) when n > 1:

    {"custom_id": ..., "text": ..., "token_ids": [...], "finish_reason": ..., "prompt_tokens": ...,
     "output_tokens": ..., "error": null}

A line of the input that could not be used:

    {"custom_id": ..., "error": {"line": N, "message": ...}}

`output_tokens` counts all n completions. There are no times in it, so that two runs of a job can be compared.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import stat
import time
from pathlib import Path
from typing import Any

from yalis.errors import YalisError, YalisFailure
from yalis.types import Completion, RequestOutput

_START = b'{"custom_id": "'  # how every line of ours begins
_NO_LOCKS_HERE = {errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL}
_SYNC_SECONDS = 5.0


def answer(output: RequestOutput) -> dict[str, Any]:
    """A request's result as a flat object."""
    first = _completion(output.completions[0])
    first["prompt_tokens"] = len(output.prompt_token_ids)
    first["output_tokens"] = sum(len(completion.token_ids) for completion in output.completions)
    if len(output.completions) > 1:
        first["completions"] = [_completion(completion) for completion in output.completions]
    return first


def _completion(completion: Completion) -> dict[str, Any]:
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
        self.ids: set[str] = set()
        self.errors = 0
        self.locked = True
        self._fd = _open(path)
        try:
            self._lock()
            self._end = self._load()
            os.ftruncate(self._fd, self._end)
        except BaseException:
            os.close(self._fd)
            raise
        self._synced = time.monotonic()

    def write(self, custom_id: str, fields: dict[str, Any]) -> None:
        """Append one line, whole or not at all."""
        if custom_id in self.ids:
            raise AssertionError(f"{custom_id!r} is already in {self.path}")
        # ASCII, because some readers take U+2028 for the end of a line.
        line = json.dumps({"custom_id": custom_id, **fields}, allow_nan=False).encode("ascii") + b"\n"
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
                f"could not write to {self.path}: {error.strerror}; it holds {len(self.ids)} whole results, "
                "so make room and run again to continue"
            ) from error
        except BaseException:
            self._cut_back()
            raise
        self._end += len(line)
        self.ids.add(custom_id)
        self.errors += fields.get("error") is not None

    def close(self) -> None:
        """Have the disk hold everything, and give the lock back."""
        if self._fd < 0:
            return
        fd, self._fd = self._fd, -1
        try:
            os.fsync(fd)
        except OSError as error:
            told = f"could not write to {self.path}: {error.strerror}; make room and run again to continue"
            raise YalisFailure(told) from error
        finally:
            os.close(fd)

    def _cut_back(self) -> None:
        with contextlib.suppress(OSError):  # the next run cuts the torn line if this one cannot
            os.ftruncate(self._fd, self._end)

    def _lock(self) -> None:
        try:
            import fcntl

            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise YalisError(f"another job is writing to {self.path}; wait for it, or give another file") from None
        except ImportError:
            self.locked = False
        except OSError as error:  # parallel file systems may be mounted without locks
            if error.errno not in _NO_LOCKS_HERE:
                raise YalisError(f"cannot lock {self.path}: {error.strerror}; give a file on another disk") from error
            self.locked = False

    def _load(self) -> int:
        """Read the ids that are there; returns where the last whole line ends."""
        end = 0
        with os.fdopen(os.dup(self._fd), "rb") as file:
            for number, raw in enumerate(file, 1):
                if not raw.endswith(b"\n"):
                    self._check_torn(raw)
                    break
                self._take(number, raw)
                end += len(raw)
        return end

    def _take(self, number: int, raw: bytes) -> None:
        try:
            row = json.loads(raw)
            custom_id, error = row["custom_id"], row["error"]
        except (ValueError, KeyError, TypeError, RecursionError):
            raise YalisError(
                f"line {number} of {self.path} is not a result of yalis batch; give another file, or take that line out"
            ) from None
        if not isinstance(custom_id, str) or custom_id in self.ids:
            raise YalisError(
                f"line {number} of {self.path} has custom_id {custom_id!r} a second time; "
                "give another file, or take that line out"
            )
        self.ids.add(custom_id)
        self.errors += error is not None

    def _check_torn(self, raw: bytes) -> None:
        """A last line without its end is cut off, but only if it can be one of ours."""
        common = min(len(raw), len(_START))
        if raw[:common] != _START[:common] and raw.strip(b"\0"):  # zeros: what a power cut may leave
            raise YalisError(f"{self.path} does not end with a result of yalis batch; give another file")


def _open(path: Path) -> int:
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o666)
    except OSError as error:
        raise YalisError(f"cannot write to {path}: {error.strerror}; give a file elsewhere") from error
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise YalisError(f"{path} is not a plain file, so results could not be resumed; give a file")
    return fd
