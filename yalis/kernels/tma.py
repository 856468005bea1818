"""Tensor descriptors for TMA (tensor memory accelerator) loads and stores, available from Hopper on.

A kernel that receives a descriptor moves a whole tile with one instruction, instead of computing an address for every
row, and out-of-bounds elements are read as zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

_ALIGNMENT = 16  # bytes: what TMA requires of the base address and of every stride but the last


def tma_compatible(*matrices: Tensor) -> bool:
    """Return whether TMA can address the 2-D `matrices`: unit column stride, 16-byte aligned base and row stride."""
    return all(
        matrix.stride(1) == 1
        and matrix.stride(0) * matrix.itemsize % _ALIGNMENT == 0
        and matrix.data_ptr() % _ALIGNMENT == 0
        for matrix in matrices
    )


def make_descriptor(
    tensor: Tensor, block_shape: list[int], shape: Sequence[int] | None = None, strides: Sequence[int] | None = None
) -> Any:
    """Return a tensor descriptor for kernels that load or store tiles of `block_shape`.

    `shape` and `strides` (in elements) describe another view of the tensor's memory; by default, the tensor itself.
    """
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor(tensor, list(shape or tensor.shape), list(strides or tensor.stride()), block_shape)
