"""Compile native.c for the host CPU on first use, keep the library in the cache directory, and call it by ctypes.

The library is linked without an OpenMP runtime. It resolves the one that torch has loaded and shares its thread pool.
If it cannot be compiled or loaded, load() returns None, reason() returns why, and kernels/ops.py uses plain torch.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import CDLL, c_double, c_int64, c_void_p
from pathlib import Path

from yalis.kernels.compiler import Unavailable, build_cached, need_compiler, run_compiler
from yalis.log import get_logger

log = get_logger(__name__)

SOURCE = Path(__file__).with_name("native.c")
FLAGS = ("-std=gnu11", "-O3", "-fno-math-errno", "-ffp-contract=fast", "-fPIC", "-fopenmp")
# Flags for the host CPU, best first. Compilers differ in which one they accept.
TARGETS = (("-march=native",), ("-mcpu=native",), ())

_P, _I, _F = c_void_p, c_int64, c_double
# Argument types of the functions of native.c, in the order of the switch in run_call(), which replays them by index.
SIGNATURES: dict[str, tuple[type, ...]] = {
    "linear": (_P, _P, _I, _P, _P, _I, _I, _I, _I),
    "gather_rows": (_P, _P, _I, _P, _I, _I),
    "add": (_P, _P, _P, _I),
    "rms_norm": (_P, _P, _I, _P, _F, _I, _I, _I, _I),
    "silu_gate": (_P, _P, _I, _I, _I, _I),
    "rotate": (_P, _P, _I, _P, _P, _I, _I, _I, _I, _I, _I),
    "write_kv": (_P, _P, _P, _I, _P, _I, _P, _I, _I),
    "attend": (_P, _P, _I, _P, _P, _P, _I, _P, _I, _I, _I, _I, _I, _I, _F, _F, _I, _P),
    "route": (_P, _P, _P, _I, _P, _I, _I, _I, _I, _I, _I, _I, _F),
    "expert_linear": (_P, _P, _P, _P, _I, _P, _P, _P, _I, _I, _I, _I, _I, _I),
    "combine": (_P, _P, _P, _P, _P, _I, _I, _I, _I, _I),
    "joint_norm": (_P, _P, _I, _P, _F, _I, _I, _I, _I, _I),
    "clamped_gate": (_P, _P, _I, _I, _I, _F, _F, _I),
}
# Functions that no recorded step contains.
_OTHER_SIGNATURES: dict[str, tuple[type, ...]] = {
    "top_p_thresholds": (_P, _P, _P, _P, _I, _I, _I),
    "replay": (_P, _I),
    "replay_timed": (_P, _I, _P),
}


class Library:
    """The functions of native.c. Pointers are data_ptr() of tensors; sizes and strides are in elements."""

    linear: Callable[..., None]
    gather_rows: Callable[..., None]
    add: Callable[..., None]
    rms_norm: Callable[..., None]
    silu_gate: Callable[..., None]
    rotate: Callable[..., None]
    write_kv: Callable[..., None]
    attend: Callable[..., None]
    route: Callable[..., None]
    expert_linear: Callable[..., None]
    combine: Callable[..., None]
    joint_norm: Callable[..., None]
    clamped_gate: Callable[..., None]
    top_p_thresholds: Callable[..., None]
    replay: Callable[..., None]
    replay_timed: Callable[..., None]

    def __init__(self, path: Path) -> None:
        self.path = path
        library = CDLL(str(path))
        for name, arguments in {**SIGNATURES, **_OTHER_SIGNATURES}.items():
            function = library[f"yalis_{name}"]
            function.argtypes, function.restype = arguments, None
            setattr(self, name, function)


#: Called after each native call with its name, start and end, in nanoseconds of now().
CallListener = Callable[[str, int, int], None]

_loaded: Library | Unavailable | None = None  # result of the first load()
_listener: CallListener | None = None


def load() -> Library | None:
    """Return the library, compiled first if it is not cached; None if it cannot be compiled or loaded."""
    global _loaded
    if _loaded is None:
        try:
            _loaded = Library(_build())
            log.info("native kernels: %s", _loaded.path)
        except Unavailable as unavailable:
            _loaded = unavailable
        except OSError as error:  # no matching OpenMP runtime is loaded, or the cache directory cannot be written
            _loaded = Unavailable(f"the native library cannot be loaded: {error}")
        if isinstance(_loaded, Unavailable):
            log.info("no native kernels: %s", _loaded)
    return _loaded if isinstance(_loaded, Library) else None


@contextmanager
def replaced(library: Library) -> Iterator[None]:
    """Make load() return `library` within the block."""
    global _loaded
    previous, _loaded = _loaded, library
    try:
        yield
    finally:
        _loaded = previous


def now() -> int:
    """Return the time in nanoseconds, by the clock that native.c uses in yalis_replay_timed()."""
    return time.clock_gettime_ns(time.CLOCK_MONOTONIC)


class _Timed(Library):
    """A library that reports every call to a listener. Replay buffers report the calls that they replay."""

    def __init__(self, library: Library, listener: CallListener) -> None:
        self.path = library.path
        for name in _OTHER_SIGNATURES:
            setattr(self, name, getattr(library, name))
        for name in SIGNATURES:
            setattr(self, name, self._timing(name, getattr(library, name), listener))

    def _timing(self, name: str, function: Callable[..., None], listener: CallListener) -> Callable[..., None]:
        def call(*arguments: object) -> None:
            begin = now()
            function(*arguments)
            listener(name, begin, now())

        return call


@contextmanager
def timed(listener: CallListener) -> Iterator[None]:
    """Call `listener` within the block for every native call, including those of a replay buffer."""
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


def current_listener() -> CallListener | None:
    """Return the listener of timed(), or None outside of it."""
    return _listener


def reason() -> str | None:
    """Return why load() returns None, as a short clause; None if it returns a library."""
    return None if load() is not None else str(_loaded)


def _build() -> Path:
    import torch  # noqa: F401  loads the OpenMP runtime that the library needs

    compiler = need_compiler()
    flags, macros = _probe_compiler(compiler)

    def build(folder: Path) -> Path:
        run_compiler([*compiler, *flags, "-c", str(SOURCE), "-o", str(folder / "native.o")])
        run_compiler([*compiler, "-shared", str(folder / "native.o"), "-o", str(folder / "native.so"), "-lm"])
        return folder / "native.so"

    return build_cached("native", ".so", [SOURCE.read_bytes(), " ".join(flags).encode(), macros], build)


def _probe_compiler(compiler: list[str]) -> tuple[tuple[str, ...], bytes]:
    """Return the flags this compiler accepts and its predefined macros, which identify its version and the host CPU."""
    for target in TARGETS:
        try:
            return (*FLAGS, *target), run_compiler([*compiler, *FLAGS, *target, "-dM", "-E", "-x", "c", os.devnull])
        except Unavailable as error:
            last_error = error
    raise last_error
