"""The clients of the server's soak test: patient ones, ones that leave, ones that stall, and one that is stopped.

python -m tests.soak.serve_load PORT JSON COUNT    # a client that sends requests, never reads and stops itself
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from random import Random

from tests.soak.serve_requests import Exchange, Spec, find_problem

#: Kinds of clients, with their weights.
KINDS = {"stream": 45, "whole": 25, "leave": 12, "abort": 8, "half": 5, "stall": 5}

_RETRY_SECONDS = 0.1  # the longest pause of a client that was refused


class ServeLoad:
    """Sends requests from `workers` clients at a time. `counts` has what happened, `problems` what was wrong."""

    def __init__(self, port: int, specs: Sequence[Spec], seed: int, workers: int) -> None:
        self.counts: Counter[str] = Counter()
        self.problems: list[str] = []
        self._port, self._specs, self._workers, self._rng = port, specs, workers, Random(seed)

    async def run(self, requests: int) -> None:
        """Send this many requests, and return when every client has ended."""
        numbers = iter(range(requests))
        await asyncio.gather(*(self._work(numbers, Random(self._rng.random())) for _ in range(self._workers)))

    async def _work(self, numbers: Iterator[int], rng: Random) -> None:
        for _ in numbers:
            if self.problems:
                return
            (kind,) = rng.choices(list(KINDS), list(KINDS.values()))
            self.counts[kind] += 1
            try:
                await asyncio.wait_for(self._send(kind, rng.choice(self._specs), rng), 120)
            except (OSError, EOFError, ValueError, KeyError, asyncio.TimeoutError) as error:
                self.problems.append(f"{kind}: {type(error).__name__}: {error}")

    async def _send(self, kind: str, spec: Spec, rng: Random) -> None:
        exchange = Exchange(self._port, spec.body(stream=kind in ("stream", "leave", "stall")))
        await exchange.open(share=rng.random() if kind == "half" else 1.0)
        try:
            if kind in ("half", "abort"):
                await asyncio.sleep(rng.choice((0.0, 0.002, 0.02)))
                exchange.abort()
                return
            if kind == "stall":
                await asyncio.sleep(rng.choice((0.1, 0.5)))
            answer = await exchange.read(rng.randrange(1, 6) if kind == "leave" else None)
            if kind == "leave" and rng.random() < 0.5:
                exchange.abort()
        finally:
            exchange.close()
        if answer.status == 429:
            await asyncio.sleep(rng.random() * _RETRY_SECONDS)
        self.counts["refused with 429" if answer.status == 429 else "complete" if answer.complete else "left"] += 1
        self.counts["tokens compared"] += len(answer.tokens)
        if problem := find_problem(answer, spec):
            self.problems.append(f"{kind}: {problem}")
        elif answer.status == 200 and not answer.complete and kind != "leave":
            self.problems.append(f"{kind}: the stream ended early, after {len(answer.tokens)} tokens")


def start_stopped_client(port: int, body: dict[str, object], count: int) -> subprocess.Popen[bytes]:
    """Start a process that sends `count` streamed requests and is stopped, as by Ctrl-Z; the caller kills it."""
    argv = [sys.executable, "-m", "tests.soak.serve_load", str(port), json.dumps(body), str(count)]
    process = subprocess.Popen(argv)
    _, status = os.waitpid(process.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status), status
    return process


def _stop_after_sending(port: int, body: dict[str, object], count: int) -> None:
    content = json.dumps({**body, "stream": True}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: "
    held = []
    for _ in range(count):
        held.append(socket.socket())
        held[-1].setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)  # so that the server cannot send everything
        held[-1].connect(("127.0.0.1", port))
        held[-1].sendall(head.encode() + b"%d\r\n\r\n%s" % (len(content), content))
    os.kill(os.getpid(), signal.SIGSTOP)


if __name__ == "__main__":
    _stop_after_sending(int(sys.argv[1]), json.loads(sys.argv[2]), int(sys.argv[3]))
