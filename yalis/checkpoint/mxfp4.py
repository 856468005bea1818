"""Experts stored as MXFP4, as in gpt-oss: 4-bit floats in blocks of 32 with a common power of two."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from yalis.checkpoint.base import LazyTensor
from yalis.checkpoint.mapped_file import MappedFile, row_chunks

#: The suffixes of the two tensors of uint8 that replace a tensor of experts.
BLOCKS, SCALES = "_blocks", "_scales"
BLOCK = 32  # elements, in 16 bytes; the element with the even index is in the lower half of a byte
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_SCALE_BIAS = 127


class Mxfp4Tensor(LazyTensor):
    """A tensor [experts, columns, rows] whose columns are stored in blocks; dequantized while it is read.

    Stored are blocks [experts, rows, columns / 32, 16] and scales [experts, rows, columns / 32].
    """

    dtype = torch.bfloat16  # has every value

    def __init__(self, name: str, shape: tuple[int, int, int], blocks: tuple[MappedFile, int],
                 scales: tuple[MappedFile, int]) -> None:  # fmt: skip
        """`shape`: of the scales. `blocks`, `scales`: file and offset."""
        experts, rows, groups = shape
        self.name, self.shape = name, (experts, groups * BLOCK, rows)
        self._rows, self._groups, self._blocks, self._scales = rows, groups, blocks, scales
        self._lut = torch.tensor([*_VALUES, *(-value for value in _VALUES)])

    def read_into(self, out: Tensor, *index: slice) -> None:
        experts, columns, rows = self.ranges(out, index)
        groups = range(columns.start // BLOCK, -(-columns.stop // BLOCK))
        within = slice(columns.start - groups.start * BLOCK, columns.stop - groups.start * BLOCK)
        if not out.numel():
            return
        for expert in experts:
            target = out[expert - experts.start]  # [columns, rows]
            for chunk in row_chunks(rows, len(groups) * BLOCK * 4):
                stored = range(expert * self._rows + chunk.start, expert * self._rows + chunk.stop)
                values = self._dequantize(stored, groups)[:, within]
                target[:, chunk.start - rows.start : chunk.stop - rows.start].copy_(values.T)

    def _dequantize(self, rows: range, groups: range) -> Tensor:
        """Return [rows, elements of these groups] of the stored matrix of all experts."""
        packed = self._read(self._blocks, rows, groups, (BLOCK // 2,)).int()
        scales = self._read(self._scales, rows, groups, ()).int() - _SCALE_BIAS
        values = self._lut[torch.stack((packed & 15, packed >> 4), dim=-1)].flatten(-2)
        return torch.ldexp(values, scales.unsqueeze(-1)).flatten(1)

    def _read(self, stored: tuple[MappedFile, int], rows: range, groups: range, size: tuple[int, ...]) -> Tensor:
        file, offset = stored
        row_bytes = self._groups * math.prod(size)
        start = offset + rows.start * row_bytes
        data = file.view(start, (len(rows), self._groups, *size), torch.uint8)[:, groups.start : groups.stop].clone()
        file.bytes_read += data.numel()
        file.release(start, start + len(rows) * row_bytes)
        return data
