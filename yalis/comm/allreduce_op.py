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
    """In-place all-reduce over one group, for eager and compiled code."""

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


@torch.library.custom_op("yalis::all_reduce_", mutates_args=("x",), schema="(Tensor(a!) x, int group) -> ()")
def _all_reduce(x: Tensor, group: int) -> None:
    _group_of[group].all_reduce(x)


@_all_reduce.register_fake
def _(x: Tensor, group: int) -> None:
    return None
