"""NVRAR's protocol on a network that delays and reorders every word.

No schedule may read stale data, overwrite unread data, deadlock or give a wrong sum. Removing any condition of the
design must make some schedule fail.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from tests.nvrar_model import (
    Design,
    Machine,
    Nodes,
    Operation,
    Protocol,
    ProtocolError,
    explore,
    find_race,
    random_walk,
    world,
)

#: (ranks of each node, operations, number of states). A different count means that the model has changed.
EXHAUSTIVE = [
    ((1, 1), 4, 45),
    ((2,), 4, 93),
    ((1, 1, 1), 4, 103),
    ((2, 1), 4, 103),
    ((3,), 4, 8071),
    ((1, 1, 1, 1), 4, 3609),
    ((2, 2), 4, 6585),
    ((1, 1, 1, 1, 1), 4, 5719),
    ((2, 1, 1), 4, 321),
    ((2, 2, 1), 4, 647),
    ((3, 2), 3, 27795),
]

#: Two words per message, two blocks per rank, both protocols: (design, protocol, ranks of each node, operations).
VARIANTS = [
    (Design(words=2), "ll", (1, 1, 1), 4),
    (Design(words=2), "ll", (3, 1), 3),
    (Design(words=2), "ll", (2, 2), 1),
    (Design(words=2), "signal", (1, 1, 1), 4),
    (Design(words=2), "signal", (3, 1), 3),
    (Design(blocks=2), "ll", (1, 1, 1), 4),
    (Design(blocks=2), "signal", (1, 1, 1), 3),
]

RANDOM = [(1, 1, 1, 1, 1), (2, 2, 2), (2, 2), (1, 1, 1, 1), (2, 1), (3, 2), (4,), (3, 3, 1)]


@pytest.mark.parametrize(("sizes", "operations", "states"), EXHAUSTIVE)
def test_no_schedule_fails(sizes: tuple[int, ...], operations: int, states: int) -> None:
    assert explore(Machine(Design(), [Operation(world(*sizes))] * operations)) == states


@pytest.mark.parametrize(("design", "protocol", "sizes", "operations"), VARIANTS)
def test_no_schedule_of_a_variant_fails(
    design: Design, protocol: Protocol, sizes: tuple[int, ...], operations: int
) -> None:
    states = explore(Machine(design, [Operation(world(*sizes), protocol=protocol)] * operations))
    print(f"{states} states")
    assert states > 100


def test_sizes_and_protocols_may_change_between_operations() -> None:
    nodes = world(2, 2)
    mixed = [
        Operation(nodes),
        Operation(nodes, shards=1),  # fewer elements than ranks per node: one shard has all of them
        Operation(nodes, shards=0),  # empty: uses no sequence number
        Operation(nodes, protocol="signal"),
        Operation(nodes, shards=1, protocol="signal"),
        Operation(nodes),
    ]
    assert explore(Machine(Design(), mixed)) > 500


def test_groups_of_a_grid_are_independent() -> None:
    """2 x 2 ranks, all-reduces over rows and columns in turn, as in a layer with 2D tensor parallelism."""
    rows = [Operation(((0,), (1,))), Operation(((2,), (3,)))]
    columns = [Operation(((0,), (2,))), Operation(((1,), (3,)))]
    assert explore(Machine(Design(), (rows + columns) * 2)) > 500


@pytest.mark.parametrize("seeds", [range(150), pytest.param(range(150, 2500), marks=pytest.mark.full)], ids=str)
@pytest.mark.parametrize("sizes", RANDOM)
def test_random_schedules_of_larger_worlds(sizes: tuple[int, ...], seeds: range) -> None:
    machine = Machine(Design(words=2), [Operation(world(*sizes))] * 4)
    for seed in seeds:
        random_walk(machine, seed)


def test_random_schedules_find_failures() -> None:
    """Random schedules of a broken design fail, so the runs above are meaningful."""
    machine = Machine(Design(buffers=1), [Operation(world(2, 2, 2))] * 4)
    found = 0
    for seed in range(30):
        try:
            random_walk(machine, seed)
        except ProtocolError:
            found += 1
    assert found > 3


@pytest.mark.parametrize("ranks", range(1, 5))
def test_every_buffer_reuse_is_ordered(ranks: int) -> None:
    """1 to 9 nodes of `ranks` ranks, also with a last node of one rank."""
    for nodes in range(1, 10):
        for sizes in {(ranks,) * nodes, (ranks,) * (nodes - 1) + (1,)}:
            ll, signal = Operation(world(*sizes)), Operation(world(*sizes), protocol="signal")
            assert find_race(Machine(Design(), [ll, ll, ll, ll, signal, ll, signal])) is None, sizes


# ---- with one condition removed ----


@dataclass(frozen=True)
class BrokenDesign:
    """A design without one condition, operations that expose it, and how it fails."""

    design: Design
    operations: list[Operation]
    fails: str


PAIR, FOUR = world(1, 1), world(1, 1, 1, 1)


def repeated(nodes: Nodes, times: int = 3) -> list[Operation]:
    return [Operation(nodes)] * times


BROKEN_DESIGNS = {
    "one buffer": BrokenDesign(Design(buffers=1), repeated(PAIR), "overwrite"),
    "one staging buffer": BrokenDesign(Design(staging=1), repeated(PAIR), "overwrite"),
    "one slot for two steps": BrokenDesign(Design(slot_per_step=False), repeated(FOUR), "wrong sum"),
    "empty operations use a sequence number": BrokenDesign(
        Design(empty_uses_sequence=True), [Operation(PAIR), Operation(PAIR, shards=0), Operation(PAIR)], "overwrite"
    ),
    "groups share buffers": BrokenDesign(
        Design(buffers_per_group=False), [Operation(((0,), (1,))), Operation(((1,), (2,)))], "overwrite"
    ),
    "groups share a sequence number": BrokenDesign(
        Design(counter_per_group=False), [Operation(((0,), (1,))), Operation(((1,), (2,)))], "deadlock"
    ),
    "two streams": BrokenDesign(Design(streams=2, in_order=False), repeated(PAIR), "overwrite"),
    "launches overlap": BrokenDesign(Design(streams=2), repeated(PAIR), "overwrite"),
    "a broadcast uses the same buffers": BrokenDesign(
        Design(), [Operation(PAIR), Operation(PAIR, kind="broadcast"), Operation(PAIR)], "overwrite"
    ),
    "a graph replay repeats sequence numbers": BrokenDesign(Design(flag_period=2), repeated(PAIR), "stale read"),
    "flags wrap around while a slot is unused": BrokenDesign(
        Design(flag_period=4),
        [Operation(world(2)), *[Operation(world(2), shards=1)] * 3, Operation(world(2))],
        "stale read",
    ),
    "both protocols share a slot": BrokenDesign(
        Design(slots_per_protocol=False),
        [Operation(PAIR, protocol="signal"), Operation(PAIR), Operation(PAIR)],
        "stale read",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN_DESIGNS)
def test_every_condition_is_needed(name: str) -> None:
    case = BROKEN_DESIGNS[name]
    machine = Machine(case.design, case.operations)
    with pytest.raises(ProtocolError) as failure:
        explore(machine)
    print(f"{name}\n{failure.value}")  # pytest -s prints the schedule
    assert failure.value.kind == case.fails
    assert failure.value.trace
    assert find_race(machine) is not None


OVERWRITES = [
    "one buffer",
    "empty operations use a sequence number",
    "two streams",
    "launches overlap",
    "a broadcast uses the same buffers",
]


@pytest.mark.parametrize("name", OVERWRITES)
def test_more_staging_buffers_do_not_help(name: str) -> None:
    """With enough staging buffers, the receiver's slot is overwritten instead."""
    case = BROKEN_DESIGNS[name]
    with pytest.raises(ProtocolError, match="overwrite: a word overwrites another"):
        explore(Machine(replace(case.design, staging=8), case.operations))


@pytest.mark.parametrize("ranks", [2, 3])
def test_one_buffer_suffices_within_a_node(ranks: int) -> None:
    """A shard's sum is sent back only after its inputs were read. Only the inter-node exchange needs two buffers."""
    assert explore(Machine(Design(buffers=1), repeated(world(ranks)))) > 50


def test_flags_can_wrap_around_if_every_slot_is_used() -> None:
    assert explore(Machine(Design(flag_period=4), repeated(PAIR, 8))) > 50


def test_trace_of_a_failure() -> None:
    case = BROKEN_DESIGNS["one buffer"]
    with pytest.raises(ProtocolError) as failure:
        explore(Machine(case.design, case.operations))
    assert (
        str(failure.value)
        == """overwrite: a word overwrites another that has not been read
  operation 1: rank 0 enters
  operation 1: step 0 of sum 0 is sent by rank 0 to rank 1
  operation 1: rank 1 enters
  operation 1: step 0 of sum 0 is sent by rank 1 to rank 0
  operation 1: step 0 of sum 0 arrives from rank 0 at rank 1
  operation 1: step 0 of sum 0 arrives from rank 1 at rank 0
  operation 1: step 0 of sum 0 is read by rank 0
  operation 1: rank 0 leaves
  operation 2: rank 0 enters
  operation 2: step 0 of sum 0 is sent by rank 0 to rank 1
  operation 2: step 0 of sum 0 arrives from rank 0 at rank 1"""
    )
