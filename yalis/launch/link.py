"""A connection between two ranks that carries JSON messages over TCP, each with a 4-byte length in front."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import select
import socket
import struct
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Any, Protocol

from yalis.errors import PeerLost, YalisFailure

MAX_FRAME = 256 << 20
KEEPALIVE_S = 60  # a host that answers no TCP keepalive probe for this long counts as down
_HEADER = struct.Struct(">I")
_CHUNK = 1 << 18
_SILENT = {errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN}


class LinkLost(PeerLost):
    """The peer of a link has disconnected, or sent data that is not a message."""

    def __init__(self, message: str, peer: str, *, silent: bool = False) -> None:
        super().__init__(message)
        self.peer = peer
        self.silent = silent  # the network stopped answering; the peer's process may still be alive


class FailureSource(Protocol):
    """Provides the failure that broke a link. `World` implements it."""

    @property
    def failure(self) -> str | None: ...

    def explain(self, error: BaseException) -> YalisFailure | None: ...


class Link:
    """One end of a connection to `peer`; used by one thread at a time in each direction.

    A send() that blocks reads incoming data meanwhile, so that two ends that send at once do not deadlock.
    `fileno()` may not be readable while complete messages are in the buffer: call `poll(0)` before waiting on it.
    """

    def __init__(
        self, sock: socket.socket, peer: str, failure_source: FailureSource | None = None, limit: int = MAX_FRAME
    ) -> None:
        """`limit`: the longest message to accept or send, in bytes."""
        self.peer, self.failure_source, self.limit = peer, failure_source, limit
        self._socket = sock
        self._buffer = bytearray()
        self._reading = threading.Lock()  # held by the thread that reads the socket
        self._lost: LinkLost | None = None
        sock.settimeout(None)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        keep_alive(sock)
        _close_in_forks(self)
        self._read_poller = select.poll()
        self._read_poller.register(sock, select.POLLIN)
        self._read_write_poller = select.poll()
        self._read_write_poller.register(sock, select.POLLIN | select.POLLOUT)

    def send(self, value: Any) -> None:
        self.send_frame(encode_frame(value))

    def send_frame(self, frame: bytes) -> None:
        """Send an encoded message; several links can send the same one."""
        if len(frame) - _HEADER.size > self.limit:
            raise ValueError(f"a message of {len(frame) - _HEADER.size} bytes exceeds the link's limit of {self.limit}")
        unsent = memoryview(frame)
        while unsent:
            try:
                unsent = unsent[self._socket.send(unsent, socket.MSG_DONTWAIT) :]
            except BlockingIOError:
                self._wait_writable()
            except OSError as error:
                raise self._explain(self._describe(error)) from error

    def receive(self) -> Any:
        """Wait for the next message and return it."""
        return self.decode(self.receive_frame())

    def receive_frame(self) -> bytes:
        """Wait for the next message and return it as it was sent, for `decode` and for `send_frame` of other links."""
        with self._reading:
            while not self._has_message():
                if self._lost:
                    raise self._explain(self._lost)
                if self._read_poller.poll(1000):
                    self._read_socket()
                else:
                    self.check_job()
            (length,) = _HEADER.unpack_from(self._buffer)
            end = _HEADER.size + length
            frame = bytes(memoryview(self._buffer)[:end])
            del self._buffer[:end]
        return frame

    def decode(self, frame: bytes) -> Any:
        """Return the value of a received message."""
        try:
            return json.loads(frame[_HEADER.size :])
        except (ValueError, RecursionError):  # RecursionError: too deeply nested
            self._lost = LinkLost(f"{self.peer} sent data that is not a message", self.peer)
            raise self._lost from None

    def poll(self, timeout: float = 0.0) -> bool:
        """Wait up to `timeout` seconds. Returns whether receive() would return or raise without blocking."""
        deadline = time.monotonic() + timeout
        with self._reading:
            while not self._has_message() and not self._lost:
                if not self._read_poller.poll(max(0.0, deadline - time.monotonic()) * 1000):
                    return False
                self._read_socket()
        return True

    def fileno(self) -> int:
        return self._socket.fileno()

    def addresses(self) -> tuple[str, str]:
        """Return the IP addresses of this end and of the peer."""
        return plain_address(self._socket.getsockname()[0]), plain_address(self._socket.getpeername()[0])

    def set_keepalive(self, seconds: float) -> None:
        """Set how long the peer's host may not answer before receive() raises LinkLost."""
        keep_alive(self._socket, seconds)

    def close(self) -> None:
        if self._socket.fileno() < 0:
            return
        self._lost = self._lost or LinkLost(f"the link to {self.peer} is closed", self.peer)
        with contextlib.suppress(OSError):  # the peer has closed first
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes a thread that blocks in receive()
        self._socket.close()

    def abandon(self) -> None:
        """Close the connection in this forked process only; the parent keeps using it."""
        self._lost = self._lost or LinkLost(f"the link to {self.peer} belongs to the parent process", self.peer)
        self._socket.close()

    def _wait_writable(self) -> None:
        """Wait until the socket accepts more data, reading meanwhile: the peer may be blocked in a send() too."""
        if not self._reading.acquire(blocking=False):  # another thread reads
            time.sleep(0.001)
            return
        try:
            events = self._read_write_poller.poll(1000)
            if not events:
                self.check_job()
            elif any(event & ~select.POLLOUT for _, event in events):
                self._read_socket()
                if self._lost:
                    raise self._explain(self._lost)
        finally:
            self._reading.release()

    def check_job(self) -> None:
        """Raise the failure that ended the job, if there is one."""
        if self.failure_source and self.failure_source.failure:  # an unreachable peer never closes the link
            raise self._explain(LinkLost(f"the job ended while waiting for {self.peer}", self.peer))

    def _has_message(self) -> bool:
        if len(self._buffer) < _HEADER.size:
            return False
        (length,) = _HEADER.unpack_from(self._buffer)
        if length > self.limit:
            self._buffer.clear()
            self._lost = LinkLost(f"{self.peer} sent data that is not a message", self.peer)
            return False
        return len(self._buffer) >= _HEADER.size + length

    def _read_socket(self) -> None:
        try:
            data = self._socket.recv(_CHUNK, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError as error:
            self._lost = self._lost or self._describe(error)
            return
        if data:
            self._buffer += data
        else:
            self._lost = self._lost or LinkLost(f"{self.peer} closed its connection", self.peer)

    def _describe(self, error: OSError) -> LinkLost:
        message = f"the connection to {self.peer} broke ({error.strerror or error})"
        return LinkLost(message, self.peer, silent=error.errno in _SILENT)

    def _explain(self, lost: LinkLost) -> YalisFailure:
        return (self.failure_source.explain(lost) if self.failure_source else None) or lost


def encode_frame(value: Any) -> bytes:
    """Return the bytes that carry a value over a link."""
    data = json.dumps(value, separators=(",", ":")).encode()
    if len(data) > MAX_FRAME:
        raise ValueError(f"a message of {len(data)} bytes exceeds the limit of {MAX_FRAME}")
    return _HEADER.pack(len(data)) + data


def wait_any(links: Sequence[Link]) -> None:
    """Wait until one of the links is readable. Buffered messages must have been received before: see `Link`."""
    poller = select.poll()
    for link in links:
        poller.register(link, select.POLLIN)
    while not poller.poll(1000):
        links[0].check_job()


_open: weakref.WeakSet[Link] | None = None


def _close_in_forks(link: Link) -> None:
    """Close the link in forked children: a copy there would keep the connection open after this rank has died."""
    global _open
    if _open is None:
        _open = weakref.WeakSet()
        os.register_at_fork(after_in_child=_close_all)
    _open.add(link)


def _close_all() -> None:
    for link in _open or ():
        link.abandon()


def keep_alive(sock: socket.socket, seconds: float | None = None) -> None:
    """Turn on TCP keepalive: the connection ends if the peer's host does not answer for so long (default: KEEPALIVE_S).

    The peer's kernel answers even while its process is busy or stopped.
    """
    seconds = KEEPALIVE_S if seconds is None else seconds
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(1, int(seconds / 3)))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(1, int(seconds / 6)))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(seconds * 1000))


def plain_address(address: str) -> str:
    """Return the address without the IPv6 prefix of a dual-stack socket and without an interface name."""
    return address.removeprefix("::ffff:").partition("%")[0]


def is_loopback(address: str) -> bool:
    return address.startswith("127.") or address in ("::1", "localhost")


def listen(address: str, port: int, backlog: int = 512) -> socket.socket:
    """Return a socket that listens on `address`; on all addresses of this host if it is empty."""
    if address:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        return socket.create_server((address, port), family=family, backlog=backlog)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, backlog=backlog, dualstack_ipv6=True)
    return socket.create_server(("", port), backlog=backlog)
