"""Device memory of the paged KV cache."""

from __future__ import annotations

import torch
from torch import Tensor


class KVPool:
    """Keys and values of all layers of this rank, [num_blocks, block_size, kv_heads, head_dim] each."""

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (num_layers, 2, num_blocks, block_size, num_kv_heads, head_dim)
        # Zeroed, because padding of block tables reads block 0, and NaN times a masked weight of 0 would be NaN.
        self._kv = torch.zeros(shape, dtype=dtype, device=device)
        self.num_blocks = num_blocks
        self.block_size = block_size

    @property
    def nbytes(self) -> int:
        return self._kv.nbytes

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Return (keys, values) of layer `index` of this rank."""
        return self._kv[index, 0], self._kv[index, 1]

    @staticmethod
    def block_bytes(num_layers: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        """Return the bytes of one block over all layers."""
        return num_layers * 2 * block_size * num_kv_heads * head_dim * dtype.itemsize
