"""Records the native calls of a function and replays all of them in one call: on a CPU, what a CUDA graph is on a GPU.

A replay reads its inputs at the addresses of the recording, so new inputs are written into the same tensors.
Intermediate results get new addresses in a buffer of their own, which reuses memory as soon as no later call reads it.
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
_MAX_ARGUMENTS = max(map(len, native.SIGNATURES.values()))
_CACHE_LINE = 64  # bytes; no two allocations share one


class _Value(Union):
    _fields_ = [("p", c_void_p), ("i", c_int64), ("f", c_double)]


class _Call(Structure):
    _fields_ = [("function", c_int64), ("arguments", _Value * _MAX_ARGUMENTS)]


RecordedCall = tuple[str, tuple[Any, ...]]  # a function of native.c and its arguments


class ReplayBuffer:
    """The native calls of a function, and the memory for their intermediate results."""

    def __init__(
        self, library: native.Library, calls: list[RecordedCall], allocated: list[Tensor], result: Tensor
    ) -> None:
        """`allocated`: the tensors that were allocated between the calls."""
        layout = _MemoryLayout(calls, allocated, result)
        self._library, self._count = library, len(calls)
        self._names = [name for name, _ in calls]
        self.memory = torch.empty(layout.size // 4)
        base = self.memory.data_ptr()
        self._calls: Array[_Call] = (_Call * len(calls))()
        for entry, (name, arguments) in zip(self._calls, calls, strict=True):
            entry.function = _NAMES.index(name)
            for index, (ctype, argument) in enumerate(zip(native.SIGNATURES[name], arguments, strict=True)):
                value = layout.relocate(argument, base) if ctype is c_void_p else argument
                setattr(entry.arguments[index], _FIELDS[ctype], value)
        start = (layout.relocate(result.data_ptr(), base) - base) // 4
        self._result = self.memory.as_strided(result.shape, result.stride(), start)

    def replay(self) -> Tensor:
        """Run the calls on the current inputs and return the result, which the next replay overwrites."""
        listener = native.current_listener()
        if listener is None:
            self._library.replay(addressof(self._calls), self._count)
        else:
            self._replay_timed(listener)
        return self._result

    def _replay_timed(self, listener: native.CallListener) -> None:
        """Replay, and report the time of each call to the listener."""
        times = (c_int64 * (self._count + 1))()
        self._library.replay_timed(addressof(self._calls), self._count, addressof(times))
        for name, (begin, end) in zip(self._names, pairwise(times), strict=True):
            listener(name, begin, end)


def record(function: Callable[[], Tensor]) -> tuple[Tensor, ReplayBuffer | None]:
    """Run a function and return its result and its native calls, or None if it also used other operations."""
    library = native.load()
    if library is None:
        return function(), None
    recorder, observer = _RecordingLibrary(library), _OperationObserver()
    with native.replaced(recorder), observer:
        result = function()
    if not observer.replayable:
        return result, None
    return result, ReplayBuffer(library, recorder.calls, observer.allocated, result)


@dataclass
class _Allocation:
    """Memory allocated during a recording, and the first and last call that use it."""

    address: int
    size: int
    first: int
    last: int
    offset: int = 0  # in the memory of the replay buffer


class _MemoryLayout:
    """Assigns the allocations of a recording to offsets in one buffer, which overlap if their lifetimes do not."""

    def __init__(self, calls: list[RecordedCall], allocated: list[Tensor], result: Tensor) -> None:
        end = len(calls)
        self._allocations = [_Allocation(_storage_address(x), x.untyped_storage().nbytes(), end, -1) for x in allocated]
        self._allocations.sort(key=lambda allocation: allocation.address)
        self._addresses = [allocation.address for allocation in self._allocations]
        for index, (name, arguments) in enumerate(calls):
            for ctype, argument in zip(native.SIGNATURES[name], arguments, strict=True):
                if ctype is c_void_p:
                    self._extend_lifetime(argument, index)
        self._extend_lifetime(result.data_ptr(), end)
        self.size = self._assign_offsets()

    def relocate(self, pointer: Any, base: int) -> Any:
        """Return the address in a buffer that starts at `base`. Pointers outside the recording's memory are kept."""
        allocation = self._find(pointer)
        return pointer if allocation is None else pointer - allocation.address + allocation.offset + base

    def _find(self, pointer: Any) -> _Allocation | None:
        index = bisect_right(self._addresses, pointer or 0) - 1
        if index < 0 or pointer >= self._addresses[index] + self._allocations[index].size:
            return None
        return self._allocations[index]

    def _extend_lifetime(self, pointer: int | None, call: int) -> None:
        if allocation := self._find(pointer):
            allocation.first, allocation.last = min(allocation.first, call), max(allocation.last, call)

    def _assign_offsets(self) -> int:
        """Give every allocation the lowest offset that is free during its lifetime. Returns the bytes used."""
        live: list[_Allocation] = []  # by offset
        total = 0
        for allocation in sorted(self._allocations, key=lambda allocation: allocation.first):
            live = [other for other in live if other.last >= allocation.first]
            for other in live:
                if allocation.offset + allocation.size <= other.offset:
                    break
                allocation.offset = -(-(other.offset + other.size) // _CACHE_LINE) * _CACHE_LINE
            live = sorted((*live, allocation), key=lambda allocation: allocation.offset)
            total = max(total, allocation.offset + allocation.size)
        return total


class _RecordingLibrary(native.Library):
    """A library that runs the native calls of this thread and records them."""

    def __init__(self, library: native.Library) -> None:
        self.path = library.path
        self.calls: list[RecordedCall] = []
        self._thread = threading.get_ident()
        for name in _NAMES:
            setattr(self, name, self._recording(name, getattr(library, name)))

    def _recording(self, name: str, function: Callable[..., None]) -> Callable[..., None]:
        def call(*arguments: Any) -> None:
            if threading.get_ident() == self._thread:
                self.calls.append((name, arguments))
            function(*arguments)

        return call


class _OperationObserver(TorchDispatchMode):
    """Observes all torch operations. A replay can skip those that only allocate memory or create views."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: nothing here is compiled, and True would import dynamo, which takes two seconds."""
        return False

    def __init__(self) -> None:
        super().__init__()
        self.allocated: list[Tensor] = []  # kept until the recording ends, so that no address is used twice
        self.replayable = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten.empty, torch.ops.aten.empty_like, torch.ops.aten.new_empty):
            self.allocated.append(out)
        else:
            views = out if isinstance(out, (list, tuple)) else [out]
            self.replayable &= func.is_view and all(_storage_address(x) == _storage_address(args[0]) for x in views)
        return out


def _storage_address(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()
