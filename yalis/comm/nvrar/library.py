"""ctypes bindings of the C interface of csrc/nvrar/launch.cu, which documents each function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import (
    CDLL,
    Array,
    Structure,
    c_char_p,
    c_float,
    c_int,
    c_int32,
    c_int64,
    c_uint32,
    c_uint64,
    c_void_p,
    create_string_buffer,
)
from pathlib import Path

from yalis.errors import YalisFailure

# The enum Phase of layout.h.
PHASES = {
    1: "intra-node reduce-scatter",
    2: "inter-node exchange",
    3: "intra-node all-gather",
    4: "epilogue",
    5: "baseline",
}

_I, _L, _U, _P = c_int, c_uint64, c_uint32, c_void_p
_SIGNATURES: dict[str, tuple[type | None, tuple[type, ...]]] = {
    "error": (c_char_p, ()),
    "unique_id_bytes": (_I, ()),
    "get_unique_id": (_I, (_P,)),
    "init": (_I, (_I, _I, _I, _P, _L)),
    "status": (_P, ()),
    "arena": (_P, ()),
    "reserve": (c_int64, (_L,)),
    "group_bytes": (_L, (_P, _I, _I, _L, _L)),
    "create_group": (_I, (_P, _I, _I, _L, _L, _P, _P, _L)),
    "all_reduce": (_I, (_I, _P, _P, _L, _I, _I, _I, _I, _I, _L, _I, _P)),
    "all_reduce_norm": (
        _I,
        (_I, _P, _P, _U, _U, _I, _I, _I, _I, _I, _L, _P, _P, _P, _P, _I, c_float, _I, _P),
    ),
    "add_norm": (_I, (_P, _U, _U, _I, _I, _I, _P, _P, _P, _P, _I, c_float, _P)),
    "tear_test": (_I, (_I, _L, _I, _P)),
    "flat_bytes": (_L, (_I, _I, _L)),
    "create_flat_group": (_I, (_I, _I, _I, _L, _P, _P, _L)),
    "flat_all_reduce": (_I, (_I, _I, _P, _P, _L, _I, _I, _I, _L, _P)),
    "nvshmem_all_reduce": (_I, (_P, _P, _L, _I, _P)),
    "finalize": (None, ()),
}


class Status(Structure):
    """The struct Status of layout.h: the first wait that timed out, and `stop`, with which the host ends all waits."""

    _fields_ = (
        ("stop", c_uint32),
        ("reported", c_uint32),
        ("group", c_uint32),
        ("phase", c_uint32),
        ("step", c_uint32),
        ("peer", c_uint32),
        ("sequence", c_uint64),
    )


class Library:
    """The loaded library, with this rank's NVSHMEM state, arena and groups."""

    def __init__(self, path: Path) -> None:
        self.path = path
        library = CDLL(str(path))
        self._functions: dict[str, Callable[..., int]] = {}
        for name, (result, arguments) in _SIGNATURES.items():
            function = library[f"nvrar_{name}"]
            function.argtypes, function.restype = arguments, result
            self._functions[name] = function

    def call(self, name: str, *arguments: object) -> int:
        """Call `nvrar_<name>` and return its result. Raises a YalisFailure if that is negative."""
        result = self._functions[name](*arguments)
        if result is not None and result < 0:
            raise YalisFailure(f"nvrar: {self.error()}")
        return result

    def error(self) -> str:
        message: object = self._functions["error"]()
        return message.decode(errors="replace") if isinstance(message, bytes) else "unknown"

    def get_unique_id(self) -> str:
        """Return NVSHMEM's unique id in hex. Rank 0 creates it and all ranks pass it to `init`."""
        unique_id = create_string_buffer(self.call("unique_id_bytes"))
        self.call("get_unique_id", unique_id)
        return unique_id.raw.hex()

    def init(self, device: int, rank: int, size: int, unique_id: str, arena_bytes: int) -> None:
        self.call("init", device, rank, size, create_string_buffer(bytes.fromhex(unique_id)), arena_bytes)

    def reserve(self, size: int) -> int:
        """Reserve this many bytes of the arena. Returns their offset, negative if the arena is full."""
        return self._functions["reserve"](size)

    def status(self) -> Status:
        """Return a view of the status in host memory, not a copy."""
        address = self._functions["status"]()
        status: Status = Status.from_address(address)
        return status


def int32s(values: Sequence[int]) -> Array[c_int32]:
    return (c_int32 * len(values))(*values)


def uint64s(values: Sequence[int]) -> Array[c_uint64]:
    return (c_uint64 * len(values))(*values)
