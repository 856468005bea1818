"""What load generators and API testers from PyPI send to the server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.server import RunningServer, events, running_server
from tests.tiny_chat import save_tiny_chat
from yalis import LLM


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = save_tiny_chat(tmp_path_factory.mktemp("model"))
    with LLM(str(folder), threads=1, kv_memory=0.05) as llm, running_server(llm, served_model_name="tiny") as running:
        yield running


@pytest.mark.parametrize(
    ("path", "prompt", "prompt_tokens"),
    [
        ("/v1/completions", {"prompt": [5, 6, 7]}, 3),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}, len("<user>hi<assistant>")),
    ],
)
def test_every_chunk_can_have_the_usage_so_far(
    server: RunningServer, path: str, prompt: dict[str, Any], prompt_tokens: int
) -> None:
    """As guidellm asks for it."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {**prompt, "max_tokens": 12, "ignore_eos": True, "stream": True, "stream_options": options, "seed": 1}
    chunks = events(server.post(path, {**body, "return_token_ids": True}))
    tokens = 0
    for chunk in chunks:
        for choice in chunk["choices"]:
            tokens += len(choice.get("token_ids", ()))
        expected = {"prompt_tokens": prompt_tokens, "completion_tokens": tokens, "total_tokens": prompt_tokens + tokens}
        assert chunk["usage"].items() >= expected.items()
    assert tokens == 12
    plain = events(server.post(path, {**body, "stream_options": {"include_usage": True}}))
    assert [chunk["usage"] for chunk in plain[:-1]] == [None] * (len(plain) - 1)
