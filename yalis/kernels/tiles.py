"""Matrices as tiles that one instruction brings, from Hopper on: a descriptor says where they lie, not each address."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

_STEP = 16  # bytes


def describable(*matrices: Tensor) -> bool:
    """Whether rows of these matrices lie as descriptors want it: numbers side by side, rows in whole steps."""
    return all(
        matrix.stride(1) == 1 and matrix.stride(0) * matrix.itemsize % _STEP == 0 and matrix.data_ptr() % _STEP == 0
        for matrix in matrices
    )


def described(
    tensor: Tensor, tile: list[int], shape: Sequence[int] | None = None, strides: Sequence[int] | None = None
) -> Any:
    """The tensor, or the view of it that `shape` and `strides` say, for a kernel that loads such tiles of it."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor(tensor, list(shape or tensor.shape), list(strides or tensor.stride()), tile)
