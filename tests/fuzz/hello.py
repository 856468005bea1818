"""Targets: what unauthenticated peers, impostors of rank 0 and authenticated peers send while ranks connect.

A real rank 0, or a leader of `open_links`, listens. After the mutated bytes, the real rank 1 must still be able to
connect to it. The first byte of an input selects the listener, the method by which the ranks got the secret, or both.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from tests.fuzz.mutations import mutate_bytes, mutate_json_text
from yalis.errors import YalisError
from yalis.launch.auth import JobKey, Method, authenticate
from yalis.launch.endpoint import Endpoint
from yalis.launch.link import Link, listen
from yalis.launch.peer_links import accept_followers, connect_to_leader
from yalis.launch.rank_info import RankInfo
from yalis.launch.rendezvous import CHANNELS, RankClient, RendezvousServer
from yalis.version import __version__

_SECRET = b"5f0c2d1e" * 4
_LOCALHOST = "127.0.0.1"
_PURPOSE = b"rendezvous"
#: Payloads that may exhaust a parser's recursion limit or memory.
_PAYLOADS = (
    *(b"[" * 1_000, b"[" * 60_000, b"[" * 65_536, b'{"a":' * 13_000, b"[" * 30_000 + b"]" * 30_000, b"9" * 60_000),
    *(b"", b"null", b"{}", b"0", b'"\\ud800"', b"\xff" * 100, b"\0" * 60_000, b"GET / HTTP/1.1\r\n\r\n"),
)


class _Listener(threading.Thread):
    """Rank 0 of a job of two ranks, waiting for rank 1 on a thread."""

    def __init__(self, method: Method, timeout: float) -> None:
        super().__init__(daemon=True)
        self.key, self.timeout = JobKey(method, "a job", _SECRET), timeout
        self.server = listen(_LOCALHOST, 0)
        self.port: int = self.server.getsockname()[1]
        self.links: list[Link] = []  # of both ends, to be closed
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self.accept()
        except BaseException as error:
            self.error = error

    def accept(self) -> None:
        """Wait for rank 1."""
        raise NotImplementedError

    def connect(self) -> None:
        """Connect as rank 1."""
        raise NotImplementedError

    def finish(self) -> None:
        """Wait for the thread, close everything, and raise the error of rank 0 if there was one."""
        self.join()
        for link in self.links:
            link.close()
        if self.error is not None:
            raise self.error


class _Rendezvous(_Listener):
    purpose = _PURPOSE

    def accept(self) -> None:
        server = RendezvousServer(self.server, self.key, 2, None)
        try:
            server.wait_for_ranks(self.timeout)
        finally:
            self.links += [link for links in server.links.values() for link in links.values()]

    def connect(self) -> None:
        endpoint = Endpoint(_LOCALHOST, (self.port,), self.key.job)
        client = RankClient(endpoint, self.key.method, lambda: _SECRET, 1, 2, self.timeout)
        client.join()
        self.links += client.links.values()


class _Leader(_Listener):
    purpose = b"links of a test"

    def accept(self) -> None:
        self.links += accept_followers(self.server, self.key, self.purpose, [1], lambda: None).values()

    def connect(self) -> None:
        leader = RankInfo(0, "host", 0, 0, _LOCALHOST, 1)
        self.links.append(connect_to_leader(leader, self.port, self.key, self.purpose, 1))


def _join_after(listener: _Rendezvous | _Leader, timeout: float, intrude: Callable[[socket.socket], None]) -> bytes:
    """Run `intrude` on a first connection to the listener, then connect as rank 1. Returns what the first received."""
    listener.start()
    try:
        with socket.create_connection((_LOCALHOST, listener.port), timeout=timeout) as other:
            other.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # the bytes arrive before rank 1 does
            with contextlib.suppress(OSError):  # the listener has closed the connection
                intrude(other)
            listener.connect()
            listener.join()
            other.settimeout(0.0)
            with contextlib.suppress(OSError):
                return other.recv(1 << 20)
            return b""
    finally:
        listener.finish()


def _hello_frame(rng: Random) -> bytes:
    """Return a mutated HELLO of auth.py: magic, method, length of the credential, nonce, credential."""
    method = rng.choice((*Method, *Method, 0, 7, 255))
    length = rng.choice((0, 0, 0, 1, 500, 2048, 2049, 65535))
    credential = rng.choice((b"", bytes(length), rng.randbytes(length), b"MUNGE:" + b"A" * max(0, length - 7) + b":"))
    frame = struct.pack(">8sBxH32s", b"YALIS\0\0\1", method, length, rng.randbytes(32)) + credential
    return mutate_bytes(frame, rng) if rng.random() < 0.3 else frame


def _json_frame(value: Any, rng: Random) -> bytes:
    """Return a mutated JSON message with its length in front, which may be wrong."""
    data = rng.choice(_PAYLOADS) if rng.random() < 0.1 else mutate_json_text(value, rng)
    lengths = (0, 1, len(data) - 1, len(data) + 1, 65535, 65536, 65537, 2**28, 2**31, 2**32 - 1)
    length = len(data) if rng.random() < 0.9 else rng.choice(lengths)
    frame = struct.pack(">I", length % 2**32) + data
    return mutate_bytes(frame, rng) if rng.random() < 0.1 else frame


def _hello(rng: Random) -> dict[str, Any]:
    return {
        "version": __version__, "rank": 1, "size": 2, "host": "host", "pid": 4711, "channel": rng.choice(CHANNELS),
        "machine": "a machine", "address": _LOCALHOST,
    }  # fmt: skip


class StrangerTarget:
    """What an unauthenticated peer sends. It must not keep rank 1 from joining."""

    name = "stranger"

    def make(self, rng: Random) -> bytes:
        kind = rng.random()
        if kind < 0.6:
            data = _hello_frame(rng) + rng.choice((b"", rng.randbytes(32), bytes(32), rng.randbytes(500)))
        elif kind < 0.8:
            data = _json_frame(_hello(rng), rng)
        else:
            data = rng.choice((*_PAYLOADS, rng.randbytes(rng.randrange(300)), b"\x16\x03\x01" + rng.randbytes(200)))
        return bytes([rng.randrange(4)]) + data

    def run(self, data: bytes, folder: Path) -> None:
        kind, method = (_Leader, _Rendezvous)[data[0] % 2], (Method.GIVEN, Method.MUNGE)[data[0] // 2]
        try:
            answer = _join_after(kind(method, 4.0), 4.0, lambda other: other.sendall(data[1:]))
        except YalisError as error:
            raise AssertionError(f"a stranger ended the job: {error}") from error
        if _SECRET in answer:
            raise AssertionError(f"rank 0 revealed its secret: {answer[:200]!r}")


class RankTarget:
    """Messages after the handshake. A process that knows the secret may end the job, but only with a YalisError."""

    name = "authenticated rank"

    def make(self, rng: Random) -> bytes:
        leader = rng.random() < 0.3
        return bytes([not leader]) + _json_frame(rng.choice((1, 0, 2)) if leader else _hello(rng), rng)

    def run(self, data: bytes, folder: Path) -> None:
        listener = (_Leader, _Rendezvous)[data[0]](Method.GIVEN, 1.0)

        def intrude(other: socket.socket) -> None:
            key = listener.key
            authenticate(other, key.method, key.job, key.secret, listener.purpose)
            other.sendall(data[1:])

        _join_after(listener, 1.0, intrude)


class ImpostorTarget:
    """Replies of a process that is not rank 0. The rank must refuse them with a YalisError and not send the secret."""

    name = "impostor"

    def make(self, rng: Random) -> bytes:
        nonce, proof = rng.randbytes(32), rng.choice((rng.randbytes(32), bytes(32)))
        status, length = rng.choice((0, 0, 0, 1, 255)), rng.choice((0, 0, 0, 10, 2048, 65535))
        method = rng.choice((Method.GIVEN, Method.GIVEN, *Method, 0, 99))
        frame = struct.pack(">8sBBH32s32s", b"YALIS\0\0\1", status, method, length, nonce, proof) + bytes(length)
        frame = mutate_bytes(frame, rng) if rng.random() < 0.4 else frame
        return frame if rng.random() < 0.9 else _json_frame({"here": 1}, rng)

    def run(self, data: bytes, folder: Path) -> None:
        received = bytearray()

        def impersonate() -> None:
            with contextlib.suppress(OSError), server.accept()[0] as rank:
                server.close()  # a second attempt of the rank is refused
                rank.settimeout(0.5)
                rank.sendall(data)
                rank.shutdown(socket.SHUT_WR)
                while chunk := rank.recv(1 << 12):
                    received.extend(chunk)

        with listen(_LOCALHOST, 0) as server:
            server.settimeout(1.0)
            endpoint = Endpoint(_LOCALHOST, (server.getsockname()[1],), "a job")
            thread = threading.Thread(target=impersonate, daemon=True)
            thread.start()
            try:
                RankClient(endpoint, Method.GIVEN, lambda: _SECRET, 1, 2, 0.01).join()
            finally:
                thread.join()
                if _SECRET in received:
                    raise AssertionError("the rank revealed its secret")
        raise AssertionError("the rank joined an impostor")
