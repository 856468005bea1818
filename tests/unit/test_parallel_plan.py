"""Splits: rank coordinates, shards, and errors for impossible splits."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from yalis.errors import YalisError
from yalis.parallel.plan import Grid, RankCoords, Split, shard
from yalis.spec import ModelSpec, read_spec

degrees = st.integers(1, 6)
splits = st.builds(Split, degrees, degrees, degrees, st.integers(1, 3))


@given(splits)
def test_every_rank_has_unique_coordinates(split: Split) -> None:
    all_coords = [split.coords(rank) for rank in range(split.size)]
    expected = [
        RankCoords(replica, stage, row, col)
        for replica in range(split.replicas)
        for stage in range(split.stages)
        for row in range(split.rows)
        for col in range(split.cols)
    ]
    assert all_coords == expected  # the column varies fastest, then row, stage and replica
    assert [split.rank(coords) for coords in all_coords] == list(range(split.size))


@given(splits)
def test_drivers_and_reporters(split: Split) -> None:
    assert split.driver(0) == 0
    for replica in range(split.replicas):
        driver, reporter = split.coords(split.driver(replica)), split.coords(split.reporter(replica))
        assert driver == RankCoords(replica, 0, 0, 0)
        assert reporter == RankCoords(replica, split.stages - 1, 0, 0)


@given(st.integers(0, 500), st.integers(1, 40))
def test_shards_cover_the_range_evenly(total: int, parts: int) -> None:
    shards = [shard(total, parts, index) for index in range(parts)]
    assert [item for part in shards for item in part] == list(range(total))
    sizes = [len(part) for part in shards]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1


@given(degrees, degrees, st.integers(1, 8), st.integers(1, 8), st.integers(1, 200))
def test_a_grid_covers_everything(rows: int, cols: int, kv_heads: int, group: int, vocab: int) -> None:
    heads = kv_heads * group
    grids = [Grid(rows, cols, row, col) for row in range(rows) for col in range(cols)]
    assert [token for grid in grids for token in grid.vocabulary(vocab)] == list(range(vocab))
    assert [i for grid in grids if grid.row == 0 for i in grid.hidden(12 * cols)] == list(range(12 * cols))
    assert [i for grid in grids if grid.col == 0 for i in grid.width(vocab)] == list(range(vocab))
    if rows > heads:
        return
    assert [head for grid in grids if grid.col == 0 for head in grid.heads(heads, kv_heads)[0]] == list(range(heads))
    for grid in grids:
        queries, read = grid.heads(heads, kv_heads)
        assert list(read) == sorted({head // group for head in queries})


@st.composite
def models(draw: st.DrawFn) -> ModelSpec:
    kv_heads = draw(st.integers(1, 3))
    return read_spec(
        {
            "model_type": "llama",
            "hidden_size": draw(st.integers(1, 40)),
            "head_dim": 2,
            "num_attention_heads": kv_heads * draw(st.integers(1, 3)),
            "num_key_value_heads": kv_heads,
            "intermediate_size": draw(st.integers(1, 12)),
            "num_hidden_layers": draw(st.integers(1, 6)),
            "vocab_size": draw(st.integers(1, 40)),
        }
    )


def error_of(split: Split, spec: ModelSpec) -> str | None:
    try:
        split.check(spec, "it")
    except YalisError as error:
        return str(error)
    return None


def is_possible(split: Split, spec: ModelSpec) -> bool:
    """Whether no shard is empty and all columns are equal."""
    sharded = [
        (spec.num_heads, split.rows),
        (spec.intermediate_size, split.rows),
        (spec.vocab_size, split.per_stage),
        (spec.num_layers, split.stages),
    ]
    widths = {len(shard(spec.hidden_size, split.cols, col)) for col in range(split.cols)}
    return len(widths) == 1 and 0 not in widths and all(shard(size, parts, parts - 1) for size, parts in sharded)


@given(models(), st.builds(Split, st.integers(1, 12), st.integers(1, 8), st.integers(1, 8), st.integers(1, 3)))
def test_exactly_the_impossible_splits_are_rejected(spec: ModelSpec, split: Split) -> None:
    assert (error_of(split, spec) is None) == is_possible(split, spec)


@given(models(), st.builds(Split, st.integers(1, 12), st.integers(1, 8), st.integers(1, 8)), st.data())
def test_the_error_lists_splits_that_work(spec: ModelSpec, split: Split, data: st.DataObject) -> None:
    """Following any of the suggestions of one error after the other leads to a possible split."""
    for _ in range(4):
        message = error_of(split, spec)
        if message is None:
            break
        rows, cols, stages = split.rows, split.cols, split.stages
        if found := re.search(r"give (?:tp|a grid of) 1 to (\d+)(?: rows)?$", message):
            most = int(found[1])
            assert most < rows
            rows = data.draw(st.integers(1, most))
            # A larger value would not be possible.
            assert f"tp {most + 1} leaves" in (error_of(Split(most + 1), spec) or "")
        elif found := re.search(r"columns that divide it: ([\d, ]+?)(, \.\.\.)?$", message):
            listed = [int(one) for one in found[1].split(", ")]
            fitting = [one for one in range(1, spec.hidden_size + 1) if spec.hidden_size % one == 0]
            assert listed == fitting[: len(listed)]
            assert found[2] or listed == fitting
            cols = data.draw(st.sampled_from(listed))
        elif found := re.search(r"give a grid of at most (\d+) ranks$", message):
            most = int(found[1])
            assert split.per_stage > most
            fits = [(r, c) for r in range(1, rows + 1) for c in range(1, cols + 1) if r * c <= most]
            rows, cols = data.draw(st.sampled_from([(r, c) for r, c in fits if spec.hidden_size % c == 0]))
        else:
            found = re.search(r"give pp 1 to (\d+)$", message)
            assert found is not None, message
            stages = data.draw(st.integers(1, int(found[1])))
            assert "pp" in (error_of(Split(stages=int(found[1]) + 1), spec) or "")
        split = Split(rows, cols, stages)
    assert error_of(split, spec) is None


@pytest.mark.parametrize(
    ("split", "name"),
    [(Split(), "tp 1 x pp 1 x dp 1"), (Split(4), "tp 4 x pp 1 x dp 1"), (Split(2, 2, 3, 2), "tp 2x2 x pp 3 x dp 2")],
)
def test_str_of_a_split(split: Split, name: str) -> None:
    assert str(split) == name
