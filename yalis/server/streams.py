"""Responses that follow a client: server-sent events, and work that ends when the client disconnects."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from yalis.server.errors import ClientDisconnected, as_api_error

_Result = TypeVar("_Result")
_Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[_Message]]
Send = Callable[[_Message], Awaitable[None]]

DONE = b"data: [DONE]\n\n"


def event(content: Any) -> bytes:
    """Return a server-sent event with this JSON."""
    return b"data: %s\n\n" % json.dumps(content).encode("ascii")


async def until_disconnect(request: Request, work: Awaitable[_Result]) -> _Result:
    """Return the result of `work`, or cancel it and raise ClientDisconnected when the client disconnects.

    The body of the request must have been read.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(wait_disconnected(request.receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnected
        return task.result()
    finally:
        gone.cancel()
        if not task.done():
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task


async def wait_disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Sends what `chunks` yields as it comes, until the client disconnects. Calls `close` in any case.

    An error in `chunks` becomes the last event, because the status has been sent already.
    """

    media_type = "text/event-stream"

    def __init__(self, chunks: AsyncIterator[bytes], close: Callable[[], None]) -> None:
        super().__init__()
        del self.headers["content-length"]
        self.headers["cache-control"] = "no-cache"
        self.headers["x-accel-buffering"] = "no"  # nginx would collect the events
        self._chunks, self._close = chunks, close

    async def __call__(self, scope: _Message, receive: Receive, send: Send) -> None:
        tasks: list[asyncio.Future[None]] = []
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            tasks = [asyncio.ensure_future(self._send(send)), asyncio.ensure_future(wait_disconnected(receive))]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._close()

    async def _send(self, send: Send) -> None:
        try:
            async for chunk in self._chunks:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        except Exception as error:
            await send({"type": "http.response.body", "body": event(as_api_error(error).body()), "more_body": True})
        await send({"type": "http.response.body", "body": DONE, "more_body": False})
