"""Accepts connections of ranks: a connection becomes a `Link` after its handshake.

Unauthenticated connections cannot exhaust this process. At most 128 are open: beyond that, a new one replaces a random
one, and each is closed after ten seconds. A rank whose connection is closed connects again. Because the choice is
random, and data that has arrived is read before new connections are accepted, a rank succeeds after a few attempts even
while another process opens connections as fast as it can.
"""

from __future__ import annotations

import contextlib
import errno
import random
import resource
import selectors
import socket
import time
from collections.abc import Callable

from yalis.errors import YalisFailure
from yalis.launch.auth import HANDSHAKE_S, HandshakeError, JobKey, MethodMismatch, Responder
from yalis.launch.link import Link, plain_address
from yalis.log import get_logger

MAX_UNAUTHENTICATED = 128
_DESCRIPTORS_PER_RANK = 8  # two channels, and links and connections of the engine and the communication backends
_OTHER_DESCRIPTORS = 256
_ACCEPTS = 16  # connections to accept before open ones are read again
_NO_DESCRIPTORS = {errno.EMFILE, errno.ENFILE}


class _Unauthenticated:
    """A connection whose handshake is not complete."""

    def __init__(self, responder: Responder, address: str, expires: float) -> None:
        self.responder, self.address, self.expires = responder, address, expires
        self.buffer = b""


def reserve_descriptors(ranks: int) -> None:
    """Raise the soft limit on open files, up to the hard limit, for connections of this many other ranks."""
    needed = MAX_UNAUTHENTICATED + _DESCRIPTORS_PER_RANK * ranks + _OTHER_DESCRIPTORS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < needed:
        limit = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


class Acceptor:
    """Listens on `server` and passes each authenticated connection to `accepted`. Owns the server socket."""

    def __init__(self, server: socket.socket, key: JobKey, purpose: bytes, accepted: Callable[[Link], None]) -> None:
        self.server = server
        self.refusal = ""  # why the last connection was refused; contains no data sent by the peer
        self._key, self._purpose, self._accepted = key, purpose, accepted
        self._open: dict[socket.socket, _Unauthenticated] = {}
        self._selector = selectors.DefaultSelector()
        server.setblocking(False)
        self._selector.register(server, selectors.EVENT_READ, self._accept)

    def watch(self, link: Link, readable: Callable[[Link], None]) -> None:
        """Call `readable` in run_once() whenever this link can be read."""
        self._selector.register(link, selectors.EVENT_READ, readable)

    def unwatch(self, link: Link) -> None:
        self._selector.unregister(link)

    def run_once(self, timeout: float) -> None:
        """Wait up to `timeout` seconds for events and handle them."""
        events = sorted(self._selector.select(timeout), key=lambda event: event[0].fileobj is self.server)
        for key, _ in events:  # new connections last, because they may replace those that can be read
            # An earlier event may have closed this connection, and a new one may have its descriptor.
            if self._selector.get_map().get(key.fd) is key:
                key.data(key.fileobj)
        now = time.monotonic()
        for sock in [sock for sock, state in self._open.items() if state.expires < now]:
            self._drop(sock, "did not authenticate itself")

    def close(self) -> None:
        for sock in list(self._open):
            self._drop(sock)
        self._selector.close()
        self.server.close()

    def _accept(self, server: socket.socket) -> None:
        for _ in range(_ACCEPTS):
            try:
                sock, address = server.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno not in _NO_DESCRIPTORS:
                    return  # the peer has disconnected already
                if not self._open:
                    raise YalisFailure(
                        "this process has no file descriptor left for the connections of other ranks; raise the limit "
                        "with `ulimit -n`"
                    ) from error
                for _ in range((len(self._open) + 1) // 2):
                    self._drop_random()
                continue
            if len(self._open) >= MAX_UNAUTHENTICATED:
                self._drop_random()
            sock.setblocking(False)
            responder = Responder(self._key, self._purpose, sock)
            self._open[sock] = _Unauthenticated(responder, plain_address(address[0]), time.monotonic() + HANDSHAKE_S)
            self._selector.register(sock, selectors.EVENT_READ, self._read)

    def _read(self, sock: socket.socket) -> None:
        state = self._open[sock]
        try:
            # Not more than the frame: data after the last frame belongs to the link.
            data = sock.recv(state.responder.frame_size - len(state.buffer))
            if not data:
                self._drop(sock)
                return
            state.buffer += data
            if len(state.buffer) < state.responder.frame_size:
                return
            frame, state.buffer = state.buffer, b""
            answer = state.responder.receive(frame)
            if answer and sock.send(answer) < len(answer):
                raise HandshakeError("does not read")
        except BlockingIOError:
            return
        except MethodMismatch as error:
            _send_last(sock, error.reply)
            self._drop(sock, str(error))
        except HandshakeError as error:
            self._drop(sock, str(error))
        except OSError:
            self._drop(sock)
        except Exception:  # an unauthenticated peer must not end the job
            get_logger(__name__).exception("a connection from %s was closed after an unexpected error", state.address)
            self._drop(sock)
        else:
            if state.responder.done:
                self._selector.unregister(sock)
                del self._open[sock]
                self._accepted(Link(sock, state.address))

    def _drop_random(self) -> None:
        self._drop(random.choice(list(self._open)), "is one of too many that have not authenticated themselves")

    def _drop(self, sock: socket.socket, reason: str = "") -> None:
        state = self._open.pop(sock)
        if reason:
            self.refusal = f"a process at {state.address} {reason}"
        self._selector.unregister(sock)
        sock.close()


def _send_last(sock: socket.socket, data: bytes) -> None:
    """Send data before the connection is closed. Reads first: closing with unread input would discard the data."""
    with contextlib.suppress(OSError):
        sock.recv(1 << 12)
    with contextlib.suppress(OSError):
        sock.send(data)
