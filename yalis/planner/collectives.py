"""The collectives of a step: which groups of ranks reduce, gather or send how many bytes, and where the groups lie.

The counts are those of models/decoder.py, parallel/ and sampling/vocab_shards.py; tests compare them with the
all-reduces that `yalis bench slice` has counted in the engine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from yalis.parallel.plan import Grid, Split, shard
from yalis.perfmodel.collectives import Shape
from yalis.spec import ModelSpec

_FLOAT32 = 4
#: A sampled row sends its best value and token id to the other shards of the vocabulary, both as float64.
_SAMPLED_BYTES = 16


@dataclass(frozen=True)
class Collective:
    """`count` equal operations. `shapes` are the placements of the groups that run it at the same time."""

    operation: Literal["all_reduce", "all_gather"]
    shapes: tuple[Shape, ...]
    bytes: float  # of the whole message of an all-reduce; of one rank's part of an all-gather
    count: int


@dataclass(frozen=True)
class StageGroups:
    """The placements of the process groups of one pipeline stage. Equal placements are listed once."""

    tp: tuple[Shape, ...]
    rows: tuple[Shape, ...]  # one rank per row of the grid, all in the same column
    cols: tuple[Shape, ...]  # one rank per column, all in the same row

    @classmethod
    def of(cls, split: Split, gpus_per_node: int, stage: int, place_of_first: int = 0) -> StageGroups:
        """Place the ranks of a stage: rank r is on node r // gpus_per_node. `place_of_first`: of the replica's first
        rank on its node."""
        first = place_of_first + stage * split.per_stage
        ranks = range(first, first + split.per_stage)
        rows = (ranks[col :: split.cols] for col in range(split.cols))
        cols = (ranks[row * split.cols : (row + 1) * split.cols] for row in range(split.rows))
        return cls(
            (place(ranks, gpus_per_node),),
            _distinct(place(group, gpus_per_node) for group in rows),
            _distinct(place(group, gpus_per_node) for group in cols),
        )


def place(ranks: Iterable[int], gpus_per_node: int) -> Shape:
    """Return the nodes of a group and its ranks on the fullest of them."""
    counts = Counter(rank // gpus_per_node for rank in ranks)
    return Shape(len(counts), max(counts.values()))


def same_node(split: Split, gpus_per_node: int, stage: int, place_of_first: int = 0) -> bool:
    """Return whether every rank of a stage is on the node of the rank that it sends hidden states to."""
    first = place_of_first + stage * split.per_stage
    ranks = range(first, first + split.per_stage)
    return all(rank // gpus_per_node == (rank + split.per_stage) // gpus_per_node for rank in ranks)


def collectives(
    spec: ModelSpec, split: Split, groups: StageGroups, stage: int, itemsize: int, tokens: int, sampled: int
) -> Iterator[Collective]:
    """Yield the collectives of a stage in a step of `tokens` tokens, of which `sampled` get logits."""
    first, last = stage == 0, stage == split.stages - 1
    hidden = spec.hidden_size // split.cols
    part = shard(spec.num_layers, split.stages, stage)
    layers = len(part)
    # After the attention of the last layer only the sampled rows continue.
    full = layers - 1 if last and sampled < tokens else layers
    if first and split.per_stage > 1:
        yield Collective("all_reduce", groups.tp, tokens * spec.hidden_size * itemsize, 1)
    if split.rows > 1 and spec.joint_qk_norm:  # mean squares of queries and keys
        yield Collective("all_reduce", groups.rows, tokens * 2 * _FLOAT32, layers)
    if split.rows > 1:
        yield from _reduced(groups.rows, hidden * itemsize, 2, layers, full, tokens, sampled)
    if split.cols > 1:
        heads, kv_heads = Grid(split.rows, split.cols).heads(spec.num_heads, spec.num_kv_heads)
        qkv = (len(heads) + 2 * len(kv_heads)) * spec.head_dim
        yield Collective("all_reduce", groups.cols, tokens * qkv * itemsize, layers)
        with_experts = [spec.mlp_of(layer) == "moe" for layer in part]
        for kind in (False, True):
            count, whole = with_experts.count(kind), with_experts[:full].count(kind)
            for shapes, row_bytes in _mlp_sums(spec, split, groups, kind, itemsize) if count else ():
                yield from _reduced(shapes, row_bytes, 1, count, whole, tokens, sampled)
        yield from _norms(spec, groups, layers, full, tokens, sampled, last)
    if last and sampled:
        if split.cols > 1:
            yield Collective("all_gather", groups.cols, sampled * hidden * itemsize, 1)
        if split.per_stage > 1:
            yield Collective("all_gather", groups.tp, sampled * _SAMPLED_BYTES, 1)


def _mlp_sums(
    spec: ModelSpec, split: Split, groups: StageGroups, experts: bool, itemsize: int
) -> Iterator[tuple[tuple[Shape, ...], int]]:
    """Yield the groups and the bytes of a row of the all-reduces inside an MLP on a grid with columns: of gate and up,
    and with experts those of each chosen one, of the router, and of the shared expert."""

    def width(size: int, matrices: int = 2) -> int:
        return matrices * len(shard(size, split.rows, 0)) * itemsize

    if not experts or spec.moe is None:
        yield groups.cols, width(spec.intermediate_size, spec.dense_matrices - 1)
        return
    yield groups.tp, spec.moe.router_rows * (_FLOAT32 if spec.moe.router_fp32 else itemsize)
    # With whole experts the sum contains the pairs of all rows of the grid.
    yield (
        groups.cols,
        spec.moe.top_k * (2 * spec.moe.width * itemsize if split.expert_parallel else width(spec.moe.width)),
    )
    if spec.moe.shared_width:
        yield groups.cols, width(spec.moe.shared_width)


def _norms(
    spec: ModelSpec, groups: StageGroups, layers: int, full: int, tokens: int, sampled: int, last: bool
) -> Iterator[Collective]:
    """Yield the mean squares of split RMSNorms, one float32 a row, or mean and variance of layer norms: those of the
    layers that the model has, and of the last norm."""
    each = 2 if spec.norm == "layer" else 1
    before_attention = spec.block_norms.attention is not None
    if before_attention:
        yield Collective("all_reduce", groups.cols, tokens * _FLOAT32, each * layers)
    after_attention = spec.block_norms.count - before_attention
    if after_attention:
        yield from _reduced(groups.cols, _FLOAT32, each * after_attention, layers, full, tokens, sampled)
    if last and sampled:
        yield Collective("all_reduce", groups.cols, sampled * _FLOAT32, each)


def _reduced(
    shapes: tuple[Shape, ...], row_bytes: int, per_layer: int, layers: int, full: int, tokens: int, sampled: int
) -> Iterator[Collective]:
    """Yield all-reduces of all rows in the `full` layers, and of the sampled rows in the others."""
    if full:
        yield Collective("all_reduce", shapes, tokens * row_bytes, per_layer * full)
    if layers > full and sampled:
        yield Collective("all_reduce", shapes, sampled * row_bytes, per_layer * (layers - full))


def _distinct(shapes: Iterable[Shape]) -> tuple[Shape, ...]:
    return tuple(dict.fromkeys(shapes))
