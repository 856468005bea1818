"""A stretch of native calls, recorded once and replayed by a single one: to a CPU what a captured graph is to a GPU.

A replay reads and writes where the recording did: whoever replays puts new inputs into the same tensors.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from ctypes import Array, Structure, Union, addressof, c_double, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from yalis.kernels import native

_NAMES = list(native.SIGNATURES)
_FIELDS: dict[type, str] = {c_void_p: "p", c_int64: "i", c_double: "f"}
_MOST_ARGUMENTS = max(map(len, native.SIGNATURES.values()))


class _Value(Union):
    _fields_ = [("p", c_void_p), ("i", c_int64), ("f", c_double)]


class _Call(Structure):
    _fields_ = [("function", c_int64), ("of", _Value * _MOST_ARGUMENTS)]


class Tape:
    """The calls of one run of a function that computes in native calls alone."""

    def __init__(self, library: native.Library, calls: list[tuple[str, tuple[Any, ...]]], held: list[Tensor]) -> None:
        self._library, self._held, self._count = library, held, len(calls)
        self._calls: Array[_Call] = (_Call * len(calls))()
        for entry, (name, arguments) in zip(self._calls, calls, strict=True):
            entry.function = _NAMES.index(name)
            for place, (kind, argument) in enumerate(zip(native.SIGNATURES[name], arguments, strict=True)):
                setattr(entry.of[place], _FIELDS[kind], argument)

    def replay(self) -> None:
        self._library.replay(addressof(self._calls), self._count)


def record(function: Callable[[], Tensor]) -> tuple[Tensor, Tape | None]:
    """What the function gives, and a tape that computes it again; None where more than native calls went into it."""
    library = native.load()
    if library is None:
        return function(), None
    recorder, watch = _Recorder(library), _Watch()
    with native.replaced(recorder), watch:
        result = function()
    return result, Tape(library, recorder.calls, watch.made) if watch.pure else None


class _Recorder(native.Library):
    """The library itself, noting down what this thread calls."""

    def __init__(self, library: native.Library) -> None:
        self.path = library.path
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self._thread = threading.get_ident()
        for name in _NAMES:
            setattr(self, name, self._noting(name, getattr(library, name)))

    def _noting(self, name: str, function: Callable[..., None]) -> Callable[..., None]:
        def call(*arguments: Any) -> None:
            if threading.get_ident() == self._thread:
                self.calls.append((name, arguments))
            function(*arguments)

        return call


class _Watch(TorchDispatchMode):  # type: ignore[misc]
    """Sees every torch operation: a replay can do without those that only allocate or look at memory another way."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[Tensor] = []  # kept, because a replay writes there again
        self.pure = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten.empty, torch.ops.aten.empty_like, torch.ops.aten.new_empty):
            self.made.append(out)
        elif not (func.is_view and all(_place(x) == _place(args[0]) for x in (out if _many(out) else [out]))):
            self.pure = False
        return out


def _many(out: Any) -> bool:
    return isinstance(out, (list, tuple))


def _place(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()
