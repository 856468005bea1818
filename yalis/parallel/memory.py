"""Computes the memory of each rank: every part of the weights and KV cache, its bytes, and how often it is replicated.

A rank has 1 / (tp * pp) of the weights and 1 / (rows * pp) of the KV cache, plus its replicated parts. `copies` counts
the ranks of a replica that hold the same bytes, so bytes / copies summed over those ranks is the size of the model.
Uneven shards move bytes between ranks and add none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from yalis.parallel.plan import Grid, RankCoords, Split, shard
from yalis.spec import ModelSpec

_FLOAT32 = 4


@dataclass(frozen=True)
class Part:
    name: str
    bytes: int  # on this rank
    held: str  # how it is split and replicated, for people
    copies: int = 1  # ranks of a replica that hold the same bytes

    @property
    def repeated(self) -> float:
        """This rank's share of the bytes spent on replication."""
        return self.bytes * (self.copies - 1) / self.copies


@dataclass(frozen=True)
class RankMemory:
    """The weights and KV cache of one rank, without activations."""

    coords: RankCoords
    layers: range
    heads: range
    kv_heads: range
    width: range  # shard of the MLP width, of an expert if the model has experts
    experts: range  # those of which this rank has a part; empty in a dense model
    vocabulary: range
    block_size: int
    weights: tuple[Part, ...]
    rotary: Part
    kv_block: tuple[Part, ...]  # one KV block, over all layers of this rank

    @property
    def weight_bytes(self) -> int:
        return sum(part.bytes for part in self.weights)

    @property
    def kv_block_bytes(self) -> int:
        return sum(part.bytes for part in self.kv_block)

    @property
    def kv_token_bytes(self) -> int:
        return self.kv_block_bytes // self.block_size

    def parts(self) -> tuple[Part, ...]:
        return (*self.weights, self.rotary, *self.kv_block)


def rank_memory(
    spec: ModelSpec, split: Split, rank: int, itemsize: int, block_size: int, max_len: int | None = None
) -> RankMemory:
    """Return the memory of `rank` for a dtype of `itemsize` bytes and a RoPE table of `max_len` positions."""
    coords = split.coords(rank)
    grid = Grid.at(split, coords)
    heads, kv_heads = grid.heads(spec.num_heads, spec.num_kv_heads)
    layers = shard(spec.num_layers, split.stages, coords.stage)
    parts = _RankParts(spec, split, coords, grid, itemsize, layers)
    tables = 2 if spec.rope.switch_at else 1
    rows = tables * (max_len or spec.max_position)
    # A row of a RoPE table has a cosine and a sine for each rotated dimension, and in some models a scale of queries.
    width = sum(2 * rope.dim + (rope.query_beta != 0) for rope in spec.ropes)
    rotary = Part(
        "rotary table", rows * width * itemsize, _repeated("whole", split.per_replica, "ranks"),
        split.per_replica,
    )  # fmt: skip
    return RankMemory(
        coords, layers, heads, kv_heads,
        width=grid.width(spec.intermediate_size) if spec.moe is None else grid.expert_width(spec.moe.width),
        experts=range(0) if spec.moe is None else grid.experts(spec.moe.num_experts),
        vocabulary=grid.vocabulary(spec.vocab_size),
        block_size=block_size,
        weights=tuple(part for part in parts.weights() if part.bytes),
        rotary=rotary,
        kv_block=tuple(parts.kv_block(block_size)),
    )  # fmt: skip


def whole_memory(spec: ModelSpec, itemsize: int, block_size: int, max_len: int | None = None) -> RankMemory:
    """Return the memory of the model on a single rank; dividing it by the degrees gives the even shards."""
    return rank_memory(spec, Split(), 0, itemsize, block_size, max_len)


class _RankParts:
    """Computes the parts of one rank, for the layers of its stage."""

    def __init__(
        self, spec: ModelSpec, split: Split, coords: RankCoords, grid: Grid, itemsize: int, layers: range
    ) -> None:
        self.spec, self.split, self.coords, self.grid = spec, split, coords, grid
        self.itemsize, self.layers = itemsize, len(layers)
        self.dense_layers = sum(spec.mlp_of(layer) != "moe" for layer in layers)
        self.hidden = len(grid.hidden(spec.hidden_size))
        self.width = len(grid.width(spec.intermediate_size))
        heads, kv_heads = grid.heads(spec.num_heads, spec.num_kv_heads)
        self.queries = len(heads) * spec.head_dim
        # (number of rows that hold the head, number of such heads) of this rank's key/value heads.
        holders = Counter(head for row in range(split.rows) for head in _kv_heads(spec, split, row))
        self.kv_heads = sorted(Counter(holders[head] for head in kv_heads).items())

    def weights(self) -> Iterator[Part]:
        yield from self._tables()
        over_grid = _split(self.split, "rows", "columns")
        yield self._layered("query and output matrices", 2 * self.queries * self.hidden, over_grid)
        for rows, count in self.kv_heads:
            elements = 2 * count * self.spec.head_dim * self.hidden
            yield self._layered(_shared("key/value matrices", rows), elements, _read_by(over_grid, rows), rows)
        dense = self.spec.dense_matrices * self.width * self.hidden
        yield Part("MLP matrices", self.dense_layers * dense * self.itemsize, over_grid)
        yield from self._experts(over_grid)
        yield from self._biases()
        yield from self._norms()

    def _experts(self, over_grid: str) -> Iterator[Part]:
        """Yield the matrices of a mixture of experts. The shared expert and the router are not among the experts that
        expert parallelism keeps whole."""
        moe, split = self.spec.moe, self.split
        if moe is None:
            return
        matrix = 3 * self.hidden * self.itemsize * (self.layers - self.dense_layers)
        elements = len(self.grid.experts(moe.num_experts)) * len(self.grid.expert_width(moe.width))
        whole = "whole experts, " if split.expert_parallel else ""
        yield Part("expert matrices", elements * matrix, whole + over_grid)
        yield Part("matrices of the shared expert", len(self.grid.width(moe.shared_width)) * matrix, over_grid)
        copies = split.rows if split.cols == 1 else 1  # with columns, all ranks of the grid split the router
        held = _repeated("whole", copies, "rows") if split.cols == 1 else over_grid
        columns = len(self.grid.router_columns(self.spec.hidden_size))
        count = self.layers - self.dense_layers
        size = moe.router_rows * columns * (_FLOAT32 if moe.router_fp32 else self.itemsize)
        if moe.router_bias and (split.cols == 1 or self.coords.row == self.coords.col == 0):
            size += moe.num_experts * self.itemsize  # added once per sum of partial logits
        yield Part("routers", count * size, held, copies)
        if moe.correction_bias:
            held = _repeated("whole", split.per_stage, "ranks of a stage")
            yield Part("routing corrections", count * moe.num_experts * _FLOAT32, held, split.per_stage)
        if moe.expert_bias:
            biases = count * len(self.grid.experts(moe.num_experts)) * self.itemsize
            if self.coords.col == 0:
                held = whole + _split(split, "rows") + _only(split.cols, "column")
                yield Part("gate and up biases of experts", 2 * len(self.grid.expert_width(moe.width)) * biases, held)
            if self.coords.row == 0 or split.expert_parallel:
                held = whole + over_grid if whole else _split(split, "columns") + _only(split.rows, "row")
                yield Part("down biases of experts", self.hidden * biases, held)

    def kv_block(self, block_size: int) -> Iterator[Part]:
        """Yield the parts of a KV block. All columns of a grid row compute the same attention, each with a KV cache."""
        cols = self.split.cols
        for rows, count in self.kv_heads:
            elements = 2 * count * self.spec.head_dim * block_size
            held = _repeated(_read_by(_split(self.split, "rows"), rows), cols, "columns")
            yield self._layered(_shared("KV cache", rows), elements, held, rows * cols)

    def _tables(self) -> Iterator[Part]:
        """Yield the embedding (first stage) and lm_head (last stage). If tied, a single stage holds one matrix."""
        first, last = self.coords.stage == 0, self.coords.stage == self.split.stages - 1
        size = len(self.grid.vocabulary(self.spec.vocab_size)) * self.spec.hidden_size * self.itemsize
        held = "vocabulary " + _split(self.split, "rows", "columns")
        apart = self.spec.tie_embeddings and self.split.stages > 1
        copies = 2 if apart else 1
        if first:
            yield Part("embedding", size, held + (", also on the last stage (tied)" if apart else ""), copies)
        if last and not (first and self.spec.tie_embeddings):
            yield Part("lm_head", size, held + (", also on the first stage (tied)" if apart else ""), copies)

    def _biases(self) -> Iterator[Part]:
        """Yield the biases. Only the first rank of a reduction has one: column 0 (qkv, gate, up) or row 0 (others)."""
        spec = self.spec
        if self.coords.col == 0:
            held = _split(self.split, "rows") + _only(self.split.cols, "column")
            if spec.qkv_bias:
                yield self._layered("query biases", self.queries, held)
                for rows, count in self.kv_heads:
                    elements = 2 * count * spec.head_dim
                    yield self._layered(_shared("key/value biases", rows), elements, _read_by(held, rows), rows)
            if spec.mlp_bias:
                count = spec.dense_matrices - 1
                yield self._layered("gate and up biases" if count > 1 else "up biases", count * self.width, held)
        if self.coords.row == 0:
            held = _split(self.split, "columns") + _only(self.split.rows, "row")
            if spec.out_bias:
                yield self._layered("output biases", self.hidden, held)
            if spec.mlp_bias:
                yield self._layered("down biases", self.hidden, held)

    def _norms(self) -> Iterator[Part]:
        spec, split = self.spec, self.split
        count = self.layers * spec.block_norms.count + (self.coords.stage == split.stages - 1)
        # Gemma's 1 + weight is stored in fp32.
        itemsize = _FLOAT32 if spec.norm_offset else self.itemsize
        size = count * self.hidden * (1 + spec.norm_bias) * itemsize
        yield Part("norms", size, _repeated(_split(split, "columns"), split.rows, "rows"), split.rows)
        if spec.qk_norm:
            held = _repeated("whole", split.per_stage, "ranks of a stage")
            yield Part("head norms", self.layers * 2 * spec.head_dim * itemsize, held, split.per_stage)
        if spec.attention_sinks:
            sinks = self.queries // spec.head_dim
            held = _repeated(_split(split, "rows"), split.cols, "columns")
            yield self._layered("attention sinks", sinks, held, split.cols)
        if spec.joint_qk_norm:
            held = _split(split, "rows")
            yield self._layered("query norms", self.queries, _repeated(held, split.cols, "columns"), split.cols)
            for rows, heads in self.kv_heads:
                shared = _repeated(_read_by(held, rows), split.cols, "columns")
                yield self._layered(_shared("key norms", rows), heads * spec.head_dim, shared, rows * split.cols)

    def _layered(self, name: str, elements: int, held: str, copies: int = 1) -> Part:
        return Part(name, self.layers * elements * self.itemsize, held, copies)


def _kv_heads(spec: ModelSpec, split: Split, row: int) -> range:
    return Grid(split.rows, split.cols, row).heads(spec.num_heads, spec.num_kv_heads)[1]


def _split(split: Split, *axes: str) -> str:
    degrees = {"rows": split.rows, "columns": split.cols}
    over = [f"{degrees[axis]} {axis}" for axis in axes if degrees[axis] > 1]
    return "split over " + " x ".join(over) if over else "whole"


def _repeated(held: str, copies: int, over: str) -> str:
    return f"{held}, repeated over {copies} {over}" if copies > 1 else held


def _shared(name: str, rows: int) -> str:
    return f"shared {name}" if rows > 1 else name


def _read_by(held: str, rows: int) -> str:
    return f"{held}, heads read by {rows} rows" if rows > 1 else held


def _only(count: int, line: str) -> str:
    return f", on the first {line} only" if count > 1 else ""


def spell_bytes(count: int) -> str:
    """Format a number of bytes with a binary unit."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"
