"""Measures how many events per second this client can follow, against a server that only sends them.

python -m yalis.study.serve.ceiling RATE    # that server: prints its port and sends RATE events per second and stream
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys

from yalis.study.serve.http import Client, Target
from yalis.study.serve.load import EncodedRequest, run_load

STREAMS, EVENTS_PER_SECOND, SECONDS = 64, 250, 0.6
_EVENT = {"id": "cmpl-0", "object": "text_completion", "created": 0, "model": "none"}
_TOKEN = {**_EVENT, "choices": [{"index": 0, "text": " word", "logprobs": None, "finish_reason": None}]}


def measure_ceiling() -> float:
    """Return the output tokens per second that would keep one core busy in this client.

    It follows 64 streams of 250 tokens per second, an event each, and scales the processor time that this takes.
    """
    command = [sys.executable, "-m", "yalis.study.serve.ceiling", str(EVENTS_PER_SECOND)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            return asyncio.run(_follow(Target("127.0.0.1", int(server.stdout.readline()))))
        finally:
            server.terminate()


async def _follow(target: Target) -> float:
    tokens = int(EVENTS_PER_SECOND * SECONDS)
    content = target.encode("POST", "/v1/completions", {"max_tokens": tokens})
    async with Client(target) as client:
        load = await run_load(client, [EncodedRequest(content, tokens)] * STREAMS, STREAMS, 60.0, lambda text: None)
    assert all(one.ok for one in load.completions), load.completions[0].message
    return STREAMS * tokens / load.seconds / load.client_cpu


def _chunk(data: str) -> bytes:
    event = f"data: {data}\n\n".encode()
    return b"%x\r\n%s\r\n" % (len(event), event)


class _Sender(asyncio.Protocol):
    """Answers any request whose body has max_tokens with that many events."""

    def __init__(self, rate: float) -> None:
        self._rate, self._received = rate, b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._received += data
        _, found, body = self._received.partition(b"\r\n\r\n")
        if found and body.endswith(b"}"):
            self._received = b""
            self._left = self._tokens = int(json.loads(body)["max_tokens"])
            head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
            self._transport.write(head)
            self._loop = asyncio.get_running_loop()
            self._next = self._loop.time()
            self._send()

    def _send(self) -> None:
        if self._transport.is_closing():
            return
        if self._left:
            self._left -= 1
            self._transport.write(_TOKEN_CHUNK)
            self._next += 1 / self._rate
            self._loop.call_at(self._next, self._send)
            return
        usage = {"prompt_tokens": 0, "completion_tokens": self._tokens}
        last = json.dumps({**_EVENT, "choices": [], "usage": usage})
        self._transport.write(_chunk(last) + _chunk("[DONE]") + b"0\r\n\r\n")


_TOKEN_CHUNK = _chunk(json.dumps(_TOKEN))


async def _serve(rate: float) -> None:
    server = await asyncio.get_running_loop().create_server(lambda: _Sender(rate), "127.0.0.1", 0)
    sys.stdout.write(f"{server.sockets[0].getsockname()[1]}\n")  # for the process that started this one
    sys.stdout.flush()
    # It also ends with that process, whose end of the pipe is closed then.
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(_serve(float(sys.argv[1])))
