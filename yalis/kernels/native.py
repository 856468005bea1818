"""Builds native.c for this machine on first use, keeps it in the cache, and calls it.

The object is linked without an OpenMP runtime of its own: it finds the one that torch loaded, and shares its threads.
Where it cannot be built or loaded, load() gives None, reason() says why, and everything runs on plain torch.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import CDLL, c_double, c_int64, c_void_p
from pathlib import Path

from yalis.kernels.compiler import Unavailable, built, need_compiler, run_compiler
from yalis.log import get_logger

log = get_logger(__name__)

SOURCE = Path(__file__).with_name("native.c")
FLAGS = ("-std=gnu11", "-O3", "-fno-math-errno", "-ffp-contract=fast", "-fPIC", "-fopenmp")
# Best first: a compiler takes one of these to mean the machine it runs on.
TARGETS = (("-march=native",), ("-mcpu=native",), ())

_P, _I, _F = c_void_p, c_int64, c_double
# The arguments of native.c's functions, in the order by which it replays them.
SIGNATURES: dict[str, tuple[type, ...]] = {
    "linear": (_P, _P, _I, _P, _P, _I, _I, _I, _I),
    "take": (_P, _P, _I, _P, _I, _I),
    "add": (_P, _P, _P, _I),
    "rms_norm": (_P, _P, _I, _P, _F, _I, _I, _I, _I),
    "silu_gate": (_P, _P, _I, _I, _I, _I),
    "rotate": (_P, _P, _I, _P, _P, _I, _I, _I, _I, _I, _I),
    "write": (_P, _P, _P, _I, _P, _I, _P, _I, _I),
    "attend": (_P, _P, _I, _P, _P, _P, _I, _P, _I, _I, _I, _I, _I, _I, _F, _F, _I),
}


class Library:
    """The functions of native.c; pointers are tensors' data_ptr(), lengths and steps count floats."""

    linear: Callable[..., None]
    take: Callable[..., None]
    add: Callable[..., None]
    rms_norm: Callable[..., None]
    silu_gate: Callable[..., None]
    rotate: Callable[..., None]
    write: Callable[..., None]
    attend: Callable[..., None]
    replay: Callable[..., None]
    replay_timed: Callable[..., None]

    def __init__(self, path: Path) -> None:
        self.path = path
        library = CDLL(str(path))
        for name, arguments in (*SIGNATURES.items(), ("replay", (_P, _I)), ("replay_timed", (_P, _I, _P))):
            function = library[f"yalis_{name}"]
            function.argtypes, function.restype = arguments, None
            setattr(self, name, function)


#: Hears of a call: its name, and when it began and ended, in nanoseconds of now().
Listener = Callable[[str, int, int], None]

_found: Library | Unavailable | None = None
_listener: Listener | None = None


def load() -> Library | None:
    """The library, built first where the cache does not hold it; None where that cannot be."""
    global _found
    if _found is None:
        try:
            _found = Library(_build())
            log.info("native kernels: %s", _found.path)
        except Unavailable as why:
            _found = why
        except OSError as error:  # an OpenMP runtime other than the compiler's, or a folder that cannot be written
            _found = Unavailable(f"they do not load: {error}")
        if isinstance(_found, Unavailable):
            log.info("no native kernels: %s", _found)
    return _found if isinstance(_found, Library) else None


@contextmanager
def replaced(library: Library) -> Iterator[None]:
    """Everyone who asks within gets `library`."""
    global _found
    before, _found = _found, library
    try:
        yield
    finally:
        _found = before


def now() -> int:
    """Nanoseconds of the clock by which native.c times a tape's calls."""
    return time.clock_gettime_ns(time.CLOCK_MONOTONIC)


class _Timed(Library):
    """The library itself, telling of every call. Tapes tell of theirs themselves."""

    def __init__(self, library: Library, listener: Listener) -> None:
        self.path, self.replay, self.replay_timed = library.path, library.replay, library.replay_timed
        for name in SIGNATURES:
            setattr(self, name, self._timing(name, getattr(library, name), listener))

    def _timing(self, name: str, function: Callable[..., None], listener: Listener) -> Callable[..., None]:
        def call(*arguments: object) -> None:
            begin = now()
            function(*arguments)
            listener(name, begin, now())

        return call


@contextmanager
def timed(listener: Listener) -> Iterator[None]:
    """Within, `listener` hears of every native call, also of those that a tape replays."""
    global _listener
    library = load()
    if library is None:
        yield
        return
    _listener = listener
    try:
        with replaced(_Timed(library, listener)):
            yield
    finally:
        _listener = None


def listening() -> Listener | None:
    """Who hears of native calls now."""
    return _listener


def reason() -> str | None:
    """Why load() gives None, as a short clause; None where it does not."""
    return None if load() is not None else str(_found)


def _build() -> Path:
    import torch  # noqa: F401  its OpenMP runtime must be there before the library asks for it

    compiler = need_compiler()
    flags, machine = _describe(compiler)

    def build(at: Path) -> Path:
        run_compiler([*compiler, *flags, "-c", str(SOURCE), "-o", str(at / "native.o")])
        run_compiler([*compiler, "-shared", str(at / "native.o"), "-o", str(at / "native.so"), "-lm"])
        return at / "native.so"

    return built("native", ".so", [SOURCE.read_bytes(), " ".join(flags).encode(), machine], build)


def _describe(compiler: list[str]) -> tuple[tuple[str, ...], bytes]:
    """The flags this compiler takes, and what it then predefines: its version and the machine's instruction sets."""
    for target in TARGETS:
        try:
            return (*FLAGS, *target), run_compiler([*compiler, *FLAGS, *target, "-dM", "-E", "-x", "c", os.devnull])
        except Unavailable as why:
            last = why
    raise last
