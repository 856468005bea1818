"""Sums over ranks, within code that torch.compile may have: it knows tensors and numbers, so groups get numbers."""

from __future__ import annotations

from itertools import count
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import Tensor

from yalis.comm.base import Communicator

_numbers = count()
_number_of: WeakKeyDictionary[Communicator, int] = WeakKeyDictionary()
_group_of: WeakValueDictionary[int, Communicator] = WeakValueDictionary()


class AllReduceOp:
    """The all-reduce of one group."""

    def __init__(self, group: Communicator) -> None:
        if group not in _number_of:
            number = next(_numbers)
            _number_of[group], _group_of[number] = number, group
        self.group, self.number = group, _number_of[group]

    def __call__(self, x: Tensor) -> Tensor:
        """The sum of every rank's x, in x."""
        if not torch.compiler.is_compiling():
            return self.group.all_reduce(x)
        torch.ops.yalis.all_reduce_(x, self.number)
        return x


@torch.library.custom_op("yalis::all_reduce_", mutates_args=("x",), schema="(Tensor(a!) x, int group) -> ()")
def _all_reduce(x: Tensor, group: int) -> None:
    _group_of[group].all_reduce(x)


@_all_reduce.register_fake
def _(x: Tensor, group: int) -> None:
    return None
