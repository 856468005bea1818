"""GGUF checkpoints: one file with metadata, tokenizer and tensors, mostly quantized in blocks.

Changes made by llama.cpp's converter are undone while reading, so that tensors have transformers' layout.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from yalis.checkpoint.base import Checkpoint, LazyTensor
from yalis.checkpoint.gguf_config import GgufMetadata, build_config, hugging_face_entries
from yalis.checkpoint.gguf_header import FLOATS, GgufEntry, import_gguf, read_header
from yalis.checkpoint.mapped_file import MappedFile, row_chunks
from yalis.errors import YalisError
from yalis.families import find_gguf_family

_ROPE_TENSORS = ("rope_freqs", "rope_factors_long", "rope_factors_short")
_SPLIT_NAME = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")


class GgufTensor(LazyTensor):
    """A tensor of a GGUF file, dequantized and converted to transformers' layout while it is read.

    `head_dim` is set where llama.cpp interleaved the rows of each head; `offset` is what it added to each element.
    """

    def __init__(self, name: str, entry: GgufEntry, head_dim: int | None = None, offset: float = 0.0) -> None:
        self.name = name
        self.shape = entry.shape
        self.dtype = FLOATS.get(entry.kind, torch.float32)
        self._entry, self._head_dim, self._offset = entry, head_dim, offset

    def read_into(self, out: Tensor, *index: slice) -> None:
        entry = self._entry
        ranges = self.ranges(out, index)
        if not out.numel():
            return
        if len(self.shape) == 1 and entry.block == 1:  # a vector is read as a matrix of one column
            ranges, out = [*ranges, range(1)], out.unsqueeze(-1)
            stored = entry.file.view(entry.offset, (self.shape[0], entry.block_bytes), torch.uint8)
        else:
            ranges, out = ([range(1), *ranges], out.unsqueeze(0)) if len(self.shape) == 1 else (ranges, out)
            if len(ranges) != 2:
                raise YalisError(f"tensor {entry.name!r} in {entry.file.path} has more than 2 dimensions")
            stored = entry.file.view(entry.offset, (math.prod(self.shape[:-1]), entry.row_bytes), torch.uint8)
        self._read_rows(stored, out, *ranges)

    def _read_rows(self, stored: Tensor, out: Tensor, rows: range, columns: range) -> None:
        """Dequantize from `stored` [rows, bytes], reading only the blocks that contain `columns`."""
        entry = self._entry
        first, last = columns.start // entry.block, -(-columns.stop // entry.block)
        within = slice(columns.start - first * entry.block, columns.stop - first * entry.block)
        width = (last - first) * entry.block
        held = range(first * entry.block_bytes, last * entry.block_bytes)
        for chunk in row_chunks(rows, width * 4):
            entry.file.check_size()
            low, high = self._stored_range(chunk)
            entry.file.prefetch_columns(entry.offset, range(low, high), stored.shape[1], held)
            data = stored[self._stored_rows(chunk), held.start : held.stop]
            entry.file.bytes_read += data.numel()
            values = self._dequantize(data.contiguous()).view(len(chunk), width)[:, within]
            if self._offset:
                values = values.float() - self._offset
            out[chunk.start - rows.start : chunk.stop - rows.start].copy_(values)
            entry.file.release(entry.offset + low * stored.shape[1], entry.offset + high * stored.shape[1])

    def _stored_rows(self, rows: range) -> slice | Tensor:
        """Return the file's index of these rows: transformers' RoPE pairs (i, i + d/2), llama.cpp's (2i, 2i + 1)."""
        if self._head_dim is None:
            return slice(rows.start, rows.stop)
        half = self._head_dim // 2
        row = torch.arange(rows.start, rows.stop)
        within = row % self._head_dim
        return row - within + 2 * (within % half) + within // half

    def _stored_range(self, rows: range) -> tuple[int, int]:
        """Return the bounds of _stored_rows(rows), rounded to whole heads."""
        step = self._head_dim or 1
        return rows.start // step * step, -(-rows.stop // step) * step

    def _dequantize(self, data: Tensor) -> Tensor:
        entry = self._entry
        if entry.kind in FLOATS:
            return data.view(FLOATS[entry.kind])
        gguf = import_gguf(entry.file)
        # Blocks are independent, so rows can be reshaped freely. The gguf package loops in Python over 16 rows at a
        # time: few long rows are faster than many short ones.
        row_bytes = 512 * entry.block_bytes
        flat = data.view(-1).numpy()
        end = len(flat) - len(flat) % row_bytes
        chunks = [chunk for chunk in (flat[:end].reshape(-1, row_bytes), flat[end:].reshape(1, -1)) if chunk.size]
        with np.errstate(all="ignore"):  # damaged blocks become NaN, which the sampler reports
            values = [gguf.dequantize(chunk, gguf.GGMLQuantizationType(entry.kind)).reshape(-1) for chunk in chunks]
        return torch.from_numpy(values[0] if len(values) == 1 else np.concatenate(values))


class GgufCheckpoint(Checkpoint):
    def __init__(self, path: Path, label: str | None = None) -> None:
        self.source = path
        self.label = label or str(path)
        self._files = [MappedFile(path)]
        self.metadata, entries = read_header(self._files[0])
        for split in _other_splits(path, self.metadata.get("split.count", 1)):
            self._files.append(MappedFile(split))
            entries += read_header(self._files[-1])[1]
        by_name = {entry.name: entry for entry in entries}
        metadata = GgufMetadata(self.metadata, {name: entry.shape for name, entry in by_name.items()}, self.label)
        self.family = find_gguf_family(metadata)
        factors = {
            name: _read_vector(by_name[f"{name}.weight"]) for name in _ROPE_TENSORS if f"{name}.weight" in by_name
        }
        self.config = build_config(metadata, self.family, factors, _main_dtype(entries))
        experts = metadata.integer("expert_count", 0)
        self._entries = {
            name: part for entry in entries for name, part in hugging_face_entries(entry, self.family, experts)
        }

    def names(self) -> Iterator[str]:
        return iter(self._entries)

    def find(self, name: str) -> GgufTensor | None:
        entry = self._entries.get(name)
        if entry is None:
            return None
        interleaved = self.family.gguf_format.interleaved_heads and (".q_proj." in name or ".k_proj." in name)
        if interleaved and entry.shape[0] % self.config["head_dim"]:
            raise YalisError(f"tensor {entry.name!r} in {entry.file.path} is not made of whole heads; fetch it again")
        offset = self.family.norm_offset if name.endswith("norm.weight") else 0.0  # llama.cpp stores offset + weight
        return GgufTensor(name, entry, self.config["head_dim"] if interleaved else None, offset)

    @property
    def header_digest(self) -> str:
        """A hash of everything in the file but the weights."""
        end = min((entry.offset for entry in self._entries.values() if entry.file is self._files[0]), default=None)
        return hashlib.sha256(self._files[0].buffer[:end]).hexdigest()

    @property
    def bytes_read(self) -> int:
        return sum(file.bytes_read for file in self._files)

    def close(self) -> None:
        for file in self._files:
            file.close()


def _other_splits(path: Path, count: object) -> list[Path]:
    """Return the remaining files of a model that is split into several, found by their names."""
    if not isinstance(count, int) or count < 2:
        return []
    match = _SPLIT_NAME.fullmatch(path.name)
    if match is None or int(match[2]) != 1 or int(match[3]) != count:
        first = f"...-00001-of-{count:05}.gguf"
        raise YalisError(f"{path} is one of the {count} files of a model; give the first of them, named {first}")
    splits = [path.with_name(f"{match[1]}-{index:05}-of-{match[3]}.gguf") for index in range(2, count + 1)]
    for split in splits:
        if not split.is_file():
            raise YalisError(f"{path} is the first of {count} files, but {split.name} is missing; fetch that file")
    return splits


def _read_vector(entry: GgufEntry) -> list[float]:
    if len(entry.shape) != 1:
        raise YalisError(f"tensor {entry.name!r} in {entry.file.path} is not a vector; fetch the file again")
    out = torch.empty(entry.shape)
    GgufTensor(entry.name, entry).read_into(out)
    return [float(value) for value in out]


def _main_dtype(entries: list[GgufEntry]) -> str:
    """Return the compute dtype on a GPU: that of most matrices, or bfloat16 if they are quantized."""
    kinds = Counter(entry.kind for entry in entries if len(entry.shape) > 1)
    common = kinds.most_common(1)[0][0] if kinds else 0
    return {0: "float32", 1: "float16", 28: "float32"}.get(common, "bfloat16")
