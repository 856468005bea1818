"""Sends requests to a server, either at given times (open loop) or a fixed number at a time (closed loop)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from yalis.study.serve.http import Client, HttpError
from yalis.study.serve.stream import Completion, read_stream

Report = Callable[[str], None]
_REPORT_SECONDS = 0.1


@dataclass(frozen=True)
class EncodedRequest:
    """A request, encoded before the load begins."""

    content: bytes
    output_tokens: int
    arrival: float = 0.0  # seconds from the start; ignored in a closed loop


@dataclass(frozen=True)
class Load:
    """What one load did. `seconds` are from the first arrival to the end of the last answer."""

    completions: list[Completion]
    seconds: float
    most_in_flight: int
    client_cpu: float  # share of one core that this process used


class _Run:
    def __init__(self, client: Client, timeout: float, report: Report, total: int) -> None:
        self._client, self._timeout, self._report, self._total = client, timeout, report, total
        self.completions: list[Completion] = []
        self._in_flight = self.most_in_flight = 0

    async def send(self, request: EncodedRequest, arrival: float) -> None:
        self._in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self._in_flight)
        try:
            answer = await self._client.send(request.content, self._timeout)
            completion = read_stream(answer, request.output_tokens)
        except HttpError as error:
            completion = Completion(error.kind, message=str(error))
        finally:
            self._in_flight -= 1
        completion.arrival = arrival
        completion.ended = completion.ended or time.perf_counter()
        self.completions.append(completion)

    async def follow(self) -> None:
        """Report progress until cancelled."""
        while True:
            failed = sum(not one.ok for one in self.completions)
            text = f"{len(self.completions)} of {self._total} requests, {self._in_flight} in flight"
            self._report(f"{text}, {failed} failed" if failed else text)
            await asyncio.sleep(_REPORT_SECONDS)


async def run_load(
    client: Client, requests: Sequence[EncodedRequest], concurrency: int | None, timeout: float, report: Report
) -> Load:
    """Run the requests: `concurrency` at a time, or each at its arrival time if that is None."""
    run = _Run(client, timeout, report, len(requests))
    progress = asyncio.ensure_future(run.follow())
    cpu, start = time.process_time(), time.perf_counter()
    try:
        if concurrency is None:
            await _run_open(run, requests, start)
        else:
            await _run_closed(run, requests, concurrency)
    finally:
        progress.cancel()
    wall = time.perf_counter() - start
    seconds = max(one.ended for one in run.completions) - min(one.arrival for one in run.completions)
    return Load(run.completions, seconds, run.most_in_flight, (time.process_time() - cpu) / wall)


async def _run_open(run: _Run, requests: Sequence[EncodedRequest], start: float) -> None:
    """Latencies count from the arrival time, also where this process is late."""
    tasks = []
    for request in requests:
        due = start + request.arrival
        if (wait := due - time.perf_counter()) > 0:
            await asyncio.sleep(wait)
        tasks.append(asyncio.ensure_future(run.send(request, due)))
    await asyncio.gather(*tasks)


async def _run_closed(run: _Run, requests: Sequence[EncodedRequest], concurrency: int) -> None:
    waiting: Iterator[EncodedRequest] = iter(requests)

    async def worker() -> None:
        for request in waiting:
            await run.send(request, time.perf_counter())

    await asyncio.gather(*(worker() for _ in range(min(concurrency, len(requests)))))
