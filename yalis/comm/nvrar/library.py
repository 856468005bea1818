"""The built library's C interface, with its types; csrc/nvrar/launch.cu says what each function does."""

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

PHASES = {1: "reduce inside the node", 2: "between nodes", 3: "gather inside the node", 4: "epilogue", 5: "baseline"}

_I, _L, _U, _P = c_int, c_uint64, c_uint32, c_void_p
_SIGNATURES: dict[str, tuple[type | None, tuple[type, ...]]] = {
    "error": (c_char_p, ()),
    "id_bytes": (_I, ()),
    "make_id": (_I, (_P,)),
    "start": (_I, (_I, _I, _I, _P, _L)),
    "status": (_P, ()),
    "arena": (_P, ()),
    "reserve": (c_int64, (_L,)),
    "group_bytes": (_L, (_P, _I, _I, _L, _L)),
    "group": (_I, (_P, _I, _I, _L, _L, _P, _P, _L)),
    "capacity": (_L, (_I, _I)),
    "all_reduce": (_I, (_I, _P, _P, _L, _I, _I, _I, _I, _L, _P)),
    "all_reduce_norm": (_I, (_I, _P, _P, _U, _U, _I, _I, _I, _I, _L, _P, _P, _P, _I, c_float, _P)),
    "flat_bytes": (_L, (_I, _I, _L)),
    "flat_group": (_I, (_I, _I, _I, _L, _P, _P, _L)),
    "flat_all_reduce": (_I, (_I, _I, _P, _P, _L, _I, _I, _I, _L, _P)),
    "library_all_reduce": (_I, (_P, _P, _L, _I, _P)),
    "end": (None, ()),
}


class Status(Structure):
    """layout.h's Status: what the device tells the host, and `stop`, by which the host ends all waits."""

    _fields_ = (
        ("stop", c_uint32),
        ("reported", c_uint32),
        ("group", c_uint32),
        ("phase", c_uint32),
        ("step", c_uint32),
        ("peer", c_uint32),
        ("number", c_uint64),
    )


class Library:
    """NVSHMEM's world as one rank sees it, with this rank's arena and groups."""

    def __init__(self, path: Path) -> None:
        self.path = path
        built = CDLL(str(path))
        self._functions: dict[str, Callable[..., int]] = {}
        for name, (result, arguments) in _SIGNATURES.items():
            function = built[f"nvrar_{name}"]
            function.argtypes, function.restype = arguments, result
            self._functions[name] = function

    def call(self, name: str, *arguments: object) -> int:
        """What the function gives; raises where that is a failure."""
        given = self._functions[name](*arguments)
        if given is not None and given < 0:
            raise YalisFailure(f"nvrar: {self.error()}")
        return given

    def error(self) -> str:
        message: object = self._functions["error"]()
        return message.decode(errors="replace") if isinstance(message, bytes) else "unknown"

    def make_id(self) -> str:
        """What rank 0 tells everyone before all start."""
        made = create_string_buffer(self.call("id_bytes"))
        self.call("make_id", made)
        return made.raw.hex()

    def start(self, device: int, rank: int, size: int, id: str, arena: int) -> None:
        self.call("start", device, rank, size, create_string_buffer(bytes.fromhex(id)), arena)

    def reserve(self, size: int) -> int:
        """Where this many bytes of the arena start; negative where they are not left."""
        return self._functions["reserve"](size)

    def status(self) -> Status:
        """The memory itself, not a copy."""
        where = self._functions["status"]()
        held: Status = Status.from_address(where)
        return held


def int32s(values: Sequence[int]) -> Array[c_int32]:
    return (c_int32 * len(values))(*values)


def uint64s(values: Sequence[int]) -> Array[c_uint64]:
    return (c_uint64 * len(values))(*values)
