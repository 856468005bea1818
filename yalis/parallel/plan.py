"""How a model is split: degrees, shares, and a rank's place in the grid of its tensor-parallel group."""

from __future__ import annotations

from dataclasses import dataclass, field

from yalis.comm.base import Communicator, SingleRank


def share(total: int, parts: int, index: int) -> range:
    """The index-th of `parts` contiguous shares of range(total), as even as possible, larger ones first."""
    base, extra = divmod(total, parts)
    start = index * base + min(index, extra)
    return range(start, start + base + (index < extra))


@dataclass(frozen=True)
class Grid:
    """A rank's place in the r x c grid of a tensor-parallel group, and the groups it speaks to.

    Heads and MLP width are split over the r rows; the hidden size is split over the c columns.
    """

    rows: int = 1
    cols: int = 1
    row: int = 0
    col: int = 0
    over_rows: Communicator = field(default_factory=SingleRank)  # ranks of this column, one per row
    over_cols: Communicator = field(default_factory=SingleRank)  # ranks of this row, one per column
    everyone: Communicator = field(default_factory=SingleRank)  # all r * c ranks

    def hidden(self, size: int) -> range:
        """This rank's part of the hidden size."""
        return share(size, self.cols, self.col)

    def width(self, size: int) -> range:
        """This rank's part of the MLP width."""
        return share(size, self.rows, self.row)

    def vocabulary(self, size: int) -> range:
        """This rank's part of the vocabulary, which is split over all ranks."""
        return share(size, self.rows * self.cols, self.row * self.cols + self.col)

    def heads(self, num_heads: int, num_kv_heads: int) -> tuple[range, range]:
        """This rank's query heads, and every key/value head they read."""
        queries = share(num_heads, self.rows, self.row)
        group = num_heads // num_kv_heads
        return queries, range(queries.start // group, (queries.stop - 1) // group + 1)
