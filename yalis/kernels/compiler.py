"""Find and run the C compiler, and keep what it builds in the cache directory."""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from yalis import env
from yalis.cache_folders import cache_folder


class Unavailable(Exception):
    """Something cannot be built on this machine. The message is a short clause with the reason."""


def find_compiler() -> list[str] | None:
    """Return the C compiler command: $CC, else the first of cc, gcc and clang on the PATH; None if there is none."""
    if chosen := env.c_compiler():
        return shlex.split(chosen)
    return next(([path] for name in ("cc", "gcc", "clang") if (path := shutil.which(name))), None)


def need_compiler() -> list[str]:
    """Return the command of the C compiler. Raises Unavailable if there is none."""
    compiler = find_compiler()
    if compiler is None:
        raise Unavailable("no C compiler; install gcc")
    return compiler


def run_compiler(command: Sequence[str]) -> bytes:
    """Run a compiler command and return its stdout. Raises Unavailable with the first error line if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, timeout=300, check=False)
    except FileNotFoundError:
        raise Unavailable(f"C compiler {command[0]} was not found") from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(f"{command[0]} did not run: {error}") from None
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines() or [f"exit status {done.returncode}"]
        raise Unavailable(f"{command[0]} failed: {next((line for line in lines if 'error' in line), lines[-1])}")
    return done.stdout


def build_cached(folder: str, suffix: str, inputs: Sequence[bytes], build: Callable[[Path], Path]) -> Path:
    """Return the path of a cached file, whose name is the hash of `inputs`, everything that it depends on.

    If it is not cached, `build(temporary folder)` creates it and returns its path. Several processes may do so at once.
    """
    name = hashlib.sha256(b"\0".join(inputs)).hexdigest()[:16] + suffix
    path = cache_folder(folder) / name
    if not path.exists():
        directory = cache_folder(folder, to_write=True)
        path = directory / name
    if not path.exists():  # the folder is temporary if the cache is read-only
        with tempfile.TemporaryDirectory(dir=directory) as temporary:
            os.replace(build(Path(temporary)), path)  # atomic
    return path
