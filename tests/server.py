"""A server in a thread of the test's process, with a real socket and a tiny random model."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
from openai import OpenAI

from yalis import LLM
from yalis.server.config import ServeConfig
from yalis.server.keys import read_keys
from yalis.server.lifecycle import Server, bind, url_of
from yalis.server.state import ServerState


@dataclass
class RunningServer:
    llm: LLM
    server: Server
    url: str

    @property
    def state(self) -> ServerState:
        assert self.server.state is not None
        return self.server.state

    @property
    def openai(self) -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)

    @property
    def model(self) -> str:
        return self.state.model_name

    def post(self, path: str, body: Any, **headers: str) -> httpx.Response:
        """Send JSON, or bytes as they are."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return httpx.post(
            f"{self.url}{path}", content=content, headers={"content-type": "application/json", **headers}, timeout=60
        )

    def get(self, path: str, **headers: str) -> httpx.Response:
        return httpx.get(f"{self.url}{path}", headers=headers, timeout=60)

    def blocks_in_use(self) -> int:
        return self.llm.request_loop.engine.scheduler.blocks.in_use  # type: ignore[union-attr]


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """Return the JSON of the server-sent events of a streamed response, which must end with [DONE]."""
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]", lines
    return [json.loads(line) for line in lines[:-1]]


@contextmanager
def running_server(llm: LLM, **config: Any) -> Iterator[RunningServer]:
    settings = ServeConfig(port=0, **config)
    listener = bind(settings)
    server = Server(llm, settings, read_keys(settings.api_key_file), listener)
    ready = threading.Event()
    failures: list[BaseException] = []

    def run() -> None:
        try:
            asyncio.run(server.serve(ready.set))
        except BaseException as error:
            failures.append(error)
            ready.set()

    thread = threading.Thread(target=run, name="server")
    thread.start()
    assert ready.wait(30)
    if failures:
        raise failures[0]
    try:
        yield RunningServer(llm, server, url_of(listener))
    finally:
        server.drain()
        thread.join(30)
        assert not thread.is_alive(), "the server has not ended"
    if failures:
        raise failures[0]
