"""/v1/completions and /v1/chat/completions against LLM.generate, through real sockets and the openai client."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.server import RunningServer, events, running_server
from tests.tiny_chat import save_tiny_chat
from yalis import LLM, SamplingParams


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = save_tiny_chat(tmp_path_factory.mktemp("model"))
    with LLM(str(folder), threads=1, kv_memory=0.05) as llm, running_server(llm, served_model_name="tiny") as running:
        yield running


PROMPT = "The capital of France is"
SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 0, "max_tokens": 24},
    {"temperature": 1.0, "seed": 7, "max_tokens": 24},
    {"temperature": 0.8, "seed": 1, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "max_tokens": 24},
    {"temperature": 1.0, "seed": 3, "repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.3},
    {"temperature": 1.0, "seed": 3, "n": 3, "max_tokens": 8, "logit_bias": {"65": 5, "66": -100}},
    {"temperature": 0, "max_tokens": 40, "stop": ["v", "`"], "min_tokens": 5},
    {"temperature": 0, "max_tokens": 40, "stop_token_ids": [3, 17], "ignore_eos": True},
]


def offline(server: RunningServer, prompt: Any, **sampling: Any) -> Any:
    return server.llm.generate([prompt], SamplingParams(**{"max_tokens": 16, **sampling}), progress=False)[0]


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("stream", [False, True])
def test_text_completions_are_those_of_generate(server: RunningServer, sampling: dict[str, Any], stream: bool) -> None:
    expected = offline(server, PROMPT, **sampling)
    body = {"model": "tiny", "prompt": PROMPT, "return_token_ids": True, **sampling}
    found = collect(server, "/v1/completions", body, stream)
    assert found == [(one.text, one.token_ids, one.finish_reason, one.stop_reason) for one in expected.completions]


def collect(server: RunningServer, path: str, body: dict[str, Any], stream: bool) -> list[tuple[Any, ...]]:
    """Return text, token ids, finish reason and stop reason of each choice."""
    response = server.post(path, {**body, "stream": stream})
    assert response.status_code == 200, response.text
    if not stream:
        return [
            (text_of(one), one["token_ids"], one["finish_reason"], one["stop_reason"])
            for one in response.json()["choices"]
        ]
    found: dict[int, list[Any]] = {}
    for event in events(response):
        for choice in event["choices"]:
            parts = found.setdefault(choice["index"], ["", [], None, None])
            parts[0] += text_of(choice)
            parts[1] += choice.get("token_ids", [])
            parts[2:] = [choice["finish_reason"] or parts[2], choice.get("stop_reason") or parts[3]]
    return [tuple(found[index]) for index in sorted(found)]


def text_of(choice: dict[str, Any]) -> str:
    if "text" in choice:
        return str(choice["text"])
    return str(
        choice.get("message", choice.get("delta"))["content"] if choice.get("message", choice.get("delta")) else ""
    )


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("stream", [False, True])
def test_chat_completions_are_those_of_chat(server: RunningServer, sampling: dict[str, Any], stream: bool) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": PROMPT}]
    expected = offline(server, messages, **sampling)
    body = {"model": "tiny", "messages": messages, "max_tokens": 16, "return_token_ids": True, **sampling}
    assert collect(server, "/v1/chat/completions", body, stream) == [
        (one.text, one.token_ids, one.finish_reason, one.stop_reason) for one in expected.completions
    ]
