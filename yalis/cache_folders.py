"""Folders of the cache directory for compiled code, tables and tokenizers, used only if nobody else can write them."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path

from yalis import env
from yalis.errors import YalisError
from yalis.log import get_logger
from yalis.trusted_files import make_private_folder, untrusted_entry

log = get_logger(__name__)

SET_CACHE = "set YALIS_CACHE to a folder that you can write"


def cache_folder(name: str, to_write: bool = False) -> Path:
    """Return a folder of the cache directory, created with mode 0700 if possible.

    If another user could change it or an entry of it, this logs a warning and returns a temporary folder of this
    process, in which the contents of the cache are built again. So it does if the caller is going to write to the
    folder (`to_write`) and cannot.
    """
    folder = env.cache_dir() / name
    with suppress(OSError):  # a reader then finds no entries
        make_private_folder(folder)
    refusal = why_not_used(folder)
    if refusal is None:
        if not to_write or _is_writable(folder):
            return folder
        refusal = f"the cache {env.cache_dir()} cannot be written, so code is compiled again in every run; {SET_CACHE}"
    _warn(refusal)
    temporary = _temporary_folder() / name
    temporary.mkdir(exist_ok=True)
    return temporary


def persistent_cache_folder(name: str) -> Path:
    """Return cache_folder(name) for files that must outlive this process; raises YalisError if it is not trusted."""
    folder = env.cache_dir() / name
    make_private_folder(folder)
    if (refusal := why_not_used(folder)) is not None:
        raise YalisError(refusal)
    return folder


def _is_writable(folder: Path) -> bool:
    return folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)


def why_not_used(folder: Path) -> str | None:
    """Return an error message if another user could change a cache folder or an entry of it; None if nobody can."""
    reason = untrusted_entry(folder)
    return None if reason is None else f"the cache {folder} is not used, because {reason}; {_how_to_fix(reason)}"


def _how_to_fix(reason: str) -> str:
    another = "set YALIS_CACHE to a folder that only you can write"
    writable, _, mode_is_wrong = reason.partition(" can be written ")
    if not mode_is_wrong:
        return another
    cache_dir = Path.cwd() / env.cache_dir()
    # With a umask of 002 new entries can be written by the group; in a folder of mode 0700 that does no harm.
    chmod = f"chmod -R go-rwx {cache_dir}" if Path(writable).is_relative_to(cache_dir) else f"chmod go-w {writable}"
    return f"type `{chmod}`, or {another}"


@cache  # once per process and message
def _warn(message: str) -> None:
    log.warning("%s", message)


@cache
def _temporary_folder() -> Path:
    folder = tempfile.mkdtemp(prefix=f"yalis-cache-{os.getpid()}-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)
