"""What of a split step a CUDA graph may hold."""

from __future__ import annotations

from dataclasses import replace

import pytest
from torch import Tensor

from tests.ranks import Board, Memory
from yalis.comm.base import SingleRank
from yalis.comm.custom_allreduce import CustomAllReduceGroup
from yalis.parallel.plan import Grid


def group(capturable: bool) -> Memory:
    made = Memory(Board(2, 1.0), 0)
    made.capturable = capturable
    return made


class Sums(CustomAllReduceGroup):
    """As nvrar: sums that a graph may hold, over a group of which it may hold nothing else."""

    def __init__(self, under: Memory) -> None:
        super().__init__(under)  # type: ignore[arg-type]
        self.capturable = True

    def all_reduce(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        return self.torch_group.all_reduce(x, out)


@pytest.mark.parametrize("under", [True, False])
def test_rows_sum_and_columns_gather_too(under: bool) -> None:
    sums, alone = Sums(group(under)), SingleRank()
    rows = Grid(2, 1, 0, 0, sums, alone, sums)
    columns = Grid(1, 2, 0, 0, alone, sums, sums)
    assert rows.capturable
    assert columns.capturable == under


def test_every_group_counts() -> None:
    whole = Grid(2, 2, 0, 0, *(group(True) for _ in range(3)))
    assert whole.capturable
    for name in ("row_group", "col_group", "tp_group"):
        assert not replace(whole, **{name: group(False)}).capturable
