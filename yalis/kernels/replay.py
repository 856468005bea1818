"""A stretch of native calls, recorded once and replayed by a single one: to a CPU what a captured graph is to a GPU.

A replay reads its inputs where the recording did: whoever replays puts new numbers into the same tensors. What lay in
between is laid out anew, each piece of memory used again as soon as nobody reads it any more.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable
from ctypes import Array, Structure, Union, addressof, c_double, c_int64, c_void_p
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from yalis.kernels import native

_NAMES = list(native.SIGNATURES)
_FIELDS: dict[type, str] = {c_void_p: "p", c_int64: "i", c_double: "f"}
_MOST_ARGUMENTS = max(map(len, native.SIGNATURES.values()))
_LINE = 64  # bytes; no two pieces share a cache line


class _Value(Union):
    _fields_ = [("p", c_void_p), ("i", c_int64), ("f", c_double)]


class _Call(Structure):
    _fields_ = [("function", c_int64), ("of", _Value * _MOST_ARGUMENTS)]


Note = tuple[str, tuple[Any, ...]]  # a function of native.c and its arguments


class ReplayBuffer:
    """The calls of one run of a function that computes in native calls alone."""

    def __init__(self, library: native.Library, notes: list[Note], made: list[Tensor], result: Tensor) -> None:
        layout = _Layout(notes, made, result)
        self._library, self._count = library, len(notes)
        self._names = [name for name, _ in notes]
        self.memory = torch.empty(layout.size // 4)
        base = self.memory.data_ptr()
        self._calls: Array[_Call] = (_Call * len(notes))()
        for entry, (name, arguments) in zip(self._calls, notes, strict=True):
            entry.function = _NAMES.index(name)
            for place, (kind, argument) in enumerate(zip(native.SIGNATURES[name], arguments, strict=True)):
                moved = layout.move(argument, base) if kind is c_void_p else argument
                setattr(entry.of[place], _FIELDS[kind], moved)
        start = (layout.move(result.data_ptr(), base) - base) // 4
        self._result = self.memory.as_strided(result.shape, result.stride(), start)

    def replay(self) -> Tensor:
        """The function's result for what its inputs hold now; overwritten by the next replay."""
        listener = native.current_listener()
        if listener is None:
            self._library.replay(addressof(self._calls), self._count)
        else:
            self._replay_timed(listener)
        return self._result

    def _replay_timed(self, listener: native.CallListener) -> None:
        """The same, with the time of every call."""
        times = (c_int64 * (self._count + 1))()
        self._library.replay_timed(addressof(self._calls), self._count, addressof(times))
        for name, (begin, end) in zip(self._names, pairwise(times), strict=True):
            listener(name, begin, end)


def record(function: Callable[[], Tensor]) -> tuple[Tensor, ReplayBuffer | None]:
    """What the function gives, and a tape that computes it again; None where more than native calls went into it."""
    library = native.load()
    if library is None:
        return function(), None
    recorder, watch = _Recorder(library), _Watch()
    with native.replaced(recorder), watch:
        result = function()
    return result, ReplayBuffer(library, recorder.notes, watch.made, result) if watch.pure else None


@dataclass
class _Piece:
    """Memory that a recording allocated: where, how much, and from which call to which it is used."""

    at: int
    size: int
    first: int
    last: int
    offset: int = 0  # in the tape's own memory


class _Layout:
    """Where what a recording allocated lies in the memory of its tape."""

    def __init__(self, notes: list[Note], made: list[Tensor], result: Tensor) -> None:
        end = len(notes)
        self._pieces = [_Piece(_place(x), x.untyped_storage().nbytes(), end, -1) for x in made]
        self._pieces.sort(key=lambda piece: piece.at)
        self._starts = [piece.at for piece in self._pieces]
        for call, (name, arguments) in enumerate(notes):
            for kind, argument in zip(native.SIGNATURES[name], arguments, strict=True):
                if kind is c_void_p:
                    self._use(argument, call)
        self._use(result.data_ptr(), end)  # so that nobody overwrites it
        self.size = self._arrange()

    def move(self, pointer: Any, base: int) -> Any:
        """The address in the tape's memory, which begins at `base`; one outside the recording's memory stays."""
        piece = self._find(pointer)
        return pointer if piece is None else pointer - piece.at + piece.offset + base

    def _find(self, pointer: Any) -> _Piece | None:
        where = bisect_right(self._starts, pointer or 0) - 1
        if where < 0 or pointer >= self._starts[where] + self._pieces[where].size:
            return None
        return self._pieces[where]

    def _use(self, pointer: int | None, call: int) -> None:
        if piece := self._find(pointer):
            piece.first, piece.last = min(piece.first, call), max(piece.last, call)

    def _arrange(self) -> int:
        """Gives every piece the lowest place that is free while it is used; the bytes that takes."""
        living: list[_Piece] = []  # by offset
        total = 0
        for piece in sorted(self._pieces, key=lambda piece: piece.first):
            living = [other for other in living if other.last >= piece.first]
            for other in living:
                if piece.offset + piece.size <= other.offset:
                    break
                piece.offset = -(-(other.offset + other.size) // _LINE) * _LINE
            living = sorted((*living, piece), key=lambda piece: piece.offset)
            total = max(total, piece.offset + piece.size)
        return total


class _Recorder(native.Library):
    """The library itself, noting down what this thread calls."""

    def __init__(self, library: native.Library) -> None:
        self.path = library.path
        self.notes: list[Note] = []
        self._thread = threading.get_ident()
        for name in _NAMES:
            setattr(self, name, self._noting(name, getattr(library, name)))

    def _noting(self, name: str, function: Callable[..., None]) -> Callable[..., None]:
        def call(*arguments: Any) -> None:
            if threading.get_ident() == self._thread:
                self.notes.append((name, arguments))
            function(*arguments)

        return call


class _Watch(TorchDispatchMode):
    """Sees every torch operation: a replay can do without those that only allocate or look at memory another way."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing here is compiled, and telling dynamo so would import it: two seconds in a rank's first steps."""
        return False

    def __init__(self) -> None:
        super().__init__()
        self.made: list[Tensor] = []  # held until the recording ends, so that every address means one thing
        self.pure = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten.empty, torch.ops.aten.empty_like, torch.ops.aten.new_empty):
            self.made.append(out)
        else:
            views = out if isinstance(out, (list, tuple)) else [out]
            self.pure &= func.is_view and all(_place(x) == _place(args[0]) for x in views)
        return out


def _place(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()
