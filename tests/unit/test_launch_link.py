"""Links: JSON messages between two ranks, and what happens when one of them fails."""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from collections.abc import Iterator

import pytest

from yalis.errors import YalisFailure
from yalis.launch.link import Link, LinkLost, listen, plain_address, wait_any

Pair = tuple[Link, Link]


@pytest.fixture
def pair() -> Iterator[Pair]:
    with listen("127.0.0.1", 0) as server:
        client = socket.create_connection(server.getsockname())
        accepted, _ = server.accept()
    links = Link(client, "rank 0 on a"), Link(accepted, "rank 1 on b")
    yield links
    for link in links:
        link.close()


def test_messages_arrive_complete_and_in_order(pair: Pair) -> None:
    a, b = pair
    messages = [None, {"x": [1, 2.5, "ü"]}, "y" * 3_000_000, [], float("inf")]
    sender = threading.Thread(target=lambda: [a.send(message) for message in messages])
    sender.start()
    assert [b.receive() for _ in messages] == messages
    sender.join()


def test_both_ends_can_send_at_once(pair: Pair) -> None:
    """Much more than the socket buffers hold, in both directions, before either end receives anything."""
    messages = [[number, "x" * 4_000_000] for number in range(8)]
    received: dict[str, list[object]] = {}

    def send_then_receive(link: Link) -> None:
        for message in messages:
            link.send(message)
        received[link.peer] = [link.receive() for _ in messages]

    threads = [threading.Thread(target=send_then_receive, args=(link,), daemon=True) for link in pair]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert list(received.values()) == [messages, messages]


def test_one_thread_can_send_while_another_receives(pair: Pair) -> None:
    a, b = pair
    to_b, to_a = [[number, "x" * 300_000] for number in range(40)], [[number, "y" * 200_000] for number in range(60)]
    sender = threading.Thread(target=lambda: [a.send(message) for message in to_b])
    got: list[object] = []
    reader = threading.Thread(target=lambda: got.extend(a.receive() for _ in to_a))
    for thread in (sender, reader):
        thread.start()
    for message in to_a:
        b.send(message)
    assert [b.receive() for _ in to_b] == to_b
    for thread in (sender, reader):
        thread.join(20)
    assert got == to_a


def test_poll(pair: Pair) -> None:
    a, b = pair
    begin = time.monotonic()
    assert not b.poll(0.1)
    assert time.monotonic() - begin >= 0.1
    a.send(1)
    a.send(2)
    assert b.poll(1)
    assert b.receive() == 1
    assert b.poll(0)  # in the buffer already
    assert b.receive() == 2
    assert not b.poll(0)
    a.close()
    assert b.poll(1)  # a closed connection counts as readable


def test_an_incomplete_message_is_not_received(pair: Pair) -> None:
    a, b = pair
    a._socket.sendall(struct.pack(">I", 4) + b"12")
    assert not b.poll(0.1)
    a._socket.sendall(b"34")
    assert b.receive() == 1234


def test_a_disconnected_peer_is_named(pair: Pair) -> None:
    a, b = pair
    a.send("last words")
    a.close()
    assert b.receive() == "last words"
    with pytest.raises(LinkLost, match="rank 1 on b closed"):
        b.receive()
    time.sleep(0.05)
    with pytest.raises(LinkLost, match="connection to rank 1 on b broke"):
        [b.send("x" * 10_000) for _ in range(100)]


@pytest.mark.parametrize("data", [struct.pack(">I", 0xFFFFFFFF), b"GET / HTTP/1.1\r\n", struct.pack(">I", 3) + b"{,}"])
def test_data_that_is_not_a_message_is_refused(pair: Pair, data: bytes) -> None:
    a, b = pair
    a._socket.sendall(data)
    with pytest.raises(LinkLost, match="not a message"):
        b.receive()


def test_a_message_over_the_limit_is_not_sent(pair: Pair) -> None:
    pair[0].limit = 100
    with pytest.raises(ValueError, match="exceeds the link"):
        pair[0].send("x" * 100)


class FailingJob:
    failure: str | None = None

    def explain(self, error: BaseException) -> YalisFailure | None:
        return YalisFailure("rank 7 on z died") if self.failure else None


def test_a_failure_of_the_job_ends_receive(pair: Pair) -> None:
    job = FailingJob()
    pair[0].failure_source = job
    threading.Timer(0.2, lambda: setattr(job, "failure", "known")).start()
    with pytest.raises(YalisFailure, match="rank 7 on z died"):
        pair[0].receive()


def test_a_failure_of_the_job_or_a_closed_peer_ends_send(pair: Pair) -> None:
    job = FailingJob()
    pair[0].failure_source = job
    threading.Timer(0.2, lambda: setattr(job, "failure", "known")).start()
    with pytest.raises(YalisFailure, match="rank 7 on z died"):
        pair[0].send("x" * 50_000_000)  # the peer does not receive it
    threading.Timer(0.2, pair[0].close).start()
    with pytest.raises(LinkLost, match="rank 1 on b"):
        pair[1].send("x" * 50_000_000)


def test_wait_any(pair: Pair) -> None:
    begin = time.monotonic()
    threading.Timer(0.2, lambda: pair[1].send(1)).start()
    wait_any([pair[1], pair[0]])
    assert time.monotonic() - begin >= 0.2
    assert pair[0].receive() == 1
    job = FailingJob()
    pair[0].failure_source = job
    threading.Timer(0.1, lambda: setattr(job, "failure", "known")).start()
    with pytest.raises(YalisFailure, match="rank 7 on z died"):
        wait_any([pair[0], pair[1]])


def test_close_wakes_a_thread_in_receive(pair: Pair) -> None:
    ended: list[str] = []

    def wait() -> None:
        try:
            pair[0].receive()
        except LinkLost as lost:
            ended.append(str(lost))

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.1)
    pair[0].close()
    thread.join(0.8)
    assert len(ended) == 1


def test_a_forked_child_does_not_keep_a_link_open(pair: Pair) -> None:
    child = os.fork()
    if not child:
        time.sleep(30)
        os._exit(0)
    try:
        time.sleep(0.2)
        pair[0]._socket.close()  # as if this process had died
        assert pair[1].poll(5)
        with pytest.raises(LinkLost):
            pair[1].receive()
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)


def test_addresses(pair: Pair) -> None:
    assert pair[0].addresses() == ("127.0.0.1", "127.0.0.1")
    assert [plain_address(a) for a in ("::ffff:10.0.0.1", "fe80::1%eth0", "1.2.3.4")] == [
        "10.0.0.1",
        "fe80::1",
        "1.2.3.4",
    ]
    with listen("", 0) as server:
        socket.create_connection(("127.0.0.1", server.getsockname()[1])).close()
