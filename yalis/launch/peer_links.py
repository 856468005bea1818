"""Direct links between a leader and its followers, opened by `World.open_links`."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence

from yalis.errors import YalisFailure
from yalis.launch.acceptor import Acceptor, reserve_descriptors
from yalis.launch.auth import HANDSHAKE_S, HandshakeError, JobKey, authenticate
from yalis.launch.link import MAX_FRAME, Link, LinkLost
from yalis.launch.rank_info import RankInfo

CONNECT_S = 60.0
_MAX_HELLO = 1 << 10


def accept_followers(
    server: socket.socket, key: JobKey, purpose: bytes, followers: Sequence[int], check: Callable[[], None]
) -> dict[int, Link]:
    """Return a link to each follower. `check` is called while waiting, and raises if the job has failed."""
    reserve_descriptors(len(followers))
    links: dict[int, Link] = {}

    def read_rank(link: Link) -> None:
        if not link.poll(0):
            return
        acceptor.unwatch(link)
        try:
            rank = link.receive()
        except LinkLost:
            rank = None
        if type(rank) is not int or rank not in followers or rank in links:
            link.close()
            return
        link.limit = MAX_FRAME
        links[rank] = link
        try:
            link.send(None)  # confirms that the connection was accepted, and not closed to make room for another
        except LinkLost:
            del links[rank]
            link.close()

    def accepted(link: Link) -> None:
        link.limit = _MAX_HELLO
        acceptor.watch(link, read_rank)

    acceptor = Acceptor(server, key, purpose, accepted)
    deadline = time.monotonic() + CONNECT_S
    try:
        while len(links) < len(followers):
            acceptor.run_once(0.5)
            check()
            if time.monotonic() > deadline:
                break
    except BaseException:
        for link in links.values():
            link.close()
        raise
    finally:
        acceptor.close()
    return links


def connect_to_leader(leader: RankInfo, port: int, key: JobKey, purpose: bytes, rank: int) -> Link:
    """Return this rank's link to its leader. Raises YalisFailure if the leader cannot be reached.

    Connects again if the leader closes the connection, as it does if too many are unauthenticated.
    """
    deadline = time.monotonic() + CONNECT_S
    pause = 0.02
    while True:
        try:
            return _try_leader(leader, port, key, purpose, rank)
        except (OSError, HandshakeError, LinkLost) as error:
            problem = getattr(error, "strerror", None) or str(error)
            if isinstance(error, ConnectionRefusedError) or time.monotonic() + pause > deadline:
                break  # refused: the leader listened before this rank learned the port, so it has ended
        time.sleep(pause)
        pause = min(pause * 1.5, 1.0)
    raise YalisFailure(f"cannot reach {leader} at {leader.address}, port {port} ({problem})")


def _try_leader(leader: RankInfo, port: int, key: JobKey, purpose: bytes, rank: int) -> Link:
    sock = socket.create_connection((leader.address, port), timeout=HANDSHAKE_S)
    try:
        authenticate(sock, key.method, key.job, key.secret, purpose)
        link = Link(sock, str(leader))
        link.send(rank)
        if not link.poll(HANDSHAKE_S):
            raise TimeoutError("no answer")
        link.receive()
        return link
    except BaseException:
        sock.close()
        raise
