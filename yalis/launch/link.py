"""Messages between two ranks: framed JSON over TCP."""

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

from yalis.errors import YalisFailure

MAX_FRAME = 256 << 20
SILENCE_S = 60  # a network or machine that has said nothing for so long is gone
_HEADER = struct.Struct(">I")
_CHUNK = 1 << 18
_SILENT = {errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN}


class LinkLost(YalisFailure):
    """The other end of a link is gone, or talks something else."""

    def __init__(self, sentence: str, peer: str, *, silent: bool = False) -> None:
        super().__init__(sentence)
        self.peer = peer
        self.silent = silent  # the network went quiet, so nobody knows whether the other process lives


class Guard(Protocol):
    """Who knows why a link broke."""

    @property
    def failure(self) -> str | None: ...

    def explain(self, error: BaseException) -> YalisFailure | None: ...


class Link:
    """One end of a connection to `peer`; used by one thread at a time in each direction.

    A send() that has to wait takes in what arrives meanwhile, so two ends that send at once do not wait for each other.
    `fileno()` may be quiet while whole messages wait in the buffer: ask `poll(0)` before waiting for it.
    """

    def __init__(self, sock: socket.socket, peer: str, guard: Guard | None = None, limit: int = MAX_FRAME) -> None:
        self.peer, self.guard, self.limit = peer, guard, limit
        self._socket = sock
        self._buffer = bytearray()
        self._reading = threading.Lock()  # held by whoever takes in what arrives
        self._lost: LinkLost | None = None
        sock.settimeout(None)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        keep_alive(sock)
        _close_in_forks(self)
        self._poller = select.poll()
        self._poller.register(sock, select.POLLIN)
        self._both = select.poll()
        self._both.register(sock, select.POLLIN | select.POLLOUT)

    def send(self, value: Any) -> None:
        data = json.dumps(value, separators=(",", ":")).encode()
        if len(data) > self.limit:
            raise ValueError(f"a message of {len(data)} bytes is longer than a link's {self.limit}")
        left = memoryview(_HEADER.pack(len(data)) + data)
        while left:
            try:
                left = left[self._socket.send(left, socket.MSG_DONTWAIT) :]
            except BlockingIOError:
                self._await_room()
            except OSError as error:
                raise self._reason(self._describe(error)) from error

    def receive(self) -> Any:
        """The next message; waits for it."""
        with self._reading:
            while not self._complete():
                if self._lost:
                    raise self._reason(self._lost)
                if self._poller.poll(1000):
                    self._pull()
                else:
                    self.check_job()
            (length,) = _HEADER.unpack_from(self._buffer)
            end = _HEADER.size + length
            data = bytes(memoryview(self._buffer)[_HEADER.size : end])
            del self._buffer[:end]
        try:
            return json.loads(data)
        except ValueError:
            self._lost = LinkLost(f"{self.peer} sent something that is not a message", self.peer)
            raise self._lost from None

    def poll(self, timeout: float = 0.0) -> bool:
        """Whether receive() returns (or raises) without waiting, within `timeout` seconds."""
        deadline = time.monotonic() + timeout
        with self._reading:
            while not self._complete() and not self._lost:
                if not self._poller.poll(max(0.0, deadline - time.monotonic()) * 1000):
                    return False
                self._pull()
        return True

    def fileno(self) -> int:
        return self._socket.fileno()

    def addresses(self) -> tuple[str, str]:
        """The IPs of this end and of the other."""
        return plain_address(self._socket.getsockname()[0]), plain_address(self._socket.getpeername()[0])

    def close(self) -> None:
        if self._socket.fileno() < 0:
            return
        self._lost = self._lost or LinkLost(f"the link to {self.peer} is closed", self.peer)
        with contextlib.suppress(OSError):  # the other end went first
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes a thread that waits in receive()
        self._socket.close()

    def abandon(self) -> None:
        """Let go of the connection in this process only; a fork's parent keeps it."""
        self._lost = self._lost or LinkLost(f"the link to {self.peer} is another process's", self.peer)
        self._socket.close()

    def _await_room(self) -> None:
        """Wait until the other end takes more, and take what it sends: it may be waiting for the same."""
        if not self._reading.acquire(blocking=False):  # another thread takes it in
            time.sleep(0.001)
            return
        try:
            events = self._both.poll(1000)
            if not events:
                self.check_job()
            elif any(event & ~select.POLLOUT for _, event in events):
                self._pull()
                if self._lost:
                    raise self._reason(self._lost)
        finally:
            self._reading.release()

    def check_job(self) -> None:
        """Raise what ended the job, if something did."""
        if self.guard and self.guard.failure:  # the peer may live in a network that does not
            raise self._reason(LinkLost(f"the job ended while {self.peer} was awaited", self.peer))

    def _complete(self) -> bool:
        if len(self._buffer) < _HEADER.size:
            return False
        (length,) = _HEADER.unpack_from(self._buffer)
        if length > self.limit:
            self._buffer.clear()
            self._lost = LinkLost(f"{self.peer} sent something that is not a message", self.peer)
            return False
        return len(self._buffer) >= _HEADER.size + length

    def _pull(self) -> None:
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
        sentence = f"the connection to {self.peer} broke ({error.strerror or error})"
        return LinkLost(sentence, self.peer, silent=error.errno in _SILENT)

    def _reason(self, lost: LinkLost) -> YalisFailure:
        return (self.guard.explain(lost) if self.guard else None) or lost


def wait_any(links: Sequence[Link]) -> None:
    """Until one of them has something to read. Whole messages must have been received before: see Link.fileno."""
    poller = select.poll()
    for link in links:
        poller.register(link, select.POLLIN)
    while not poller.poll(1000):
        links[0].check_job()


_open: weakref.WeakSet[Link] | None = None


def _close_in_forks(link: Link) -> None:
    """A forked child that held a copy of a rank's connections would keep the rank alive in the others' eyes."""
    global _open
    if _open is None:
        _open = weakref.WeakSet()
        os.register_at_fork(after_in_child=_close_all)
    _open.add(link)


def _close_all() -> None:
    for link in _open or ():
        link.abandon()


def keep_alive(sock: socket.socket) -> None:
    """Have the kernel ask after a quiet peer; the peer's kernel answers even while its process is busy or stopped."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, SILENCE_S // 3)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, SILENCE_S // 6)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENCE_S * 1000)


def plain_address(address: str) -> str:
    """Without what a dual-stack socket adds to an IPv4 address, and without an interface's name."""
    return address.removeprefix("::ffff:").partition("%")[0]


def listen(address: str, port: int, backlog: int = 512) -> socket.socket:
    """A socket that accepts on `address`, or on all of this host's where that is empty."""
    if address:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        return socket.create_server((address, port), family=family, backlog=backlog)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, backlog=backlog, dualstack_ipv6=True)
    return socket.create_server(("", port), backlog=backlog)
