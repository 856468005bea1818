"""NVRAR's protocol on a network that delays and reorders every word: nothing stale is read, nothing unread is written
over, nobody waits for ever, and every rank has the sum. Each condition of the design, taken away, breaks it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from tests.nvrar_model import Broken, Design, Machine, Nodes, Operation, Protocol, explore, race, wander, world

#: Ranks of each node; operations; how many states there are. A count that changes says that the model did.
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

#: Two words a message, two blocks a rank, either protocol: (design, protocol, nodes, operations).
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
def test_no_schedule_breaks_it(sizes: tuple[int, ...], operations: int, states: int) -> None:
    assert explore(Machine(Design(), [Operation(world(*sizes))] * operations)) == states


@pytest.mark.parametrize(("design", "protocol", "sizes", "operations"), VARIANTS)
def test_no_schedule_breaks_a_variant(
    design: Design, protocol: Protocol, sizes: tuple[int, ...], operations: int
) -> None:
    states = explore(Machine(design, [Operation(world(*sizes), protocol=protocol)] * operations))
    print(f"{states} states")
    assert states > 100


def test_sizes_and_protocols_may_change_between_operations() -> None:
    nodes = world(2, 2)
    mixed = [
        Operation(nodes),
        Operation(nodes, shares=1),  # fewer elements than ranks in a node: one share has them all
        Operation(nodes, shares=0),  # nothing at all: takes no number
        Operation(nodes, protocol="signal"),
        Operation(nodes, shares=1, protocol="signal"),
        Operation(nodes),
    ]
    assert explore(Machine(Design(), mixed)) > 500


def test_groups_of_a_grid_do_not_disturb_each_other() -> None:
    """2 x 2 ranks, sums over rows and over columns in turn, as a layer does."""
    rows = [Operation(((0,), (1,))), Operation(((2,), (3,)))]
    columns = [Operation(((0,), (2,))), Operation(((1,), (3,)))]
    assert explore(Machine(Design(), (rows + columns) * 2)) > 500


@pytest.mark.parametrize("seeds", [range(150), pytest.param(range(150, 2500), marks=pytest.mark.full)], ids=str)
@pytest.mark.parametrize("sizes", RANDOM)
def test_random_schedules_of_larger_worlds(sizes: tuple[int, ...], seeds: range) -> None:
    machine = Machine(Design(words=2), [Operation(world(*sizes))] * 4)
    for seed in seeds:
        wander(machine, seed)


def test_random_schedules_find_what_is_broken() -> None:
    """So that the runs above mean something."""
    machine = Machine(Design(buffers=1), [Operation(world(2, 2, 2))] * 4)
    found = 0
    for seed in range(30):
        try:
            wander(machine, seed)
        except Broken:
            found += 1
    assert found > 3


@pytest.mark.parametrize("ranks", range(1, 5))
def test_every_reuse_is_ordered_in_worlds_of_any_shape(ranks: int) -> None:
    """1 to 9 nodes of as many ranks, and with a last node of one."""
    for nodes in range(1, 10):
        for sizes in {(ranks,) * nodes, (ranks,) * (nodes - 1) + (1,)}:
            ll, signal = Operation(world(*sizes)), Operation(world(*sizes), protocol="signal")
            assert race(Machine(Design(), [ll, ll, ll, ll, signal, ll, signal])) is None, sizes


# ---- without its conditions ----


@dataclass(frozen=True)
class Without:
    """A design that leaves something out, operations that show it, and how it fails."""

    design: Design
    operations: list[Operation]
    fails: str


PAIR, FOUR = world(1, 1), world(1, 1, 1, 1)


def repeated(nodes: Nodes, times: int = 3) -> list[Operation]:
    return [Operation(nodes)] * times


WITHOUT = {
    "one buffer": Without(Design(buffers=1), repeated(PAIR), "overwrite"),
    "staging not doubled": Without(Design(staging=1), repeated(PAIR), "overwrite"),
    "a slot for two steps": Without(Design(slot_per_step=False), repeated(FOUR), "wrong sum"),
    "an empty operation takes a number": Without(
        Design(empty_takes_number=True), [Operation(PAIR), Operation(PAIR, shares=0), Operation(PAIR)], "overwrite"
    ),
    "groups share buffers": Without(
        Design(buffers_per_group=False), [Operation(((0,), (1,))), Operation(((1,), (2,)))], "overwrite"
    ),
    "groups share a counter": Without(
        Design(counter_per_group=False), [Operation(((0,), (1,))), Operation(((1,), (2,)))], "deadlock"
    ),
    "two streams": Without(Design(streams=2, in_order=False), repeated(PAIR), "overwrite"),
    "launches overlap": Without(Design(streams=2), repeated(PAIR), "overwrite"),
    "a broadcast uses the buffers": Without(
        Design(), [Operation(PAIR), Operation(PAIR, kind="broadcast"), Operation(PAIR)], "overwrite"
    ),
    "a captured graph repeats its numbers": Without(Design(flag_period=2), repeated(PAIR), "stale read"),
    "flags come round while a slot rests": Without(
        Design(flag_period=4),
        [Operation(world(2)), *[Operation(world(2), shares=1)] * 3, Operation(world(2))],
        "stale read",
    ),
    "both protocols in one slot": Without(
        Design(slots_per_protocol=False),
        [Operation(PAIR, protocol="signal"), Operation(PAIR), Operation(PAIR)],
        "stale read",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", WITHOUT)
def test_without_a_condition_some_schedule_breaks_it(what: str) -> None:
    case = WITHOUT[what]
    machine = Machine(case.design, case.operations)
    with pytest.raises(Broken) as broken:
        explore(machine)
    print(f"{what}\n{broken.value}")  # pytest -s: the schedule, move by move
    assert broken.value.kind == case.fails
    assert broken.value.trace
    assert race(machine) is not None


ROOM = [
    "one buffer",
    "an empty operation takes a number",
    "two streams",
    "launches overlap",
    "a broadcast uses the buffers",
]


@pytest.mark.parametrize("what", ROOM)
def test_staging_to_spare_saves_none_of_them(what: str) -> None:
    """Then it is the receiver's slot that is written over."""
    case = WITHOUT[what]
    with pytest.raises(Broken, match="overwrite: the word lands on another"):
        explore(Machine(replace(case.design, staging=8), case.operations))


@pytest.mark.parametrize("ranks", [2, 3])
def test_within_one_node_one_buffer_would_do(ranks: int) -> None:
    """A part's sum comes back only after its inputs were read: the second buffer is for the exchange between nodes."""
    assert explore(Machine(Design(buffers=1), repeated(world(ranks)))) > 50


def test_flags_may_come_round_where_every_slot_is_used_in_turn() -> None:
    assert explore(Machine(Design(flag_period=4), repeated(PAIR, 8))) > 50


def test_a_trace_reads_as_a_story() -> None:
    case = WITHOUT["one buffer"]
    with pytest.raises(Broken) as broken:
        explore(Machine(case.design, case.operations))
    assert (
        str(broken.value)
        == """overwrite: the word lands on another that has not been read
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
