"""/v1/responses, driven by the openai client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import OpenAI

from tests.server import RunningServer
from tests.tool_requests import ENUM, EXPECTED, FLAT_TOOLS, TOOLS, scripted_server
from yalis.errors import YalisFailure
from yalis.server.response_events import ResponseEvents


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with scripted_server(tmp_path_factory.mktemp("scripted")) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: RunningServer) -> OpenAI:
    return server.openai


@pytest.mark.parametrize("key", EXPECTED)
def test_a_response_and_its_events(client: OpenAI, key: str) -> None:
    content, calls, _ = EXPECTED[key]
    asked: Any = {"model": "tiny", "input": key, "tools": FLAT_TOOLS}
    whole = client.responses.create(**asked)
    assert (whole.status, whole.output_text) == ("completed", content or "")
    assert [(item.name, item.arguments) for item in whole.output if item.type == "function_call"] == calls
    assert whole.usage is not None
    assert whole.usage.total_tokens == whole.usage.input_tokens + whole.usage.output_tokens

    events = list(client.responses.create(**asked, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [events[0].type, events[1].type, events[-1].type] == [
        "response.created", "response.in_progress", "response.completed",
    ]  # fmt: skip
    final = events[-1].response
    assert [without_ids(item) for item in final.output] == [without_ids(item) for item in whole.output]
    check_items(events[2:-1], final.output)


def without_ids(item: Any) -> dict[str, Any]:
    return {name: value for name, value in item.model_dump().items() if name not in ("id", "call_id")}


def check_items(events: list[Any], output: list[Any]) -> None:
    """Check that the events between the first and the last ones build the output, item after item."""
    rest = iter(events)
    for index, item in enumerate(output):
        added = next(rest)
        assert (added.type, added.output_index, added.item.id) == ("response.output_item.added", index, item.id)
        assert added.item.status == "in_progress"
        kind = "output_text" if item.type == "message" else "function_call_arguments"
        if item.type == "message":
            part = next(rest)
            assert (part.type, part.item_id, part.part.text) == ("response.content_part.added", item.id, "")
        text = ""
        event = next(rest)
        while event.type == f"response.{kind}.delta":
            assert (event.item_id, event.output_index) == (item.id, index)
            text += event.delta
            event = next(rest)
        assert event.type == f"response.{kind}.done"
        if item.type == "message":
            assert text == event.text == item.content[0].text
            part = next(rest)
            assert (part.type, part.part.text) == ("response.content_part.done", text)
        else:
            assert text == event.arguments == item.arguments
        done = next(rest)
        assert (done.type, done.item) == ("response.output_item.done", item)
    assert next(rest, None) is None


def test_a_response_goes_on_with_the_result(server: RunningServer, client: OpenAI) -> None:
    """The items of a response are sent back as they came, with the result of the call."""
    conversation: Any = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "1"}]
    asked: Any = {"model": "tiny", "instructions": "Answer.", "tools": FLAT_TOOLS}
    first = client.responses.create(input=conversation, **asked)
    call = first.output[1]
    assert call.type == "function_call"
    conversation += [item.model_dump(exclude_none=True) for item in first.output]
    conversation += [{"type": "function_call_output", "call_id": call.call_id, "output": "sunny!"}]
    second = client.responses.create(input=conversation, **asked)
    assert second.output_text == "It is sunny."
    messages = [
        {"role": "system", "content": "Answer.\n\nBe brief."},
        {"role": "user", "content": "1"},
        {"role": "assistant", "content": "Let me look.", "tool_calls": [
            {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}]},
        {"role": "tool", "tool_call_id": call.call_id, "content": "sunny!"},
    ]  # fmt: skip
    same = client.chat.completions.create(model="tiny", messages=messages, tools=TOOLS).usage
    assert same is not None
    assert second.usage is not None
    assert second.usage.input_tokens == same.prompt_tokens


def test_a_response_repeats_what_was_asked_for(client: OpenAI) -> None:
    response = client.responses.create(
        model="tiny", input="!", temperature=0.5, top_p=0.9, max_output_tokens=1, metadata={"run": "7"},
        instructions="Be brief.", tools=FLAT_TOOLS, tool_choice="none", store=False,
    )  # fmt: skip
    assert (response.status, response.output_text) == ("incomplete", "It is ")
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.output[0].status == "incomplete"
    assert (response.temperature, response.top_p, response.max_output_tokens) == (0.5, 0.9, 1)
    assert (response.metadata, response.instructions, response.tool_choice) == ({"run": "7"}, "Be brief.", "none")
    assert response.completed_at is None
    assert response.model_dump()["store"] is False
    assert [tool.name for tool in response.tools] == ["get_weather", "now"]
    events = list(client.responses.create(model="tiny", input="!", max_output_tokens=1, stream=True))
    assert events[-1].type == "response.incomplete"


def test_an_empty_answer_is_an_empty_message(client: OpenAI) -> None:
    response = client.responses.create(model="tiny", input="?")
    assert [(item.type, item.status) for item in response.output] == [("message", "completed")]
    assert response.output_text == ""


def test_a_failure_is_an_event_and_an_exception(client: OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any) -> None:
        raise YalisFailure("rank 1 has died")

    monkeypatch.setattr(ResponseEvents, "finish", fail)
    kinds = []
    with pytest.raises(openai.APIError, match="the model failed: rank 1 has died"):  # noqa: PT012
        for event in client.responses.create(model="tiny", input="!", stream=True):
            kinds.append(event.type)
    assert kinds[-1] == "response.failed"
    assert "response.completed" not in kinds


def test_logprobs_of_a_response(client: OpenAI) -> None:
    asked: Any = {"model": "tiny", "input": "!", "top_logprobs": 2, "include": ["message.output_text.logprobs"]}
    whole = client.responses.create(**asked)
    logprobs = whole.output[0].content[0].logprobs
    assert [entry.token for entry in logprobs] == ["It is ", "sunny.", "<end>"]
    assert all(len(entry.top_logprobs) == 2 for entry in logprobs)
    with client.responses.stream(**asked) as stream:
        for _ in stream:
            pass
        assert stream.get_final_response().output[0].content[0].logprobs == logprobs


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"store": True}, "store", "nothing is stored"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "the whole conversation"),
        ({"conversation": "conv_1"}, "conversation", "the whole conversation"),
        ({"background": True}, "background", "not supported"),
        ({"truncation": "auto"}, "truncation", "not supported"),
        ({"reasoning": {"effort": "high"}}, "reasoning.effort", "not supported"),
        ({"include": ["file_search_call.results"]}, "include", "accepted"),
        ({"text": {"verbosity": "low"}}, "text.verbosity", "not supported"),
        ({"text": {"format": {"type": "xml"}}}, "text.format", "json_schema"),
        ({"text": {"format": {"type": "json_object"}}, "tools": FLAT_TOOLS}, "text.format", "set with tools"),
        ({"tools": [{"type": "web_search"}]}, "tools", "only \"function\" is supported"),
        ({"tools": TOOLS}, "tools", "the name None"),
        ({"tools": FLAT_TOOLS, "top_logprobs": 1}, "include", "not returned with tools"),
        ({"input": []}, "input", "at least one item"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input.0", "item_reference"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:"}]}]},
         "input.0.content.0", "only text is supported"),
        ({"input": [{"role": "robot", "content": "a"}]}, "input.0.role", "accepted: user"),
        ({"input": [{"role": "user", "content": "a", "audio": "b"}]}, "input.0.audio", "not supported"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "f"}]}, "input.0.arguments", "give a text"),
        ({"max_output_tokens": 0}, "max_output_tokens", "at least 1"),
        ({"stream_options": {"include_obfuscation": False}}, "stream_options", "set stream"),
        ({"surprise": 1}, "surprise", "not a field"),
    ],
)  # fmt: skip
def test_errors_of_responses(client: OpenAI, fields: dict[str, Any], param: str, message: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.post("/responses", body={"model": "tiny", "input": "!", **fields}, cast_to=object)
    assert caught.value.param == param, caught.value.message
    assert message in json.dumps(caught.value.body, ensure_ascii=False).replace('\\"', '"')


def test_the_text_of_a_response_has_a_schema(client: OpenAI) -> None:
    response = client.responses.create(
        model="tiny", input="!", text={"format": {"type": "json_schema", "name": "city", "schema": ENUM["parameters"]}}
    )  # type: ignore[call-overload]
    assert json.loads(response.output_text)["city"] in ("Paris", "New York")
    assert response.text.format.name == "city"
