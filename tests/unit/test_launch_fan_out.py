"""Trees of followers: shape, order of messages, and what a rank forwards."""

from __future__ import annotations

import socket

import pytest

from yalis.launch.fan_out import FAN_OUT, FanOut, tree_depth, tree_parents
from yalis.launch.link import Link, LinkLost


@pytest.mark.parametrize("fan_out", [2, 3, FAN_OUT, 11])
@pytest.mark.parametrize("followers", [0, 1, 2, 7, 8, 9, 12, 64, 72, 73, 511, 1023])
def test_every_follower_has_one_parent_before_it(followers: int, fan_out: int) -> None:
    parents = tree_parents(followers, fan_out)
    assert len(parents) == followers + 1
    depths = [0]
    for position in range(1, followers + 1):
        assert 0 <= parents[position] < position
        depths.append(depths[parents[position]] + 1)
    children = [parents[1:].count(position) for position in range(followers + 1)]
    assert max(children) <= fan_out
    assert max(depths) == tree_depth(followers, fan_out)
    # A subtree is a contiguous range: the parent of a position is an ancestor of, or equal to, the one before it.
    for position in range(2, followers + 1):
        ancestor = position - 1
        while ancestor != parents[position]:
            assert ancestor, f"{position} is not below an ancestor of {position - 1}"
            ancestor = parents[ancestor]


def test_small_groups_get_direct_sends() -> None:
    assert tree_parents(FAN_OUT) == [0] * (FAN_OUT + 1)
    assert [tree_depth(n) for n in (1, 8, 9, 72, 73, 511, 584, 585)] == [1, 1, 2, 2, 3, 3, 3, 4]


def link_pair(name: str) -> tuple[Link, Link]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = socket.create_connection(server.getsockname())
        accepted = server.accept()[0]
    return Link(accepted, name), Link(client, "parent")


def test_a_message_is_forwarded_before_it_is_decoded() -> None:
    to_first, first_up = link_pair("rank 1")
    to_second, second_up = link_pair("rank 2")
    leader = FanOut({1: to_first}, None, [to_first])
    first, second = FanOut({}, first_up, [to_second]), FanOut({}, second_up, [])
    for value in (["plan", 1], {"text": "ä" * 10}, None):
        leader.send(value)
        assert first.receive() == value
        assert second.poll(5)
        assert second.receive() == value
    to_first.send_frame(b"\0\0\0\1{")
    with pytest.raises(LinkLost, match="parent sent data that is not a message"):
        first.receive()
    assert second.poll(5)  # it arrived there too
    for group in (leader, first, second):
        group.close()
