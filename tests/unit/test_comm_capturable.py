"""Whether a CUDA graph can capture a step, from the groups of the grid."""

from __future__ import annotations

from dataclasses import replace

import pytest
from torch import Tensor

from tests.ranks import Board, Memory
from yalis.comm.base import SingleRank
from yalis.comm.custom_allreduce import CustomAllReduceGroup
from yalis.parallel.plan import Grid


def group(capturable: bool) -> Memory:
    memory = Memory(Board(2, 1.0), 0)
    memory.capturable = capturable
    return memory


class CapturableAllReduce(CustomAllReduceGroup):
    """Like nvrar: only the all-reduce is capturable, whatever the underlying group is."""

    def __init__(self, torch_group: Memory) -> None:
        super().__init__(torch_group)  # type: ignore[arg-type]
        self.capturable = True

    def all_reduce(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        return self.torch_group.all_reduce(x, out)


@pytest.mark.parametrize("gathers", [True, False])
def test_column_groups_need_capturable_gathers(gathers: bool) -> None:
    sums, alone = CapturableAllReduce(group(gathers)), SingleRank()
    rows = Grid(2, 1, 0, 0, sums, alone, sums)
    columns = Grid(1, 2, 0, 0, alone, sums, sums)
    assert rows.capturable
    assert columns.capturable == gathers


def test_every_group_must_be_capturable() -> None:
    whole = Grid(2, 2, 0, 0, *(group(True) for _ in range(3)))
    assert whole.capturable
    for name in ("row_group", "col_group", "tp_group"):
        assert not replace(whole, **{name: group(False)}).capturable
