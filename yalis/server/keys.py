"""API keys: read from a file that only the user can read, and compared in constant time."""

from __future__ import annotations

import hashlib
import hmac
import os
import stat
from pathlib import Path

from yalis.errors import YalisError
from yalis.trusted_files import untrusted_reason

_MIN_LENGTH = 16


class ApiKeys:
    """The accepted keys. Without any, every request is accepted."""

    def __init__(self, keys: list[str]) -> None:
        # Digests have equal lengths, so comparing them takes the same time whatever a client sends.
        self._digests = [_digest(key.encode()) for key in keys]

    @property
    def required(self) -> bool:
        return bool(self._digests)

    def accept(self, authorization: bytes | None) -> bool:
        """Return whether the value of an Authorization header has one of the keys: `Bearer KEY`."""
        scheme, _, key = (authorization or b"").partition(b" ")
        digest = _digest(key.strip())
        matches = [hmac.compare_digest(digest, accepted) for accepted in self._digests]  # all of them, always
        return not self._digests or (any(matches) and scheme.lower() == b"bearer")


def read_keys(path: str | None) -> ApiKeys:
    """Return the keys of a file, one per line; blank lines and lines that start with # are skipped."""
    if path is None:
        return ApiKeys([])
    file = Path(path).expanduser()
    try:
        reason = untrusted_reason(file)
        if reason is None and stat.S_IMODE(os.stat(file).st_mode) & 0o077:
            reason = f"{file} can be read by other users"
        if reason is not None:
            raise YalisError(f"the API keys are not safe: {reason}; give a file of your own with mode 0600")
        lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
    except OSError as error:
        raise YalisError(f"cannot read the API keys in {file}: {error.strerror}") from error
    except UnicodeDecodeError:
        raise YalisError(f"the API keys in {file} are not UTF-8 text; give one key per line") from None
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise YalisError(f"{file} has no API key; write one per line, such as the output of `openssl rand -hex 32`")
    for number, key in enumerate(keys, 1):
        if len(key) < _MIN_LENGTH or not key.isascii() or not key.isprintable() or " " in key:
            raise YalisError(
                f"API key {number} of {file} is not usable; give at least {_MIN_LENGTH} ASCII characters without "
                "spaces, such as the output of `openssl rand -hex 32`"
            )
    return ApiKeys(keys)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
