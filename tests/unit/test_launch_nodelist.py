"""Expanding Slurm's compact lists of nodes and tasks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from yalis.errors import YalisError
from yalis.launch.nodelist import expand_counts, expand_nodes


@pytest.mark.parametrize(
    ("text", "nodes"),
    [
        ("", []),
        ("gpu1", ["gpu1"]),
        ("node[01-03,7],gpu1", ["node01", "node02", "node03", "node7", "gpu1"]),
        ("a[9-11]", ["a9", "a10", "a11"]),
        ("a[098-101]", ["a098", "a099", "a100", "a101"]),
        ("b,a[2],c", ["b", "a2", "c"]),
        ("r[1-2]n[1-2]", ["r1n1", "r1n2", "r2n1", "r2n2"]),
        ("r[1-2]-gpu,x", ["r1-gpu", "r2-gpu", "x"]),
        ("nid[001234-001235].cluster.org", ["nid001234.cluster.org", "nid001235.cluster.org"]),
    ],
)
def test_node_lists(text: str, nodes: list[str]) -> None:
    assert expand_nodes(text) == nodes


@pytest.mark.parametrize(
    "text", ["a[1-", "a]1", "a[[1]]", "a[x]", "a[3-1]", "a,,b", ",a", "a[1-2-3]", "a[]", "a[1-9999999]"]
)
def test_invalid_node_lists(text: str) -> None:
    with pytest.raises(YalisError, match="is not a Slurm node list"):
        expand_nodes(text)


@given(st.integers(0, 500), st.integers(0, 40), st.integers(1, 5))
def test_a_range_expands_to_its_numbers(first: int, more: int, width: int) -> None:
    text = f"n[{first:0{width}d}-{first + more:0{width}d}]"
    assert expand_nodes(text) == [f"n{number:0{width}d}" for number in range(first, first + more + 1)]


@pytest.mark.parametrize(("text", "counts"), [("", []), ("4", [4]), ("4(x2),1", [4, 4, 1]), ("2,3(x1)", [2, 3])])
def test_tasks_per_node(text: str, counts: list[int]) -> None:
    assert expand_counts(text) == counts


def test_an_invalid_list_of_tasks() -> None:
    with pytest.raises(YalisError, match="tasks per node"):
        expand_counts("4x2")
