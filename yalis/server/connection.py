"""HTTP connections with time limits: for the headers, for the body, and for a client that stops reading a response."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterable
from typing import Any

from httptools import HttpParserUpgrade, HttpRequestParser
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

MAX_HEADERS = 64 << 10  # bytes
_UPGRADE_HEADERS = (b"connection", b"upgrade", b"http2-settings")
MAX_PIPELINED = 32  # requests of a connection that are not answered


class Connection(HttpToolsProtocol):
    """uvicorn's connection, which also records since when the server waits for the client."""

    def __init__(self, *arguments: Any, max_connections: int, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._max_connections = max_connections

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._reading_since: float | None = time.monotonic()  # while a request is incomplete, or none has begun
        self._writing_since: float | None = None  # while the client does not read what was sent
        self._header_bytes = 0  # received of headers that are not complete
        self._cycles: list[RequestResponseCycle] = []  # of requests that are not answered; several if pipelined
        self._after_upgrade: int | None = (
            None  # where the rest of the data begins, after a request for another protocol
        )
        super().connection_made(transport)
        if len(self.connections) > self._max_connections:
            self._make_room()

    def _make_room(self) -> None:
        """Close the connection that has waited longest for a request; this one if all others have requests."""
        others = [one for one in self.connections if isinstance(one, Connection) and one is not self and one.is_idle]
        (min(others, key=lambda one: one._reading_since or 0.0) if others else self).transport.abort()

    @property
    def is_idle(self) -> bool:
        """Whether no complete request waits for its answer."""
        return all(cycle.response_complete for cycle in self._cycles) and not self.transport.is_closing()

    def connection_lost(self, exc: Exception | None) -> None:
        for cycle in self._cycles:  # uvicorn tells only the last one
            cycle.disconnected = cycle.disconnected or not cycle.response_complete
            cycle.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._reading_since is None:
            self._reading_since = time.monotonic()
        self._header_bytes += len(data)
        super().data_received(data)
        if self._after_upgrade is not None:
            self._refuse_upgrade(data[self._after_upgrade :])
        if self._header_bytes > MAX_HEADERS and self.parser is not None:
            self.send_400_response("The headers are too large.")

    def _unsupported_upgrade_warning(self) -> None:
        """Called by uvicorn while it handles the exception of the parser."""
        error = sys.exc_info()[1]
        assert isinstance(error, HttpParserUpgrade)
        self._after_upgrade = error.args[0]

    def _refuse_upgrade(self, rest: bytes) -> None:
        """Read a request that asks for another protocol as one that does not, as HTTP allows.

        The parser takes what follows its headers for the other protocol. Clients ask for HTTP/2 in this way: that of
        Java does by default, and `curl --http2`.
        """
        self._after_upgrade = None
        method, version = self.parser.get_method(), self.parser.get_http_version().encode()
        if method == b"CONNECT":
            self.send_400_response("CONNECT is not supported.")
            return
        headers = [(name, value) for name, value in self.headers if name not in _UPGRADE_HEADERS]
        lines = [b"%s %s HTTP/%s" % (method, self.url, version), *(b"%s: %s" % header for header in headers)]
        self.parser = HttpRequestParser(self)
        super().data_received(b"\r\n".join([*lines, b"", rest]))

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep a header. Those after a chunked body (trailers) are dropped: they must not replace what was checked."""
        if self._header_bytes >= 0:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._cycles = [cycle for cycle in self._cycles if not cycle.response_complete]
        if len(self._cycles) >= MAX_PIPELINED:
            raise ValueError("too many pipelined requests")  # the parser stops, and the connection is closed with 400
        self._reading_since = time.monotonic()  # the body has its own time
        self._header_bytes = -sys.maxsize
        super().on_headers_complete()
        self._cycles.append(self.cycle)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._reading_since = None
        self._header_bytes = 0
        super().on_message_complete()

    def pause_writing(self) -> None:
        self._writing_since = time.monotonic()
        super().pause_writing()

    def resume_writing(self) -> None:
        self._writing_since = None
        super().resume_writing()

    def abort_if_slow(self, limit: float) -> None:
        """Close the connection if the client has kept the server waiting for more than `limit` seconds."""
        now = time.monotonic()
        if any(since is not None and now - since > limit for since in (self._reading_since, self._writing_since)):
            self.transport.abort()


async def abort_slow_connections(connections: Iterable[Any], limit: float) -> None:
    """Check all connections, again and again."""
    while True:
        await asyncio.sleep(limit / 4)
        for connection in list(connections):
            connection.abort_if_slow(limit)
