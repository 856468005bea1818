"""Requests that cannot be honoured get an error in OpenAI's shape that names the field."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.server import RunningServer, running_server
from tests.tiny_chat import save_tiny_chat
from yalis import LLM

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = save_tiny_chat(tmp_path_factory.mktemp("model"))
    with LLM(str(folder), threads=1, kv_memory=0.05) as llm, running_server(llm, served_model_name="tiny") as running:
        yield running


def error(server: RunningServer, path: str, body: Any, status: int = 400, **headers: str) -> dict[str, Any]:
    response = server.post(path, body, **headers)
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    content = response.json()["error"]
    assert content.keys() == {"message", "type", "param", "code"}
    assert 0 < len(content["message"]) < 1000
    return content


@pytest.mark.parametrize(
    ("path", "changes", "param"),
    [
        (CHAT, {"max_tokns": 5}, "max_tokns"),
        (CHAT, {"store": True}, "store"),
        (CHAT, {"audio": {"voice": "x"}}, "audio"),
        (CHAT, {"modalities": ["text", "audio"]}, "modalities"),
        (CHAT, {"chat_template": "{{ x }}"}, "chat_template"),
        (CHAT, {"functions": [{"name": "f"}]}, "functions"),
        (CHAT, {"previous_response_id": "r"}, "previous_response_id"),
        (CHAT, {"service_tier": "flex"}, "service_tier"),
        (CHAT, {"prediction": {"type": "content", "content": "x"}}, "prediction"),
        (CHAT, {"top_logprobs": 3}, "top_logprobs"),
        (CHAT, {"logprobs": True, "top_logprobs": 99}, "top_logprobs"),
        (CHAT, {"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens"),
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"messages": [{"role": "user"}]}, "messages"),
        (CHAT, {"messages": [{"role": "nobody", "content": "x"}]}, "messages"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
         "messages.0.content.0"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "messages.0.content.0"),
        (CHAT, {"messages": [{"role": "user", "content": "x", "weight": 1}]}, "messages.0.weight"),
        (CHAT, {"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
        (CHAT, {"stream_options": {"include_usage": True}}, "stream_options"),
        (CHAT, {"stream": True, "stream_options": {"nothing": True}}, "stream_options.nothing"),
        (CHAT, {"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
        (TEXT, {"stream": True, "echo": True, "logprobs": 1}, "logprobs"),
        (TEXT, {"suffix": "x"}, "suffix"),
        (TEXT, {"best_of": 3}, "best_of"),
        (TEXT, {"use_beam_search": True}, "use_beam_search"),
        (TEXT, {"temperature": -1}, "temperature"),
        (TEXT, {"temperature": "1"}, "temperature"),
        (TEXT, {"top_p": 0}, "top_p"),
        (TEXT, {"n": 0}, "n"),
        (TEXT, {"n": 900}, "n"),
        (TEXT, {"logprobs": 30}, "logprobs"),
        (TEXT, {"max_tokens": 0}, "max_tokens"),
        (TEXT, {"max_tokens": True}, "max_tokens"),
        (TEXT, {"stop": 5}, "stop"),
        (TEXT, {"stop": [""]}, "stop"),
        (TEXT, {"stop": ["x"] * 101}, "stop"),
        (TEXT, {"stop": ["x" * 5001, "y" * 5000]}, "stop"),
        (TEXT, {"logit_bias": {"9999": 1}}, "prompt"),
        (TEXT, {"logit_bias": {"a": 1}}, None),
        (TEXT, {"seed": -1}, "seed"),
        (CHAT, {"max_completion_tokens": 0}, "max_completion_tokens"),
        (TEXT, {"min_tokens": 20}, "min_tokens"),
        (TEXT, {"top_k": -2}, "top_k"),
        (TEXT, {"structured_outputs": {"regx": "a"}}, "structured_outputs"),
        (TEXT, {"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        (TEXT, {"response_format": {"type": "json_schema", "json_schema": {"schema": {"const": "a" * 2**20}}}},
         "response_format"),
        ("/v1/responses", {"model": "tiny", "input": "a", "max_output_tokens": 0}, "max_output_tokens"),
        ("/v1/responses", {"model": "tiny", "input": "a", "top_logprobs": 21}, "top_logprobs"),
        ("/v1/responses", {"model": "tiny", "input": "a", "top_logprobs": -1}, "top_logprobs"),
        (TEXT, {"prompt": []}, "prompt"),
        (TEXT, {"prompt": ""}, "prompt"),
        (TEXT, {"prompt": [1, "a"]}, "prompt"),
        (TEXT, {"prompt": ["a", [1]]}, "prompt"),
        (TEXT, {"prompt": [99999]}, "prompt"),
        (TEXT, {"prompt": [-1]}, "prompt"),
        (TEXT, {"prompt": {"a": 1}}, "prompt"),
        (TEXT, {"prompt": "x" * 300}, "prompt"),
        (TEXT, {"prompt": "half a character \ud800"}, "prompt"),
        (TEXT, {"\ud800": 1}, "\ud800"),
        (TEXT, {"stop": [1] * 30_000}, "stop"),
        (TEXT, {"x" * 500: 1}, "x" * 60),
        ("/detokenize", {"tokens": "a"}, "tokens"),
        ("/detokenize", {"tokens": [1, "a"]}, "tokens"),
        ("/detokenize", {"tokens": [1] * 1_000_001}, "tokens"),
        ("/tokenize", {"prompt": "a", "messages": []}, "prompt"),
    ],
)  # fmt: skip
def test_the_field_is_named(server: RunningServer, path: str, changes: dict[str, Any], param: str | None) -> None:
    bodies = {CHAT: {"model": server.model, "messages": MESSAGES}, TEXT: {"prompt": "hello"}}
    body = bodies.get(path, {})
    found = error(server, path, {**body, **changes})
    assert found["param"] == param, found
    assert found["type"] == "invalid_request_error"


def test_a_prompt_that_is_too_long_names_the_context(server: RunningServer) -> None:
    found = error(server, TEXT, {"prompt": "x" * 300})
    assert found["code"] == "context_length_exceeded"
    assert "300 tokens, but the context holds 256" in found["message"]
    found = error(server, CHAT, {"model": server.model, "messages": [{"role": "user", "content": "x" * 300}]})
    assert (found["param"], found["code"]) == ("messages", "context_length_exceeded")


def test_a_prompt_far_too_long_is_refused_before_it_is_tokenized(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokenizing 15 MB would take seconds and gigabytes, while other prompts wait."""
    assert server.llm.tokenizer is not None
    monkeypatch.setattr(server.llm.tokenizer.hf, "encode", None)
    content = "hello world " * 500_000
    for path, body, param in (
        (TEXT, {"prompt": content}, "prompt"),
        (CHAT, {"model": "tiny", "messages": [{"role": "user", "content": content}]}, "messages"),
        ("/tokenize", {"prompt": content}, "prompt"),
    ):
        found = error(server, path, body)
        assert (found["param"], found["code"]) == (param, "context_length_exceeded")
        assert "characters, but the context holds 256 tokens" in found["message"]


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"", "invalid_json"),
        (b"{", "invalid_json"),
        (b'{"prompt": "a", "temperature": NaN}', "invalid_json"),
        (b'{"prompt": "a", "temperature": Infinity}', "invalid_json"),
        (b'{"prompt": "a", "temperature": 1e400}', "invalid_json"),
        (b'{"prompt": "a", "metadata": {"a": -1e999}}', "invalid_json"),
        (b'{"prompt": "\xff"}', "invalid_json"),
        (b"[" * 200_000, "invalid_json"),
        (b'{"prompt": "a", "seed": ' + b"1" * 5000 + b"}", "invalid_json"),
        (b'{"prompt": ' + b"[" * 900 + b"]" * 900 + b"}", "invalid_value or invalid_json"),
        (b'{"prompt": "a", "store": ' + b"[" * 900 + b"]" * 900 + b"}", "unsupported or invalid_json"),
        (b'{"prompt": [' + b"[1]," * 600_000 + b"[1]]}", "invalid_json"),
        (b"[]", "invalid_value"),
        (b"null", "invalid_value"),
        (b'{"max_tokens": 3}', "missing_required_parameter"),
    ],
)
def test_a_body_that_is_no_request(server: RunningServer, body: bytes, code: str) -> None:
    assert error(server, TEXT, body)["code"] in code.split(" or ")


EXTREME = [
    {"temperature": value} for value in (5e-324, 1e-300, 1e-10, 1e38, 1.7e308)
] + [
    {"top_k": 2**80}, {"max_tokens": 2**80}, {"max_tokens": 2**80, "min_tokens": 2**70}, {"seed": 2**63 - 1},
    {"top_p": 5e-324}, {"min_p": 5e-324}, {"min_p": 1}, {"repetition_penalty": 5e-324}, {"repetition_penalty": 1e308},
    {"logit_bias": {"5": 100, "6": -100}, "temperature": 1e-300},
    {"logit_bias": {str(token): -100 for token in range(90)}}, {"stop": ["x" * 100] * 100},
    {"stop_token_ids": [5] * 20_000}, {"n": 64, "temperature": 1.7e308}, {"logprobs": 20, "temperature": 5e-324},
]  # fmt: skip


@pytest.mark.parametrize("fields", EXTREME, ids=lambda fields: str(fields)[:60])
def test_extreme_values_are_honoured(server: RunningServer, fields: dict[str, Any]) -> None:
    response = server.post(TEXT, {"prompt": "hello", "max_tokens": 3, **fields})
    assert response.status_code == 200, response.text
    assert len(response.json()["choices"]) == fields.get("n", 1)
    assert server.get("/health").status_code == 200


def test_neutral_values_of_refused_fields_are_accepted(server: RunningServer) -> None:
    body = {
        "model": server.model, "messages": MESSAGES,
        "max_tokens": 1, "store": False, "service_tier": "auto", "modalities": ["text"],
        "user": "me", "metadata": {"a": "b"}, "audio": None, "logit_bias": {}, "stop": [], "top_k": -1,
    }  # fmt: skip
    assert server.post(CHAT, body).status_code == 200


def test_other_paths_methods_and_models(server: RunningServer) -> None:
    for method, path, status in (("GET", TEXT, 405), ("GET", "/v1/nothing", 404), ("POST", "/health", 405)):
        response = server.get(path) if method == "GET" else server.post(path, {})
        assert response.status_code == status
        assert f"{method} {path} does not exist" in response.json()["error"]["message"]
    found = error(server, TEXT, {"model": "gpt-4", "prompt": "hello"}, 404)
    assert (found["param"], found["code"]) == ("model", "model_not_found")
    assert "'tiny'" in found["message"]
    with pytest.raises(openai.NotFoundError):
        server.openai.models.retrieve("gpt-4")
    assert [model.id for model in server.openai.models.list()] == ["tiny"]


def test_the_content_type_must_be_json(server: RunningServer) -> None:
    body = json.dumps({"prompt": "hello"}).encode()
    for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
        assert error(server, TEXT, body, 415, **{"content-type": kind})["code"] == "wrong_content_type"


def test_the_openai_client_raises_its_own_errors(server: RunningServer) -> None:
    with pytest.raises(openai.BadRequestError, match="only text is supported") as raised:
        server.openai.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}],
        )
    assert raised.value.param == "messages.0.content.0"
    with pytest.raises(openai.BadRequestError, match="max_tokens"):
        server.openai.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=-3, stream=True)  # type: ignore[call-overload]


def test_nothing_of_a_refused_request_stays(server: RunningServer) -> None:
    assert server.state.async_llm.num_open == 0
    assert server.llm.num_unfinished == 0
    assert server.blocks_in_use() == 0
