"""Delivers the messages of a leader to all its followers: directly to a few of them, through a tree to many.

A send to one link takes the sender some microseconds, so a leader of hundreds of ranks would spend milliseconds on each
step. In a tree it sends to at most `FAN_OUT` ranks. Each of these forwards the bytes, before it decodes them, to the
ranks below it. Every subtree is a contiguous range of ranks and its root is the lowest of them: most links stay inside
a node, and no rank depends on a later pipeline stage for its plan.

Answers do not go through the tree: each follower has a direct link to its leader.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from yalis.launch.link import Link, encode_frame

#: Followers that a leader sends to directly, and children of each rank in a tree.
FAN_OUT = 8


def tree_parents(followers: int, fan_out: int = FAN_OUT) -> list[int]:
    """Return the parent of each position of a tree: 0 is the leader (its own parent), then the followers in order."""
    parents = [0] * (followers + 1)

    def place(parent: int, first: int, end: int) -> None:
        """Place the positions from `first` to `end` below `parent`, as subtrees of almost equal size."""
        subtrees = min(fan_out, end - first)
        for index in range(subtrees):
            start = first + (end - first) * index // subtrees
            stop = first + (end - first) * (index + 1) // subtrees
            parents[start] = parent
            place(start, start + 1, stop)

    place(0, 1, followers + 1)
    return parents


def tree_depth(followers: int, fan_out: int = FAN_OUT) -> int:
    """Return how many links a message passes on its longest way from the leader."""
    depth = 0
    while followers > 0:
        depth += 1
        followers = -(-followers // fan_out) - 1  # of the largest subtree, without its root
    return depth


class FanOut:
    """One rank's part of a group: the leader calls send(), every follower receive(), in the same order.

    `links` has the direct links: of the leader one to each follower, of a follower {leader: link}.
    """

    def __init__(self, links: dict[int, Link], parent: Link | None, children: Sequence[Link]) -> None:
        """`parent` is None on the leader."""
        self.links, self._parent, self._children = links, parent, tuple(children)

    def send(self, value: Any) -> None:
        """Send a message to all followers. Returns when the kernel has it for the first of them."""
        if self._children:
            self._forward(encode_frame(value))

    def receive(self) -> Any:
        """Wait for the leader's next message, forward it to the ranks below this one, and return it."""
        assert self._parent is not None
        frame = self._parent.receive_frame()
        self._forward(frame)
        return self._parent.decode(frame)

    def poll(self, timeout: float = 0.0) -> bool:
        """Wait up to `timeout` seconds. Returns whether receive() would return or raise without blocking."""
        assert self._parent is not None
        return self._parent.poll(timeout)

    def close(self) -> None:
        for link in (*self.links.values(), *self._children, *([self._parent] if self._parent else ())):
            link.close()

    def _forward(self, frame: bytes) -> None:
        for link in self._children:
            link.send_frame(frame)
