"""The header of a GGUF file: metadata and the table of tensors.

It is parsed here because the gguf package takes seconds for a vocabulary and does not report a truncated file clearly.
The package is used only for the quantized types.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from yalis.checkpoint.mapped_file import MappedFile
from yalis.errors import YalisError

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
#: Far above what any model has. A damaged number could make the weights be read as metadata, for hours.
_MAX_PAIRS, _MAX_TENSORS, _MAX_ARRAY, _MAX_STRING = 1 << 16, 1 << 20, 1 << 23, 1 << 24
#: ggml types that are not quantized
FLOATS = {0: torch.float32, 1: torch.float16, 28: torch.float64, 30: torch.bfloat16}


@dataclass(frozen=True)
class GgufEntry:
    """A tensor's location in the file. `shape` is outermost first, as in torch."""

    file: MappedFile
    name: str
    shape: tuple[int, ...]
    kind: int  # ggml type
    block: int  # elements in a quantized block, else 1
    block_bytes: int
    offset: int

    @property
    def row_bytes(self) -> int:
        return self.shape[-1] // self.block * self.block_bytes


class _Cursor:
    def __init__(self, file: MappedFile) -> None:
        self.buffer, self.size, self.position = file.buffer, file.size, 0

    def unpack(self, layout: str) -> tuple[Any, ...]:
        values = struct.unpack_from("<" + layout, self.buffer, self.position)
        self.position += struct.calcsize("<" + layout)
        return values

    def string(self) -> str:
        (length,) = self.unpack("Q")
        if length > min(self.size - self.position, _MAX_STRING):
            raise struct.error("a string is too long")
        self.position += length
        return self.buffer[self.position - length : self.position].decode("utf-8", "replace")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind in _SCALARS:
            return self.unpack(_SCALARS[kind])[0]
        if kind != _ARRAY:
            raise struct.error(f"unknown value type {kind}")
        inner, count = self.unpack("IQ")
        if count > min(self.size - self.position, _MAX_ARRAY):  # an element has at least one byte
            raise struct.error("an array is too long")
        if inner in _SCALARS:
            return list(self.unpack(f"{count}{_SCALARS[inner]}"))
        return [self.value(inner) for _ in range(count)]


def read_header(file: MappedFile) -> tuple[dict[str, Any], list[GgufEntry]]:
    """Return the metadata and the table of tensors; raises if a tensor is not inside the file."""
    cursor = _Cursor(file)
    if file.buffer[:4] != MAGIC:
        raise YalisError(f"{file.path} is not a GGUF file; give a .gguf file, or a folder with config.json")
    try:
        cursor.position = 4
        version, tensor_count, pair_count = cursor.unpack("IQQ")
        if version not in _VERSIONS:
            raise YalisError(f"{file.path} is GGUF version {version}; accepted: little-endian versions 2 and 3")
        if pair_count > _MAX_PAIRS or tensor_count > _MAX_TENSORS:
            raise struct.error("more entries than any model has")
        metadata: dict[str, Any] = {}
        for _ in range(pair_count):
            key = cursor.string()
            metadata[key] = cursor.value(cursor.unpack("I")[0])
        table = [_read_tensor_info(cursor) for _ in range(tensor_count)]
    except (struct.error, RecursionError) as error:
        raise YalisError(f"{file.path} is damaged or truncated: its header cannot be read; fetch it again") from error
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise YalisError(f"{file.path} is damaged: its alignment is {alignment!r}; fetch it again")
    start = -(-cursor.position // alignment) * alignment
    return metadata, [_locate(file, start, *info) for info in table]


def _read_tensor_info(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    name = cursor.string()
    (dimensions,) = cursor.unpack("I")
    if dimensions > 8:  # a corrupt count could exhaust memory
        raise struct.error(f"tensor {name!r} has {dimensions} dimensions")
    sizes = cursor.unpack(f"{dimensions}Q")
    kind, offset = cursor.unpack("IQ")
    return name, tuple(reversed(sizes)), kind, offset


def _locate(file: MappedFile, start: int, name: str, shape: tuple[int, ...], kind: int, offset: int) -> GgufEntry:
    if kind in FLOATS:
        block, block_bytes = 1, FLOATS[kind].itemsize
    else:
        block, block_bytes = _block_size(file, name, kind)
    elements = 1
    for size in shape:
        elements *= size
    if not shape or shape[-1] % block:
        raise YalisError(f"{file.path} is damaged: tensor {name!r} of shape {shape} is not made of whole blocks")
    if start + offset + elements // block * block_bytes > file.size:
        raise YalisError(f"{file.path} is truncated: it ends before its tensor {name!r} does; fetch it again")
    return GgufEntry(file, name, shape, kind, block, block_bytes, start + offset)


def _block_size(file: MappedFile, name: str, kind: int) -> tuple[int, int]:
    """Return the elements and bytes of a quantized block; raises if the gguf package cannot dequantize the type."""
    import numpy as np

    gguf = import_gguf(file)
    try:
        quantized = gguf.GGMLQuantizationType(kind)
        block, block_bytes = gguf.GGML_QUANT_SIZES[quantized]
        gguf.dequantize(np.zeros((1, block_bytes), dtype=np.uint8), quantized)
    except (ValueError, KeyError):
        problem = f"ggml type {kind}, which the installed gguf package does not support; try: pip install -U gguf"
        raise YalisError(f"tensor {name!r} in {file.path} is stored as {problem}") from None
    except NotImplementedError:
        problem = (
            f"{quantized.name}, which the gguf package cannot dequantize; use a file in another type, such as Q8_0"
        )
        raise YalisError(f"tensor {name!r} in {file.path} is stored as {problem}") from None
    return int(block), int(block_bytes)


def import_gguf(file: MappedFile) -> ModuleType:
    try:
        import gguf
    except ImportError:
        raise YalisError(f"{file.path} is quantized, and reading it needs the gguf package: pip install gguf") from None
    module: ModuleType = gguf
    return module
