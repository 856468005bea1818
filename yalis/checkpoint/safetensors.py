"""Checkpoints in a Hugging Face folder: config.json and one or more .safetensors files.

The headers are parsed here instead of by the safetensors package, so that pages can be released while loading, and a
truncated file is reported when it is opened.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from yalis.checkpoint.base import Checkpoint, LazyTensor
from yalis.checkpoint.json_file import read_json_object
from yalis.checkpoint.mapped_file import MappedFile, row_chunks
from yalis.checkpoint.mxfp4 import BLOCK, BLOCKS, SCALES, Mxfp4Tensor
from yalis.checkpoint.unsupported import refuse_lfs_pointer, refuse_pickles, unsupported_quantization
from yalis.errors import YalisError
from yalis.spec import read_spec

INDEX = "model.safetensors.index.json"
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_BITS = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8}
_BITS |= {"U16": 16, "I16": 16, "F16": 16, "BF16": 16, "U32": 32, "I32": 32, "F32": 32, "U64": 64, "I64": 64, "F64": 64}
_MAX_HEADER = 100_000_000  # the limit of the safetensors library
_MAX_DIMENSIONS = 8


@dataclass(frozen=True)
class _Entry:
    file: MappedFile
    dtype: str
    shape: tuple[int, ...]
    offset: int


class SafetensorsTensor(LazyTensor):
    def __init__(self, name: str, entry: _Entry) -> None:
        self.name = name
        self.shape = entry.shape
        self.dtype = _DTYPES[entry.dtype]
        self._entry = entry

    def read_into(self, out: Tensor, *index: slice) -> None:
        file, start = self._entry.file, self._entry.offset
        rows, *columns = self.ranges(out, index)
        itemsize = self.dtype.itemsize
        row_bytes = math.prod(self.shape[1:]) * itemsize
        within = (slice(None), *(slice(part.start, part.stop) for part in columns))
        for chunk in row_chunks(rows, row_bytes):
            if len(columns) == 1:
                held = range(columns[0].start * itemsize, columns[0].stop * itemsize)
                file.prefetch_columns(start, chunk, row_bytes, held)
            part = file.view(start + chunk.start * row_bytes, (len(chunk), *self.shape[1:]), self.dtype)[within]
            out[chunk.start - rows.start : chunk.stop - rows.start].copy_(part)
            file.bytes_read += part.numel() * itemsize
            file.release(start + chunk.start * row_bytes, start + chunk.stop * row_bytes)


class SafetensorsCheckpoint(Checkpoint):
    def __init__(self, folder: Path, label: str | None = None) -> None:
        self.source = folder
        self.label = label or str(folder)
        self.config = read_config(folder / "config.json")
        self._entries: dict[str, _Entry] = {}
        paths = _weight_files(folder)
        method = unsupported_quantization(self.config)
        if not paths or method is not None:
            read_spec(self.config, self.label)  # an unsupported architecture is the better message
        if method is not None:
            raise YalisError(
                f"{self.label} is quantized with {method}, which is not supported yet; give its float32, bfloat16 or "
                "float16 checkpoint, or a GGUF file"
            )
        if not paths:
            refuse_pickles(folder, self.label)
            raise YalisError(
                f"{folder} has a config.json but no .safetensors file; give a folder with weights, or load='random'"
            )
        for path in paths:
            refuse_lfs_pointer(path)
        self._files = [MappedFile(path) for path in paths]
        for file in self._files:
            self._entries.update(_read_header(file))

    def names(self) -> Iterator[str]:
        """Yield the names of all tensors. Those of MXFP4 have the name of the tensor that they replace."""
        for name in self._entries:
            if self._find_mxfp4(name.removesuffix(BLOCKS)) is not None:
                yield name.removesuffix(BLOCKS)
            elif self._find_mxfp4(name.removesuffix(SCALES)) is None:
                yield name

    def find(self, name: str) -> LazyTensor | None:
        entry = self._entries.get(name)
        if entry is None:
            return self._find_mxfp4(name)
        if entry.dtype not in _DTYPES:
            raise YalisError(
                f"tensor {name!r} in {entry.file.path} is stored as {entry.dtype}; "
                f"accepted: {', '.join(_DTYPES)} (a checkpoint in one of these, or a GGUF file, works)"
            )
        return SafetensorsTensor(name, entry)

    def _find_mxfp4(self, name: str) -> Mxfp4Tensor | None:
        blocks, scales = self._entries.get(name + BLOCKS), self._entries.get(name + SCALES)
        if blocks is None or scales is None:
            return None
        expected = (*scales.shape, BLOCK // 2)
        if len(scales.shape) != 3 or blocks.shape != expected or blocks.dtype != "U8" or scales.dtype != "U8":
            raise YalisError(
                f"tensor {name + BLOCKS!r} in {blocks.file.path} has type {blocks.dtype} and shape {blocks.shape}, but "
                f"its scales have {scales.dtype} and {scales.shape}; MXFP4 needs U8 of shape [experts, rows, groups] "
                f"and blocks of {BLOCK // 2} bytes: fetch the model again"
            )
        return Mxfp4Tensor(name, scales.shape, (blocks.file, blocks.offset), (scales.file, scales.offset))

    @property
    def bytes_read(self) -> int:
        return sum(file.bytes_read for file in self._files)

    def close(self) -> None:
        for file in self._files:
            file.close()


def read_config(path: Path) -> dict[str, Any]:
    return read_json_object(path, "fetch the model's config.json again")


def _weight_files(folder: Path) -> list[Path]:
    index = folder / INDEX
    if not index.exists():
        return sorted(folder.glob("*.safetensors"))
    weight_map = read_json_object(index, f"fetch the model's {INDEX} again").get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise YalisError(f"{index} has no weight_map; fetch the model's {INDEX} again")
    shards = sorted({str(shard) for shard in weight_map.values()})
    for shard in shards:
        # A file of the folder may be a symbolic link to anywhere, as in the cache of the Hugging Face hub.
        if Path(shard).is_absolute() or ".." in Path(shard).parts:
            raise YalisError(f"{index} names {shard!r}, which is not in its folder; fetch the model again")
        if not _is_file(folder / shard):
            raise YalisError(f"{folder} lacks the shard {shard}, which its {INDEX} names; fetch that file")
    return [folder / shard for shard in shards]


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # such as a name that is too long for any file
        return False


def _read_header(file: MappedFile) -> dict[str, _Entry]:
    """Return every tensor of a file by name; raises if one is not inside the file."""
    damaged = f"{file.path} is not a complete safetensors file: {{}}; fetch it again"
    if file.size < 8:
        raise YalisError(damaged.format("it is truncated"))
    (length,) = struct.unpack_from("<Q", file.buffer, 0)
    if length > min(_MAX_HEADER, file.size - 8):
        raise YalisError(damaged.format(f"its header of {length} bytes does not fit its {file.size} bytes"))
    try:
        header = json.loads(bytes(file.buffer[8 : 8 + length]))
        header.pop("__metadata__", None)
        entries = {}
        for name, info in header.items():
            begin, end = info["data_offsets"]
            shape, dtype = tuple(info["shape"]) or (1,), info["dtype"]
            if len(shape) > _MAX_DIMENSIONS or not all(type(n) is int and n < 1 << 63 for n in (begin, end, *shape)):
                raise ValueError(f"tensor {name!r} has an invalid shape or offset")
            bits = math.prod(shape) * _BITS.get(dtype, 0)
            if not 0 <= begin <= end or min(shape) < 0 or (dtype in _BITS and end - begin != bits // 8):
                raise YalisError(damaged.format(f"the size of tensor {name!r} does not match its shape"))
            if 8 + length + end > file.size:
                raise YalisError(damaged.format(f"it ends before tensor {name!r} does"))
            entries[name] = _Entry(file, dtype, shape, 8 + length + begin)
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise YalisError(damaged.format("its header cannot be read")) from error
    return entries
