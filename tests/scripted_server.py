"""A small HTTP server whose answers a test writes byte by byte: what a real server sends only by accident."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Union

#: Bytes to send, seconds to wait, or None to close the connection.
Step = Union[bytes, float, None]
MODELS = {"object": "list", "data": [{"id": "tiny", "object": "model", "owned_by": "test"}]}


@dataclass(frozen=True)
class Received:
    """A request as it arrived."""

    method: str
    path: str
    headers: dict[str, str]
    body: Any
    connection: int


class ScriptedServer:
    """Answers every request with the steps that `script` returns for it. Runs in a thread of its own."""

    def __init__(self, script: Callable[[Received], Iterable[Step]]) -> None:
        self._script, self._connections = script, 0
        self.received: list[Received] = []
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._serve(),), daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> ScriptedServer:
        self._thread.start()
        assert self._ready.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)

    async def _serve(self) -> None:
        self._stop = asyncio.Event()
        server = await asyncio.start_server(self._connection, "127.0.0.1", 0, backlog=256)
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        await self._stop.wait()
        server.close()
        for task in asyncio.all_tasks():
            if task is not asyncio.current_task():
                task.cancel()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections += 1
        number = self._connections
        try:
            while True:
                request = await self._read(reader, number)
                self.received.append(request)
                for step in self._script(request):
                    if step is None:
                        return
                    if isinstance(step, bytes):
                        writer.write(step)
                        await writer.drain()
                    else:
                        await asyncio.sleep(step)
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    async def _read(self, reader: asyncio.StreamReader, connection: int) -> Received:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        method, path, _ = head[0].split()
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:] if line)}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        return Received(method, path, headers, json.loads(body) if body else None, connection)


def answer(status: int, body: Any, **headers: str) -> bytes:
    """Return a whole answer with a JSON body."""
    content = json.dumps(body).encode()
    lines = [f"HTTP/1.1 {status} X", f"Content-Length: {len(content)}", *(f"{k}: {v}" for k, v in headers.items())]
    return "\r\n".join([*lines, "", ""]).encode() + content


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"


def chunk(content: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(content), content)


def event(data: Any) -> bytes:
    """Return a server-sent event."""
    return b"data: %s\n\n" % (data if isinstance(data, bytes) else json.dumps(data).encode())


def token(text: str = "x", end: str | None = None) -> bytes:
    return event({"choices": [{"index": 0, "text": text, "finish_reason": end}]})


def usage(prompt: int, output: int, cached: int = 0) -> bytes:
    details = {"prompt_tokens_details": {"cached_tokens": cached}}
    return event({"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": output, **details}})


def stream(events: Sequence[bytes], seconds: float = 0.0, first: float = 0.0) -> list[Step]:
    """Return a streamed answer: a wait before the first event and between all others, then [DONE]."""
    steps: list[Step] = [HEAD, first]
    for number, one in enumerate(events):
        steps += [seconds if number else 0.0, chunk(one)]
    return [*steps, chunk(event(b"[DONE]")), END]
