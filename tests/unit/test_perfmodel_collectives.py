"""Costs of all-reduce algorithms against sums computed by hand, and the sizes where one overtakes another."""

from __future__ import annotations

from functools import partial

import pytest

from yalis.perfmodel.collectives import (
    INTER_NODE,
    Algorithm,
    Cost,
    Link,
    Load,
    Shape,
    direct_exchange,
    fit,
    hierarchical,
    one_shot,
    recursive_doubling,
    recursive_halving,
    ring,
)

M = 1 << 20
NONE = Load()
# Example links: 1 us and 200 GB/s intra-node, 5 us and 25 GB/s inter-node.
INTRA, INTER = Link(1e-6, 1 / 200e9), Link(5e-6, 1 / 25e9)


def double_tree(shape: Shape, bytes: float) -> Cost:
    """Reduce up and broadcast down a tree of nodes with a chain in each node, as NCCL does.

    Each of two trees carries half of the message, spread over the network links of a node's ranks."""
    chain, depth = 2 * (shape.ranks_per_node - 1), 2 * (shape.nodes - 1).bit_length()
    if shape.nodes == 1:
        return shape.cost(Load(chain, chain, 2 * bytes if chain else 0), Load())
    return shape.cost(Load(chain, chain), Load(depth, depth, 2 * bytes / shape.ranks_per_node))


def crossover(few_rounds: Algorithm, few_bytes: Algorithm, shape: Shape, intra: Link, inter: Link) -> float | None:
    """Return the bytes from which `few_bytes` is faster than `few_rounds`: None if it never is, 0 if it always is."""

    def extra_seconds(bytes: float) -> float:
        return few_bytes(shape, bytes).seconds(intra, inter) - few_rounds(shape, bytes).seconds(intra, inter)

    huge = 1e15
    at_zero, per_byte = extra_seconds(0), (extra_seconds(huge) - extra_seconds(0)) / huge
    if at_zero <= 0:
        return 0.0
    gains = per_byte < -1e-9 * few_rounds(shape, huge).seconds(intra, inter) / huge  # more than a rounding error
    return at_zero / -per_byte if gains else None


def test_four_nodes_of_two_by_hand() -> None:
    shape = Shape(4, 2)
    assert ring(shape, M) == Cost(NONE, Load(14, 14, 14 * M / 8 / 2))  # two rings
    assert double_tree(shape, M) == Cost(Load(2, 2), Load(4, 4, M))
    assert one_shot(shape, M) == Cost(Load(1, 1, M), Load(1, 6, 6 * M))
    near = Load(2, 2, M)  # reduce-scatter and all-gather of half of the message
    assert hierarchical(shape, M) == Cost(near, Load(2, 2, M))
    assert hierarchical(shape, M, "halving") == Cost(near, Load(4, 4, 0.75 * M))
    assert hierarchical(shape, M, "direct") == Cost(near, Load(2, 6, 0.75 * M))


def test_the_ll_protocol_doubles_the_bytes_on_every_link() -> None:
    assert hierarchical(Shape(4, 2), M, wire_factor=2) == hierarchical(Shape(4, 2), 2 * M)


def test_seconds_add_up_rounds_messages_and_bytes() -> None:
    link = Link(latency=3e-6, seconds_per_byte=1e-9, overhead=5e-7)
    assert link.seconds(Load(2, 6, 1000)) == pytest.approx(6e-6 + 3e-6 + 1e-6)
    cost = hierarchical(Shape(4, 2), 4000)
    assert cost.seconds(INTRA, INTER) == pytest.approx(2e-6 + 4000 / 200e9 + 10e-6 + 4000 / 25e9)


@pytest.mark.parametrize(
    ("nodes", "by_doubling", "by_halving"),
    [
        (1, Load(), Load()),
        (2, Load(1, 1, 60), Load(2, 2, 60)),
        (3, Load(3, 3, 180), Load(4, 4, 60 + 120)),
        (4, Load(2, 2, 120), Load(4, 4, 90)),
        (5, Load(4, 4, 240), Load(6, 6, 90 + 120)),
        (8, Load(3, 3, 180), Load(6, 6, 105)),
    ],
)
def test_inter_node_algorithms_for_any_number_of_nodes(nodes: int, by_doubling: Load, by_halving: Load) -> None:
    assert recursive_doubling(nodes, 60) == by_doubling
    assert recursive_halving(nodes, 60) == by_halving
    assert direct_exchange(nodes, 60) == (Load(2, 2 * (nodes - 1), 120 * (nodes - 1) / nodes) if nodes > 1 else Load())


@pytest.mark.parametrize("inter_node", INTER_NODE)
def test_one_node_has_no_inter_node_traffic(inter_node: str) -> None:
    assert hierarchical(Shape(1, 4), M, inter_node) == Cost(Load(2, 6, 1.5 * M), NONE)
    for algorithm in (ring, double_tree, one_shot):
        cost = algorithm(Shape(1, 4), M)
        assert cost.inter == NONE
        assert cost.intra.bytes > 0


def test_one_rank_per_node_has_no_intra_node_traffic() -> None:
    for algorithm in (ring, double_tree, one_shot, hierarchical):
        cost = algorithm(Shape(4, 1), M)
        assert cost.intra == NONE
        assert cost.inter.bytes > 0
    assert hierarchical(Shape(4, 1), M) == Cost(NONE, recursive_doubling(4, M))


@pytest.mark.parametrize("algorithm", [ring, double_tree, one_shot, hierarchical])
def test_a_single_rank_costs_nothing(algorithm: Algorithm) -> None:
    assert algorithm(Shape(1, 1), M) == Cost(NONE, NONE)


def test_ranks_that_share_a_link_share_its_bandwidth() -> None:
    shared = Shape(4, 2, shared_link=True)
    assert one_shot(shared, M).inter.bytes == 2 * one_shot(Shape(4, 2), M).inter.bytes
    assert hierarchical(shared, M).inter.bytes == 2 * M
    assert ring(shared, M) == Cost(NONE, Load(14, 14, 14 * M / 8))
    assert double_tree(shared, M).inter == Load(4, 4, 2 * M)


def test_crossovers_between_fewer_rounds_and_fewer_bytes() -> None:
    """These are the figures in docs/nvrar.md."""
    ll, halving = partial(hierarchical, wire_factor=2), partial(hierarchical, inter_node="halving")
    direct = partial(hierarchical, inter_node="direct")
    over = partial(crossover, intra=INTRA, inter=INTER)
    # Two rounds more, and half a share (a quarter of the message) less.
    assert over(hierarchical, halving, Shape(4, 4)) == pytest.approx(2 * 5e-6 * 25e9 * 8)
    assert over(hierarchical, halving, Shape(2, 4)) is None  # two nodes: the same bytes, in two rounds instead of one
    assert over(hierarchical, direct, Shape(4, 4)) == 0  # two rounds as well, and fewer bytes
    assert over(ll, hierarchical, Shape(4, 4)) == 0  # signals cost nothing in this model
    assert over(ll, double_tree, Shape(4, 4)) == pytest.approx(400e3)
    assert over(hierarchical, double_tree, Shape(4, 4)) == pytest.approx(1.87e6, rel=0.01)
    assert over(ll, ring, Shape(4, 4)) == pytest.approx(3.8e6, rel=0.01)
    assert over(direct, double_tree, Shape(4, 4)) == pytest.approx(5.6e6, rel=0.01)


def test_a_fit_recovers_the_link() -> None:
    link = Link(4e-6, 1 / 10e9)
    messages = [Load(1, 1, 1 << power) for power in range(8, 24, 3)]
    found = fit([(load, link.seconds(load)) for load in messages])
    assert (found.latency, found.seconds_per_byte) == pytest.approx((link.latency, link.seconds_per_byte))
    rounds = [hierarchical(Shape(4, 1), size).inter for size in (1e3, 1e5, 1e7)]
    found = fit([(load, link.seconds(load)) for load in rounds])
    assert (found.latency, found.seconds_per_byte) == pytest.approx((link.latency, link.seconds_per_byte))


def test_a_fit_weighs_small_and_large_messages_equally() -> None:
    link = Link(1e-5, 1e-9)
    noisy = [(Load(1, 1, n), link.seconds(Load(1, 1, n)) * noise) for n, noise in [(1e2, 1), (1e3, 1), (1e8, 1.1)]]
    assert fit(noisy).latency == pytest.approx(link.latency, rel=0.02)


def test_a_fit_is_never_negative() -> None:
    falling = [(Load(1, 1, 100), 2.0), (Load(1, 1, 200), 1.0)]
    assert fit(falling).seconds_per_byte == 0
    steep = [(Load(1, 1, 100), 1.0), (Load(1, 1, 200), 4.0)]
    assert fit(steep).latency == 0


def test_a_fit_needs_two_sizes() -> None:
    with pytest.raises(ValueError, match="two sizes"):
        fit([(Load(1, 1, 100), 1.0), (Load(1, 1, 100), 1.1)])
