"""How a model is split: degrees, shares, and a rank's place in the grid of its tensor-parallel group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from yalis.comm.base import CommBackend, Communicator, SingleRank
from yalis.errors import YalisError
from yalis.spec import ModelSpec


def share(total: int, parts: int, index: int) -> range:
    """The index-th of `parts` contiguous shares of range(total), as even as possible, larger ones first."""
    base, extra = divmod(total, parts)
    start = index * base + min(index, extra)
    return range(start, start + base + (index < extra))


@dataclass(frozen=True)
class Place:
    """Where a rank stands: which replica, which stage of its pipeline, which cell of that stage's grid."""

    replica: int = 0
    stage: int = 0
    row: int = 0
    col: int = 0


@dataclass(frozen=True)
class Split:
    """The degrees. Ranks count columns first, then rows, stages and replicas: a tensor-parallel group is contiguous."""

    rows: int = 1
    cols: int = 1
    stages: int = 1
    replicas: int = 1

    @property
    def per_stage(self) -> int:
        return self.rows * self.cols

    @property
    def per_replica(self) -> int:
        return self.per_stage * self.stages

    @property
    def size(self) -> int:
        """Ranks in all."""
        return self.per_replica * self.replicas

    def place(self, rank: int) -> Place:
        rest, col = divmod(rank, self.cols)
        rest, row = divmod(rest, self.rows)
        replica, stage = divmod(rest, self.stages)
        return Place(replica, stage, row, col)

    def rank(self, place: Place) -> int:
        return ((place.replica * self.stages + place.stage) * self.rows + place.row) * self.cols + place.col

    def driver(self, replica: int) -> int:
        """The rank that plans a replica's steps: the first of its first stage."""
        return self.rank(Place(replica))

    def reporter(self, replica: int) -> int:
        """The rank that knows the sampled tokens first: the first of its last stage."""
        return self.rank(Place(replica, self.stages - 1))

    def __str__(self) -> str:
        grid = f"tp {self.rows}" if self.cols == 1 else f"tp {self.rows}x{self.cols}"
        return f"{grid} x pp {self.stages} x dp {self.replicas}"

    def check(self, spec: ModelSpec, label: str) -> None:
        """Refuse a split that leaves a rank with nothing, before any weight is read."""
        most = min(spec.num_heads, spec.intermediate_size)
        if self.rows > most:
            raise YalisError(
                f"tp {self.rows}x{self.cols} leaves ranks without a share: {label} has {spec.num_heads} heads and an "
                f"MLP width of {spec.intermediate_size}; give 1 to {most} rows"
            )
        if spec.hidden_size % self.cols:
            fitting = [cols for cols in range(1, spec.hidden_size + 1) if spec.hidden_size % cols == 0]
            raise YalisError(
                f"tp {self.rows}x{self.cols} cannot split the hidden size {spec.hidden_size} of {label} evenly over "
                f"{self.cols} columns; columns that divide it: {_listed(fitting)}"
            )
        if self.per_stage > spec.vocab_size:
            raise YalisError(
                f"tp {self.rows}x{self.cols} leaves ranks without a share of the {spec.vocab_size} tokens of {label}; "
                f"give a grid of at most {spec.vocab_size} ranks"
            )
        if self.stages > spec.num_layers:
            raise YalisError(
                f"pp {self.stages} leaves stages without a layer: {label} has {spec.num_layers}; "
                f"give pp 1 to {spec.num_layers}"
            )


def _listed(numbers: Sequence[int], most: int = 12) -> str:
    return ", ".join(map(str, numbers[:most])) + (", ..." if len(numbers) > most else "")


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

    @classmethod
    def open(cls, split: Split, rank: int, comm: CommBackend) -> Grid:
        """The grid of `rank`, its groups made: every rank of the world calls this."""
        place = split.place(rank)
        first = rank - place.row * split.cols - place.col
        name = f"replica{place.replica}.stage{place.stage}"
        everyone = comm.group(name, range(first, first + split.per_stage))
        # With one column the ranks of a column are everyone, with one row those of a row.
        over_rows = over_cols = everyone
        if split.cols > 1:
            column = range(first + place.col, first + split.per_stage, split.cols)
            over_rows = comm.group(f"{name}.column{place.col}", column)
        if split.rows > 1:
            start = first + place.row * split.cols
            over_cols = comm.group(f"{name}.row{place.row}", range(start, start + split.cols))
        return cls(split.rows, split.cols, place.row, place.col, over_rows, over_cols, everyone)

    @property
    def capturable(self) -> bool:
        """Whether a step's collectives may be recorded and replayed."""
        sums = all(group.capturable for group in (self.over_rows, self.over_cols, self.everyone))
        return sums and (self.cols == 1 or self.over_cols.gather_capturable)

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
