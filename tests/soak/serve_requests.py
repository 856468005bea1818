"""The requests of the server's soak test, and the tokens that offline generation returns for each of them."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from random import Random
from typing import Any

from yalis import LLM, SamplingParams


@dataclass(frozen=True)
class Spec:
    """A request for /v1/completions. `expected` are the tokens of LLM.generate()."""

    prompt: list[int]
    sampling: dict[str, Any]
    expected: list[int] = field(compare=False)

    def body(self, stream: bool) -> dict[str, Any]:
        return {"prompt": self.prompt, **self.sampling, "stream": stream, "return_token_ids": True}


def make_specs(llm: LLM, count: int, seed: int) -> list[Spec]:
    """Return requests of mixed lengths: greedy and seeded, short and long, some with penalties or stop tokens."""
    rng = Random(seed)
    vocabulary = llm.spec.vocab_size
    prompts, samplings = [], []
    for index in range(count):
        length = rng.choice((1, 3, 17, 40, 90, 200))
        prompts.append([rng.randrange(vocabulary) for _ in range(length)])
        sampling: dict[str, Any] = {"max_tokens": rng.choice((1, 4, 16, 48)), "temperature": 0.0, "ignore_eos": True}
        if index % 2:
            sampling |= {"temperature": 0.8, "seed": rng.randrange(1000), "top_p": rng.choice((1.0, 0.9))}
        if index % 5 == 0:
            sampling |= {"repetition_penalty": 1.2, "stop_token_ids": [rng.randrange(vocabulary)]}
        samplings.append(sampling)
    outputs = llm.generate(prompts, [SamplingParams(**each) for each in samplings], progress=False)
    return [Spec(*three) for three in zip(prompts, samplings, (one.token_ids for one in outputs), strict=True)]


@dataclass
class Answer:
    """The answer to a request, as far as it was read."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    tokens: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    error: dict[str, Any] | None = None
    complete: bool = False


class Exchange:
    """One request on a connection of its own, which can be left at any point."""

    def __init__(self, port: int, body: dict[str, Any], receive_buffer: int | None = None) -> None:
        content = json.dumps(body).encode()
        self._request = (
            b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
            b"Connection: close\r\nContent-Length: %d\r\n\r\n%s" % (len(content), content)
        )
        self._port, self._stream = port, body["stream"]
        self.answer = Answer()

    async def open(self, share: float = 1.0) -> None:
        """Connect and send the request, or only a share of its bytes."""
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port, limit=2**16)
        self._writer.write(self._request[: int(len(self._request) * share)])
        await self._writer.drain()

    async def read(self, events: int | None = None) -> Answer:
        """Read the answer, or up to this number of events of a stream."""
        answer = self.answer
        if not answer.status:
            head = (await self._reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            answer.status = int(head[0].split()[1])
            pairs = (line.partition(":") for line in head[1:] if line)
            answer.headers = {name.lower(): value.strip() for name, _, value in pairs}
        if answer.status != 200 or not self._stream:
            self._take(json.loads(await self._reader.read()))
            answer.complete = answer.status == 200
            return answer
        while events is None or events > 0:
            line = await self._reader.readline()
            if not line:
                return answer
            if line.startswith(b"data: {"):
                self._take(json.loads(line[6:]))
                events = None if events is None else events - 1
            elif line.startswith(b"data: [DONE]"):
                answer.complete = answer.error is None
                return answer
        return answer

    def _take(self, data: dict[str, Any]) -> None:
        if "error" in data:
            self.answer.error = data["error"]
            return
        choice = data["choices"][0]
        self.answer.tokens += choice["token_ids"]
        self.answer.finish_reason = choice["finish_reason"]

    def abort(self) -> None:
        """Reset the connection, as when the client is killed."""
        self._writer.transport.abort()

    def close(self) -> None:
        self._writer.close()


def find_problem(answer: Answer, spec: Spec) -> str | None:
    """Return what is wrong with an answer; None if it is right as far as it goes, or a well-formed 429."""
    if answer.status == 429:
        error, retry = answer.error or {}, answer.headers.get("retry-after", "")
        named = set(error) == {"message", "type", "param", "code"} and isinstance(error["message"], str)
        good = named and error["type"] == "rate_limit_error" and error["code"] == "queue_full"
        return None if good and retry.isdecimal() and int(retry) >= 1 else f"a 429 has {answer.headers} and {error}"
    if answer.status != 200 or answer.error is not None:
        return f"status {answer.status}: {answer.error}"
    expected = spec.expected if answer.complete else spec.expected[: len(answer.tokens)]
    if answer.tokens != expected:
        return f"wrong tokens: {answer.tokens} instead of {expected}"
    if answer.complete and answer.finish_reason not in ("length", "stop"):
        return f"a complete answer ended with {answer.finish_reason}"
    return None
