"""How a model is split over ranks: parallel degrees, shards, and a rank's coordinates and process groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from yalis.comm.base import CommBackend, Communicator, SingleRank
from yalis.errors import YalisError
from yalis.spec import ModelSpec


def shard(total: int, parts: int, index: int) -> range:
    """Return the index-th of `parts` contiguous shards of range(total), as even as possible, larger ones first."""
    base, extra = divmod(total, parts)
    start = index * base + min(index, extra)
    return range(start, start + base + (index < extra))


@dataclass(frozen=True)
class RankCoords:
    """A rank's replica, pipeline stage, and row and column in the tensor-parallel grid of that stage."""

    replica: int = 0
    stage: int = 0
    row: int = 0
    col: int = 0


@dataclass(frozen=True)
class Split:
    """The parallel degrees. The column varies fastest with the rank, then the row, stage and replica.

    So the ranks of a tensor-parallel group are contiguous. With `expert_parallel` a row of the grid has whole experts
    of a mixture of experts, otherwise it has a slice of every expert.
    """

    rows: int = 1
    cols: int = 1
    stages: int = 1
    replicas: int = 1
    expert_parallel: bool = False

    @property
    def per_stage(self) -> int:
        return self.rows * self.cols

    @property
    def per_replica(self) -> int:
        return self.per_stage * self.stages

    @property
    def size(self) -> int:
        """The world size."""
        return self.per_replica * self.replicas

    def coords(self, rank: int) -> RankCoords:
        """Return the coordinates of a rank; `rank()` is the inverse."""
        rest, col = divmod(rank, self.cols)
        rest, row = divmod(rest, self.rows)
        replica, stage = divmod(rest, self.stages)
        return RankCoords(replica, stage, row, col)

    def rank(self, coords: RankCoords) -> int:
        return ((coords.replica * self.stages + coords.stage) * self.rows + coords.row) * self.cols + coords.col

    def driver(self, replica: int) -> int:
        """Return the rank that schedules a replica's steps: the first rank of its first stage."""
        return self.rank(RankCoords(replica))

    def reporter(self, replica: int) -> int:
        """Return the rank that reports a replica's sampled tokens: the first rank of its last stage."""
        return self.rank(RankCoords(replica, self.stages - 1))

    @property
    def grid_name(self) -> str:
        return f"tp {self.rows}" if self.cols == 1 else f"tp {self.rows}x{self.cols}"

    def __str__(self) -> str:
        experts = " (whole experts)" if self.expert_parallel else ""
        return f"{self.grid_name}{experts} x pp {self.stages} x dp {self.replicas}"

    def check(self, spec: ModelSpec, label: str) -> None:
        """Raise an error if a rank would get an empty shard. Called before any weight is read."""
        if self.expert_parallel:
            self._check_experts(spec, label)
        widths = spec.mlp_widths(split_experts=not self.expert_parallel)
        max_rows = min((spec.num_heads, *widths))
        if self.rows > max_rows:
            width = f" and an MLP width of {min(widths)}" if widths else ""
            raise YalisError(
                f"{self.grid_name} leaves ranks without a shard: {label} has {spec.num_heads} heads{width}; give "
                f"{self._spell_rows(max_rows)}"
            )
        if spec.hidden_size % self.cols:
            divisors = [cols for cols in range(1, spec.hidden_size + 1) if spec.hidden_size % cols == 0]
            raise YalisError(
                f"tp {self.rows}x{self.cols} cannot split the hidden size {spec.hidden_size} of {label} evenly over "
                f"{self.cols} columns; columns that divide it: {_listed(divisors)}"
            )
        if self.per_stage > spec.vocab_size:
            raise YalisError(
                f"tp {self.rows}x{self.cols} leaves ranks without a shard of the {spec.vocab_size} tokens of {label}; "
                f"give a grid of at most {spec.vocab_size} ranks"
            )
        if self.stages > spec.num_layers:
            raise YalisError(
                f"pp {self.stages} leaves stages without a layer: {label} has {spec.num_layers}; "
                f"give pp 1 to {spec.num_layers}"
            )

    def _check_experts(self, spec: ModelSpec, label: str) -> None:
        if spec.moe is None:
            raise YalisError(
                f"expert_parallel=True needs a mixture of experts, and {label} is a dense model; leave it out"
            )
        if self.rows == 1 and self.cols > 1:
            raise YalisError(
                f"expert_parallel=True places whole experts on the rows of a grid, and {self.grid_name} has one row; "
                f"give tp={self.cols}, or leave out expert_parallel=True"
            )
        experts = spec.moe.num_experts
        if self.rows > experts:
            raise YalisError(
                f"{self.grid_name} leaves ranks without an expert: {label} has {experts} experts; give "
                f"{self._spell_rows(experts)}, or expert_parallel=False for a slice of every expert on each rank"
            )

    def _spell_rows(self, count: int) -> str:
        return f"tp 1 to {count}" if self.cols == 1 else f"a grid of 1 to {count} rows"


def _listed(numbers: Sequence[int], limit: int = 12) -> str:
    return ", ".join(map(str, numbers[:limit])) + (", ..." if len(numbers) > limit else "")


@dataclass(frozen=True)
class Grid:
    """A rank's coordinates in the r x c grid of its tensor-parallel group, and its process groups.

    Heads and MLP width are split over the r rows, the hidden size over the c columns, the vocabulary over all r * c
    ranks. A group is named after the coordinate that varies in it, so `row_group.rank == row`.
    """

    rows: int = 1
    cols: int = 1
    row: int = 0
    col: int = 0
    row_group: Communicator = field(default_factory=SingleRank)  # one rank per row, all in this column
    col_group: Communicator = field(default_factory=SingleRank)  # one rank per column, all in this row
    tp_group: Communicator = field(default_factory=SingleRank)  # all r * c ranks
    expert_parallel: bool = False  # whole experts on each row instead of slices of every expert

    @classmethod
    def open(cls, split: Split, rank: int, comm: CommBackend) -> Grid:
        """Create the process groups of `rank` and return its grid. Collective: every rank of the world calls this."""
        coords = split.coords(rank)
        first = rank - coords.row * split.cols - coords.col
        name = f"replica{coords.replica}.stage{coords.stage}"
        tp_group = comm.group(name, range(first, first + split.per_stage))
        # With one column row_group is the whole group, with one row col_group is.
        row_group = col_group = tp_group
        if split.cols > 1:
            column = range(first + coords.col, first + split.per_stage, split.cols)
            row_group = comm.group(f"{name}.column{coords.col}", column)
        if split.rows > 1:
            start = first + coords.row * split.cols
            col_group = comm.group(f"{name}.row{coords.row}", range(start, start + split.cols))
        groups = (row_group, col_group, tp_group)
        return cls(split.rows, split.cols, coords.row, coords.col, *groups, split.expert_parallel)

    @classmethod
    def at(cls, split: Split, coords: RankCoords) -> Grid:
        """Return the grid at these coordinates without process groups, to compute shards."""
        return cls(split.rows, split.cols, coords.row, coords.col, expert_parallel=split.expert_parallel)

    @property
    def capturable(self) -> bool:
        """Whether the collectives of a step can be captured in a CUDA graph."""
        all_reduces = all(group.capturable for group in (self.row_group, self.col_group, self.tp_group))
        return all_reduces and (self.cols == 1 or self.col_group.gather_capturable)

    def hidden(self, size: int) -> range:
        """Return this rank's shard of the hidden size."""
        return shard(size, self.cols, self.col)

    def width(self, size: int) -> range:
        """Return this rank's shard of the MLP width (intermediate size)."""
        return shard(size, self.rows, self.row)

    def experts(self, count: int) -> range:
        """Return the experts of which this rank has a part: all, or with expert parallelism the shard of its row."""
        return shard(count, self.rows, self.row) if self.expert_parallel else range(count)

    def expert_width(self, size: int) -> range:
        """Return this rank's shard of the width of an expert that it has."""
        return range(size) if self.expert_parallel else self.width(size)

    def router_columns(self, hidden: int) -> range:
        """Return this rank's columns of a router: all if the grid has one column, else a shard over all ranks."""
        held = self.hidden(hidden)
        if self.cols == 1:
            return held
        part = shard(len(held), self.rows, self.row)
        return held[part.start : part.stop]

    def vocabulary(self, size: int) -> range:
        """Return this rank's shard of the vocabulary, which is split over all ranks of the grid."""
        return shard(size, self.rows * self.cols, self.row * self.cols + self.col)

    def heads(self, num_heads: int, num_kv_heads: int) -> tuple[range, range]:
        """Return this rank's query heads and the key/value heads they read. Ranks may share a key/value head."""
        queries = shard(num_heads, self.rows, self.row)
        group = num_heads // num_kv_heads
        return queries, range(queries.start // group, (queries.stop - 1) // group + 1)
