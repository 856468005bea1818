"""Connections of strangers to a rank that accepts other ranks."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from yalis.errors import YalisFailure
from yalis.launch.acceptor import MAX_UNAUTHENTICATED, Acceptor
from yalis.launch.auth import JobKey, Method, Responder, authenticate
from yalis.launch.link import Link, listen
from yalis.launch.peer_links import accept_followers, connect_to_leader
from yalis.launch.rank_info import RankInfo

KEY = JobKey(Method.GIVEN, "job", b"0123456789abcdef")
PURPOSE = b"test"
LEADER = RankInfo(0, "a", 0, 0, "127.0.0.1", 1)


@pytest.fixture
def links() -> Iterator[list[Link]]:
    accepted: list[Link] = []
    yield accepted
    for link in accepted:
        link.close()


@pytest.fixture
def acceptor(links: list[Link]) -> Iterator[Acceptor]:
    acceptor = Acceptor(listen("127.0.0.1", 0), KEY, PURPOSE, links.append)
    yield acceptor
    acceptor.close()


def connect(acceptor: Acceptor) -> socket.socket:
    return socket.create_connection(acceptor.server.getsockname(), timeout=10)


def join(acceptor: Acceptor, links: list[Link]) -> None:
    """Authenticate one rank while the acceptor runs."""
    before = len(links)
    with connect(acceptor) as sock:
        rank = threading.Thread(target=authenticate, args=(sock, KEY.method, KEY.job, KEY.secret, PURPOSE))
        rank.start()
        deadline = time.monotonic() + 10
        while len(links) == before and time.monotonic() < deadline:
            acceptor.run_once(0.1)
        rank.join()
    assert len(links) == before + 1


def test_a_descriptor_that_is_used_again_does_not_end_the_job(acceptor: Acceptor, links: list[Link]) -> None:
    """A connection that is closed for a new one may have data to read, and the new one may get its descriptor."""
    with contextlib.ExitStack() as stack:
        strangers = [stack.enter_context(connect(acceptor)) for _ in range(MAX_UNAUTHENTICATED)]
        while len(acceptor._open) < len(strangers):
            acceptor.run_once(1)
        for _ in range(2):  # the second is accepted after the first has replaced an old connection
            stack.enter_context(connect(acceptor))
        for stranger in strangers:
            stranger.send(b"x")
        acceptor.run_once(1)
        join(acceptor, links)


def test_an_unexpected_error_closes_the_connection_only(
    acceptor: Acceptor, links: list[Link], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with connect(acceptor) as stranger, monkeypatch.context() as patch:
        patch.setattr(Responder, "receive", lambda *_: 1 // 0)
        stranger.send(bytes(1000))
        acceptor.run_once(1)
        acceptor.run_once(1)
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(1) == b""
    assert "closed after an unexpected error" in caplog.text
    join(acceptor, links)


def test_a_follower_connects_again_until_the_leader_accepts_it() -> None:
    """A leader with too many connections closes some of them before their handshake."""
    server = listen("127.0.0.1", 0)
    port = server.getsockname()[1]
    found: dict[int, Link] = {}

    def lead() -> None:
        for _ in range(8):
            server.accept()[0].close()
        found.update(accept_followers(server, KEY, PURPOSE, [1], lambda: None))

    leader = threading.Thread(target=lead)
    leader.start()
    link = connect_to_leader(LEADER, port, KEY, PURPOSE, 1)
    leader.join()
    found[1].send("hello")
    assert link.receive() == "hello"
    for end in (link, found[1]):
        end.close()
    with pytest.raises(YalisFailure, match=f"cannot reach rank 0 on a at 127.0.0.1, port {port} .*refused"):
        connect_to_leader(LEADER, port, KEY, PURPOSE, 1)
