"""A small HTTP/1.1 client over asyncio for benchmarks.

It only notes when each part of an answer arrived, and leaves everything else until the answer has ended. So one core
can follow tens of thousands of events per second, where a general client would become the bottleneck.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from yalis.errors import YalisError

_MAX_HEAD = 1 << 16


class HttpError(Exception):
    """An exchange without a complete answer. `kind` is its name in the result, such as "disconnected"."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True)
class Target:
    """A server, as given by --url, and the API key for it."""

    host: str
    port: int
    tls: bool = False
    path: str = ""  # before /v1, for servers behind a reverse proxy
    api_key: str | None = field(default=None, repr=False)

    @classmethod
    def parse(cls, url: str, api_key: str | None = None) -> Target:
        """Parse http://HOST:PORT, which may end in /v1 as the base URL of OpenAI's clients does."""
        try:
            parts = urlsplit(url.strip())
            host, port = parts.hostname, parts.port
        except ValueError as error:
            raise YalisError(f"url is {url!r}: {error}; {_EXAMPLE}") from None
        if parts.scheme not in ("http", "https") or not host:
            raise YalisError(f"url is {url!r}; {_EXAMPLE}")
        if parts.query or parts.fragment or parts.username is not None:
            raise YalisError(f"url is {url!r}, with more than a host, a port and a path; {_EXAMPLE}")
        tls = parts.scheme == "https"
        path = parts.path.rstrip("/").removesuffix("/v1")
        return cls(host, port or (443 if tls else 80), tls, path, api_key)

    @property
    def is_local(self) -> bool:
        return self.host in ("127.0.0.1", "::1", "localhost")

    @property
    def address(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def origin(self) -> str:
        return f"{'https' if self.tls else 'http'}://{self.address}{self.path}"

    def encode(self, method: str, path: str, body: Any = None) -> bytes:
        """Return a whole request; `body` is sent as JSON."""
        content = b"" if body is None else json.dumps(body, separators=(",", ":")).encode()
        lines = [f"{method} {self.path}{path} HTTP/1.1", f"Host: {self.address}", "Accept: */*"]
        if body is not None:
            lines += ["Content-Type: application/json", f"Content-Length: {len(content)}"]
        if self.api_key is not None:
            lines.append(f"Authorization: Bearer {self.api_key}")
        return "\r\n".join([*lines, "", ""]).encode("latin-1") + content


_EXAMPLE = "give one such as http://127.0.0.1:8000"


@dataclass
class Answer:
    """The status and body of an answer. `parts` are the pieces of the body with the time at which each was complete."""

    status: int = 0
    parts: list[tuple[float, bytes]] = field(default_factory=list)

    @property
    def body(self) -> bytes:
        return b"".join(part for _, part in self.parts)


class Connection(asyncio.Protocol):
    """One connection, which carries one exchange at a time."""

    def __init__(self) -> None:
        self.answer = Answer()
        self.reusable = True  # the server has not said that it closes the connection
        self._transport: asyncio.Transport | None = None
        self._done: asyncio.Future[Answer] | None = None
        self._begun = False  # a byte of this answer has arrived
        self._reset()

    def _reset(self) -> None:
        self._rest = b""  # bytes that are not a complete piece yet
        self._in_head = True
        self._chunked = False
        self._remaining: int | None = None  # bytes of a body that is not chunked; None: until the connection closes

    async def exchange(self, request: bytes, timeout: float) -> Answer:
        """Send a request and return the whole answer. Raises HttpError, after which the connection is closed."""
        assert self._transport is not None
        self._reset()
        self.answer, self._begun = Answer(), False
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        try:
            return await asyncio.wait_for(self._done, timeout)
        except asyncio.TimeoutError:
            raise HttpError("timeout", f"no complete answer within {timeout:g} s") from None
        finally:
            if not self._done.done() or self._done.cancelled() or self._done.exception() is not None:
                self.close()

    @property
    def unanswered(self) -> bool:
        """Whether no byte of an answer has arrived, as on a connection that the server closed while it was idle."""
        return not self._begun

    @property
    def usable(self) -> bool:
        return self.reusable and self._transport is not None and not self._transport.is_closing()

    def close(self) -> None:
        self.reusable = False
        if self._transport is not None:
            self._transport.close()

    # Called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self.reusable = False
        if self._done is None or self._done.done():
            return
        if not self._in_head and not self._chunked and self._remaining is None:
            self._done.set_result(self.answer)  # the end of the connection is the end of this body
        else:
            self._fail("disconnected", "the server closed the connection before its answer was complete")

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        self._begun = True
        if self._done is None or self._done.done():
            self.close()  # bytes after the end of an answer
            return
        try:
            if self._in_head:
                data = self._read_head(self._rest + data)
                if self._in_head:
                    return
            if self._chunked:
                self._read_chunks(data, now)
            else:
                self._read_plain(data, now)
        except ValueError as error:
            self._fail("not HTTP", f"the answer is not valid HTTP/1.1: {error}")
            self.close()

    def _read_head(self, data: bytes) -> bytes:
        """Parse the head once it is complete, and return what follows it."""
        end = data.find(b"\r\n\r\n")
        if end < 0:
            if len(data) > _MAX_HEAD or not b"HTTP/1.".startswith(data[:7]):
                raise ValueError("it does not begin with a status line and headers")
            self._rest = data
            return b""
        status, *lines = data[:end].decode("latin-1").split("\r\n")
        protocol, _, code = status.partition(" ")
        if not protocol.startswith("HTTP/1."):
            raise ValueError(f"it begins with {status[:40]!r}")
        self.answer.status = int(code[:3])
        headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        if headers.get("connection", "").lower() == "close":
            self.reusable = False
        self._chunked = headers.get("transfer-encoding", "").lower() == "chunked"
        if not self._chunked and "content-length" in headers:
            self._remaining = int(headers["content-length"])
        self._in_head, self._rest = False, b""
        return data[end + 4 :]

    def _read_chunks(self, data: bytes, now: float) -> None:
        buffer = self._rest + data if self._rest else data
        position, parts = 0, self.answer.parts
        while (end := buffer.find(b"\r\n", position)) >= 0:
            size = int(buffer[position:end].partition(b";")[0], 16)
            begin = end + 2
            if size == 0:
                if buffer.startswith(b"\r\n", begin) or buffer.find(b"\r\n\r\n", begin) >= 0:  # trailers or none
                    self._finish()
                    return
                break
            if len(buffer) < begin + size + 2:
                break
            parts.append((now, buffer[begin : begin + size]))
            position = begin + size + 2
        self._rest = buffer[position:]

    def _read_plain(self, data: bytes, now: float) -> None:
        if data:
            self.answer.parts.append((now, data))
        if self._remaining is not None:
            self._remaining -= len(data)
            if self._remaining <= 0:
                self._finish()

    def _finish(self) -> None:
        assert self._done is not None
        self._done.set_result(self.answer)

    def _fail(self, kind: str, message: str) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(HttpError(kind, message))


class Client:
    """Keeps connections to a server for reuse. Leave the `async with` block to close them."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self._idle: list[Connection] = []
        self._ssl = ssl.create_default_context() if target.tls else None

    async def send(self, request: bytes, timeout: float) -> Answer:
        """Send an encoded request and return the answer; raises HttpError."""
        while self._idle:
            connection = self._idle.pop()
            if not connection.usable:
                continue
            try:
                return await self._exchange(connection, request, timeout)
            except HttpError as error:
                if error.kind != "disconnected" or not connection.unanswered:
                    raise
                # The server closed it while it was idle. The request was not processed, so send it again.
        return await self._exchange(await self._connect(timeout), request, timeout)

    async def _exchange(self, connection: Connection, request: bytes, timeout: float) -> Answer:
        answer = await connection.exchange(request, timeout)
        if connection.usable:
            self._idle.append(connection)
        else:
            connection.close()
        return answer

    async def _connect(self, timeout: float) -> Connection:
        loop, target = asyncio.get_running_loop(), self.target
        try:
            opening = loop.create_connection(Connection, target.host, target.port, ssl=self._ssl)
            return (await asyncio.wait_for(opening, timeout))[1]
        except ssl.SSLError as error:
            raise HttpError("TLS", f"TLS failed: {error.reason or error}") from None
        except asyncio.TimeoutError:
            raise HttpError("timeout", f"no connection within {timeout:g} s") from None
        except OSError as error:
            raise HttpError("refused", _explain(error)) from None

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()


def _explain(error: OSError) -> str:
    if isinstance(error, ConnectionRefusedError):
        return "connection refused"
    return error.strerror or str(error)
