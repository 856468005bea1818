"""Tools in /v1/chat/completions and /v1/responses, driven by the openai client."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import llm_comply
import openai
import pydantic
import pytest
from llm_comply import runner
from llm_comply.config import ComplianceConfig
from llm_comply.schema import SpecLoader
from llm_comply.tests.open_responses import OPEN_RESPONSES_TESTS
from llm_comply.tests.openai_chat import OPENAI_CHAT_TESTS
from openai import AsyncOpenAI, OpenAI

from tests.server import RunningServer
from tests.tool_requests import (
    CITY,
    ENUM,
    ENUM_TOOLS,
    EXPECTED,
    TEMPLATE,
    TOOLS,
    ask,
    calls_of,
    check_calls,
    scripted_server,
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with scripted_server(tmp_path_factory.mktemp("scripted")) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: RunningServer) -> OpenAI:
    return server.openai


def collect(chunks: Any) -> tuple[str, list[tuple[str, str]], str, list[str]]:
    """Return content, calls, finish reason and call ids of a streamed answer."""
    content, reason = "", ""
    calls: list[list[str]] = []
    ids: list[str] = []
    for chunk in chunks:
        choice = chunk.choices[0]
        content += choice.delta.content or ""
        for call in choice.delta.tool_calls or []:
            if call.id is not None:
                assert (call.index, call.type) == (len(calls), "function")
                calls.append([call.function.name, ""])
                ids.append(call.id)
            calls[call.index][1] += call.function.arguments
        reason = choice.finish_reason or reason
    return content, [(name, arguments) for name, arguments in calls], reason, ids


@pytest.mark.parametrize("key", EXPECTED)
def test_chat_answers_with_calls(client: OpenAI, key: str) -> None:
    content, calls, reason = EXPECTED[key]
    choice = client.chat.completions.create(model="tiny", messages=ask(key), tools=TOOLS).choices[0]
    assert (choice.message.content, calls_of(choice.message), choice.finish_reason) == (content, calls, reason)
    assert len({call.id for call in choice.message.tool_calls or []}) == len(calls)
    stream = client.chat.completions.create(model="tiny", messages=ask(key), tools=TOOLS, stream=True)
    found = collect(stream)
    assert found[:3] == (content or "", calls, reason)
    assert len(set(found[3])) == len(calls)


def test_one_call_at_most(client: OpenAI) -> None:
    asked: Any = {"model": "tiny", "messages": ask("2"), "tools": TOOLS, "parallel_tool_calls": False}
    choice = client.chat.completions.create(**asked).choices[0]
    assert calls_of(choice.message) == [("get_weather", "{}")]
    assert collect(client.chat.completions.create(**asked, stream=True))[1] == [("get_weather", "{}")]


def test_without_tools_the_text_is_content(client: OpenAI) -> None:
    """As for other special tokens, the marks of calls are not part of it."""
    for options in ({}, {"tools": TOOLS, "tool_choice": "none"}, {"tools": []}):
        choice = client.chat.completions.create(model="tiny", messages=ask("1"), **options).choices[0]
        assert choice.message.tool_calls is None
        assert choice.message.content == "Let me look.\n" + '\n{"name": "get_weather", "arguments": ' + CITY + "}\n"


def test_only_allowed_tools_are_called(client: OpenAI) -> None:
    allowed = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "now"}}]}
    choice = client.chat.completions.create(
        model="tiny", messages=ask("2"), tools=TOOLS, tool_choice={"type": "allowed_tools", "allowed_tools": allowed}
    ).choices[0]
    assert calls_of(choice.message) == [("now", "{}")]
    assert choice.message.content == '<tool_call>{"name": "get_weather", "arguments": {}}</tool_call>'


def prompt_of(server: RunningServer, messages: Any, **fields: Any) -> str:
    body = {"messages": messages, **fields}
    tokens = server.post("/tokenize", body).raise_for_status().json()["tokens"]
    return str(server.post("/detokenize", {"tokens": tokens}).json()["prompt"])


def test_a_conversation_goes_on_with_the_result(server: RunningServer, client: OpenAI) -> None:
    messages = ask("1")
    first = client.chat.completions.create(model="tiny", messages=messages, tools=TOOLS).choices[0].message
    messages += [
        first.model_dump(),  # as clients send it back, with fields that are null
        {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "sunny!"},
    ]
    second = client.chat.completions.create(model="tiny", messages=messages, tools=TOOLS).choices[0].message
    assert second.content == "It is sunny."
    prompt = prompt_of(server, messages, tools=TOOLS)
    assert prompt.startswith('<tools>[{"type": "function", "function": {"name": "get_weather"')
    assert prompt.endswith(
        "<user>1<assistant>Let me look.<tool_call>get_weather[('city', 'São Paulo 🎉'), ('days', [1, 2.5])]</tool_call>"
        "<tool>sunny!"
    )
    assert "<tools>" not in prompt_of(server, messages, tools=TOOLS, tool_choice="none")


def test_async_client(server: RunningServer) -> None:
    async def run() -> None:
        async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            asked: Any = {"model": "tiny", "messages": ask("1"), "tools": TOOLS}
            whole, stream = await asyncio.gather(
                client.chat.completions.create(**asked), client.chat.completions.create(**asked, stream=True)
            )
            chunks = [chunk async for chunk in stream]
            assert calls_of(whole.choices[0].message) == collect(chunks)[1] == [("get_weather", CITY)]
            response = await client.responses.create(model="tiny", input="!")
            assert response.output_text == "It is sunny."
            events = [event.type async for event in await client.responses.create(model="tiny", input="!", stream=True)]
            assert events[-1] == "response.completed"

    asyncio.run(run())


TEMPLATES = {
    "hermes": TEMPLATE,
    "llama": "{# <|python_tag|> #}" + TEMPLATE,
    "mistral": "{# [TOOL_CALLS] #}" + TEMPLATE,
    "mistral_args": "{# [TOOL_CALLS] [ARGS] #}" + TEMPLATE,
    "described": "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}",
}


@pytest.mark.parametrize("template", TEMPLATES)
def test_calls_can_be_required(
    server: RunningServer, client: OpenAI, monkeypatch: pytest.MonkeyPatch, template: str
) -> None:
    """The model would answer "It is sunny."."""
    assert server.llm.tokenizer is not None
    monkeypatch.setattr(server.llm.tokenizer.hf, "chat_template", TEMPLATES[template])
    named: Any = {"type": "function", "function": {"name": "get_weather"}}
    for seed, choice in enumerate(("required", "required", "required", named)):
        asked: Any = {"model": "tiny", "messages": ask("!"), "tools": ENUM_TOOLS, "tool_choice": choice, "seed": seed}
        answer = client.chat.completions.create(**asked).choices[0]
        calls = calls_of(answer.message)
        check_calls(calls, ["get_weather"] if choice is named else ["get_weather", "now"])
        assert (answer.message.content, answer.finish_reason) == (None, "tool_calls")
        assert choice != named or len(calls) == 1
        assert collect(client.chat.completions.create(**asked, stream=True))[1] == calls
    one = client.chat.completions.create(
        model="tiny", messages=ask("!"), tools=ENUM_TOOLS, tool_choice="required", parallel_tool_calls=False
    ).choices[0]
    assert len(calls_of(one.message)) == 1
    flat: Any = [{"type": "function", **ENUM}]
    for flat_choice in ("required", {"type": "function", "name": "get_weather"}):
        output = client.responses.create(model="tiny", input="!", tools=flat, tool_choice=flat_choice).output  # type: ignore[call-overload]
        assert {item.type for item in output} == {"function_call"}
        check_calls([(item.name, item.arguments) for item in output], ["get_weather"])


class GetWeather(pydantic.BaseModel):
    city: Literal["Paris", "New York"]


def test_helpers_of_the_client(client: OpenAI) -> None:
    """They make tools and schemas from classes, and collect streams."""
    tool = openai.pydantic_function_tool(GetWeather)
    asked: Any = {"model": "tiny", "messages": ask("!"), "tools": [tool], "tool_choice": "required"}
    [call, *_] = client.chat.completions.parse(**asked, parallel_tool_calls=False).choices[0].message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, GetWeather)
    with client.chat.completions.stream(model="tiny", messages=ask("2"), tools=TOOLS) as stream:
        kinds = {event.type for event in stream}
        assert "tool_calls.function.arguments.done" in kinds
        assert calls_of(stream.get_final_completion().choices[0].message) == EXPECTED["2"][1]
    with client.responses.stream(model="tiny", input="!", text_format=GetWeather) as events:
        assert events.until_done().get_final_response().output_parsed is not None
    response = client.responses.parse(
        model="tiny", input="!", tools=[openai.pydantic_function_tool(GetWeather)["function"] | {"type": "function"}],  # type: ignore[list-item]
        tool_choice={"type": "function", "name": "GetWeather"},
    )  # fmt: skip
    assert GetWeather.model_validate(response.output[0].parsed_arguments)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"tools": "x"}, "tools", "list"),
        ({"tools": [{"type": "web_search"}]}, "tools", "'web_search'; only \"function\" is supported"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools", "the name 'a b'"),
        ({"tools": TOOLS + TOOLS[:1]}, "tools", "two tools have the name 'get_weather'"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}]},
            "tools",
            "JSON schema of an object",
        ),
        ({"tool_choice": "required"}, "tool_choice", "there are no tools"),
        ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice", "tool_choice is 'any'"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice", "names 'x'"),
        ({"functions": [{"name": "f"}]}, "functions", "use tools"),
        ({"messages": [{"role": "user", "content": "a", "tool_calls": [{}]}]}, "messages", "only messages of the"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]}, "messages", "is malformed"),
        ({"messages": [{"role": "assistant", "content": "", "tool_calls": {"a": 1}}]}, "messages", "as a list"),
        ({"messages": [{"role": "tool", "content": "a", "tool_call_id": [1]}]}, "messages", "tool_call_id"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages", "not text"),
        ({"messages": [{"role": "user", "content": None}]}, "messages", "no content"),
        ({"messages": []}, "messages", "at least one message"),
    ],
)
def test_errors_of_chat(server: RunningServer, fields: dict[str, Any], param: str, message: str) -> None:
    response = server.post("/v1/chat/completions", {"model": "tiny", "messages": ask("1"), **fields})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param), error
    assert message in error["message"]
    assert error["type"] == "invalid_request_error"


def test_the_model_is_required(server: RunningServer) -> None:
    for path, body in (("chat/completions", {"messages": ask("!")}), ("responses", {"input": "!"})):
        response = server.post(f"/v1/{path}", body)
        assert (response.status_code, response.json()["error"]["param"]) == (400, "model")


@pytest.mark.parametrize("api", ["openai_chat", "openresponses"])
def test_llm_comply(server: RunningServer, api: str) -> None:
    """Every check passes, except that images get our 400. Without a reasoning model two checks are skipped."""
    tests = OPENAI_CHAT_TESTS if api == "openai_chat" else OPEN_RESPONSES_TESTS
    config = ComplianceConfig(f"{server.url}/v1", "none", "tiny")
    specification = SpecLoader(str(Path(llm_comply.__file__).parent / "specs" / f"{api}.json"))
    results = {one.id: one for one in runner.TestRunner(config, tests, specification).run_all().results}
    image = results.pop("chat-image-input" if api == "openai_chat" else "image-input")
    assert any("HTTP 400" in error for error in image.errors)
    assert {one.id: one.errors for one in results.values() if one.status.value == "failed"} == {}
    assert [one.id for one in results.values() if one.status.value == "skipped"] == [
        "chat-reasoning-summary" if api == "openai_chat" else "reasoning-summary"
    ]
    assert len(results) >= 8
