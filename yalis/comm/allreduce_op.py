"""All-reduce as a custom operator, so that torch.compile keeps it as one node of the graph.

An operator takes tensors and integers only, so each communicator gets an integer id.
"""

from __future__ import annotations

from itertools import count
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import Tensor

from yalis.comm.base import Communicator

_next_id = count()
_id_of: WeakKeyDictionary[Communicator, int] = WeakKeyDictionary()
_group_of: WeakValueDictionary[int, Communicator] = WeakValueDictionary()


class AllReduceOp:
    """In-place all-reduce over one group, also with the norm that follows it, for eager and compiled code."""

    def __init__(self, group: Communicator) -> None:
        if group not in _id_of:
            group_id = next(_next_id)
            _id_of[group], _group_of[group_id] = group_id, group
        self.group, self.group_id = group, _id_of[group]

    def __call__(self, x: Tensor) -> Tensor:
        """Sum `x` over all ranks in place and return it."""
        if not torch.compiler.is_compiling():
            return self.group.all_reduce(x)
        torch.ops.yalis.all_reduce_(x, self.group_id)
        return x

    def add_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Sum `x` over all ranks in place. Returns (the norm of the sum + residual, the sum + residual)."""
        if not torch.compiler.is_compiling():
            return self.group.all_reduce_add_norm(x, residual, weight, eps)
        normed, summed = torch.ops.yalis.all_reduce_add_norm_(x, residual, weight, eps, self.group_id)
        return normed, summed


@torch.library.custom_op("yalis::all_reduce_", mutates_args=("x",), schema="(Tensor(a!) x, int group) -> ()")
def _all_reduce(x: Tensor, group: int) -> None:
    _group_of[group].all_reduce(x)


@_all_reduce.register_fake
def _(x: Tensor, group: int) -> None:
    return None


@torch.library.custom_op(
    "yalis::all_reduce_add_norm_",
    mutates_args=("x",),
    schema="(Tensor(a!) x, Tensor residual, Tensor weight, float eps, int group) -> (Tensor, Tensor)",
)
def _all_reduce_add_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, group: int) -> tuple[Tensor, Tensor]:
    normed, summed = _group_of[group].all_reduce_add_norm(x, residual, weight, eps)
    return normed.contiguous(), summed.contiguous()


@_all_reduce_add_norm.register_fake
def _(x: Tensor, residual: Tensor, weight: Tensor, eps: float, group: int) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape)
