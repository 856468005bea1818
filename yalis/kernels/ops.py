"""What layers compute between collectives: each in native code where the tensors suit it, else in plain torch.

The plain versions are the references, and run on every device and in every dtype.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from yalis.kernels import native

# Above this, MKL's blocking beats streaming the matrix past the rows.
MOST_ROWS = 48


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [T, in] times weight [out, in] transposed, plus bias."""
    rows = x.shape[0]
    lib = _native(x)
    if lib is None or not 0 < rows <= MOST_ROWS or x.stride(1) != 1 or not weight.is_contiguous():
        return F.linear(x, weight, bias)
    out, depth = weight.shape
    y = x.new_empty((rows, out))
    lib.linear(
        y.data_ptr(), x.data_ptr(), x.stride(0), weight.data_ptr(), None if bias is None else bias.data_ptr(),
        rows, out, depth, torch.get_num_threads(),
    )  # fmt: skip
    return y


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dimension of x, [T, C] or [T, heads, C], in the dtype of the weight."""
    lib = _native(x)
    if lib is None or weight.dtype != x.dtype or not _packed(x):
        return F.rms_norm(x.to(weight.dtype), weight.shape, weight, eps).to(x.dtype)
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    cols = weight.shape[0]
    inner = x.shape[1] if x.dim() == 3 else 1
    lib.rms_norm(
        y.data_ptr(), x.data_ptr(), x.stride(0), weight.data_ptr(), eps,
        x.shape[0], inner, cols, torch.get_num_threads(),
    )  # fmt: skip
    return y


def take(table: Tensor, rows: Tensor) -> Tensor:
    """The rows of table [N, C] that `rows` [T] int64 names, in its order."""
    lib = _native(table)
    if lib is None or table.stride(1) != 1 or not rows.is_contiguous():
        return table.index_select(0, rows)
    count, width = rows.shape[0], table.shape[1]
    y = table.new_empty((count, width))
    lib.take(y.data_ptr(), table.data_ptr(), table.stride(0), rows.data_ptr(), count, width)
    return y


def add(x: Tensor, y: Tensor) -> Tensor:
    """x + y, of one shape."""
    lib = _native(x)
    if lib is None or x.shape[0] > MOST_ROWS or not (x.is_contiguous() and y.is_contiguous()):
        return x + y
    out = torch.empty_like(x)
    lib.add(out.data_ptr(), x.data_ptr(), y.data_ptr(), x.numel())
    return out


def gated(gate_up: Tensor, activation: str) -> Tensor:
    """activation(gate) * up, for the two halves of gate_up [T, 2 * width]; silu, gelu or gelu_tanh."""
    lib = _native(gate_up)
    if lib is None or activation != "silu" or gate_up.stride(1) != 1:
        gate, up = gate_up.chunk(2, dim=-1)
        if activation == "silu":
            return F.silu(gate).mul_(up)
        return F.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none").mul_(up)
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    y = gate_up.new_empty((rows, width))
    lib.silu_gate(y.data_ptr(), gate_up.data_ptr(), gate_up.stride(0), rows, width, torch.get_num_threads())
    return y


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first dim of x's last dimension, [T, heads, D], pairing element i with i + dim/2.

    cos and sin are [T, 1, dim], the sign of the first half in the sines.
    """
    dim = cos.shape[-1]
    lib = _native(x)
    if lib is None or not _packed(x) or cos.dtype != x.dtype or cos.stride() != sin.stride() or cos.stride(2) != 1:
        turned = x if dim == x.shape[-1] else x[..., :dim]
        half = torch.roll(turned, dim // 2, -1)
        out = torch.addcmul(turned * cos, half, sin)
        return out if dim == x.shape[-1] else torch.cat((out, x[..., dim:]), dim=-1)
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    lib.rotate(
        y.data_ptr(), x.data_ptr(), x.stride(0), cos.data_ptr(), sin.data_ptr(), cos.stride(0),
        *x.shape, dim, torch.get_num_threads(),
    )  # fmt: skip
    return y


def _native(x: Tensor) -> native.Library | None:
    """The native library, where it computes on tensors such as this one."""
    return native.load() if x.is_cpu and x.dtype is torch.float32 else None


def _packed(x: Tensor) -> bool:
    """Whether only the first dimension of [T, C] or [T, heads, C] may skip elements."""
    strides = x.stride()
    return strides[-1] == 1 and (len(strides) == 2 or strides[1] == x.shape[2])
