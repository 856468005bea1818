"""The C compiler, and what it built, kept in the cache."""

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


class Unavailable(Exception):
    """Why something could not be built here, as a short clause."""


def find_compiler() -> list[str] | None:
    """$CC, else the first of cc, gcc and clang that is installed."""
    if chosen := env.c_compiler():
        return shlex.split(chosen)
    return next(([path] for name in ("cc", "gcc", "clang") if (path := shutil.which(name))), None)


def need_compiler() -> list[str]:
    compiler = find_compiler()
    if compiler is None:
        raise Unavailable("no C compiler; install gcc")
    return compiler


def run_compiler(command: Sequence[str]) -> bytes:
    """What the command prints."""
    try:
        done = subprocess.run(command, capture_output=True, timeout=300, check=False)
    except FileNotFoundError:
        raise Unavailable(f"C compiler {command[0]} is not there") from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(f"{command[0]} did not run: {error}") from None
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines() or [f"exit status {done.returncode}"]
        raise Unavailable(f"{command[0]} failed: {next((line for line in said if 'error' in line), said[-1])}")
    return done.stdout


def built(folder: str, suffix: str, depends: Sequence[bytes], build: Callable[[Path], Path]) -> Path:
    """A file of the cache, named by everything that it depends on; made first by `build(temporary folder)`."""
    home = env.cache_dir() / folder
    key = hashlib.sha256(b"\0".join(depends)).hexdigest()
    path = home / f"{key[:16]}{suffix}"
    if not path.exists():
        home.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=home) as made:
            os.replace(build(Path(made)), path)  # whole or not at all, whoever else builds it now
    return path
