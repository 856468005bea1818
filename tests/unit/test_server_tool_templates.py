"""Which format of calls a chat template uses, and the messages that it gets."""

from __future__ import annotations

import json
from typing import Any

import pytest

from yalis.server.tools.definitions import FieldError, Tool, ToolChoice, read_choice, read_flat_tools, read_tools
from yalis.server.tools.formats import DESCRIBED, HERMES, LLAMA, MISTRAL, MISTRAL_ARGS, ToolFormat, choose_format
from yalis.server.tools.history import render_messages
from yalis.server.tools.request import ToolRequest, tool_request
from yalis.types import SamplingParams, StructuredOutputs

TOOLS = [Tool("add", "", {"type": "object", "properties": {"a": {"type": "integer"}}}), Tool("now", "", {})]
AUTO = ToolChoice("auto", ("add", "now"))


@pytest.mark.parametrize(
    ("template", "tool_format"),
    [
        ('{% if tools %}<tool_call>{"name": <name>, "arguments": <object>}</tool_call>{% endif %}', HERMES),
        ("{% if tools %}<tool_call><function=name><parameter=a>{{ arguments }}{% endif %}", DESCRIBED),  # Qwen3-Coder
        ("{% if tools %}<tool_call>{{ name }}<arg_key>{{ arguments }}{% endif %}", DESCRIBED),  # GLM
        ('{% if tools %}Respond in the format {"name": function name, "parameters": {}}{% endif %}', LLAMA),
        ("{% if tools %}{{ '<|python_tag|>' + call }}{% endif %}", LLAMA),
        ("{% if tools %}[AVAILABLE_TOOLS]{% endif %}{{ '[TOOL_CALLS] [' }}", MISTRAL),
        ("{% if tools %}{% endif %}{{ '[TOOL_CALLS]' + name + '[ARGS]' + arguments }}", MISTRAL_ARGS),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", DESCRIBED),
        ("{{ '[TOOL_CALLS]' }} for history only", DESCRIBED),
        (None, DESCRIBED),
        ({"default": "{{ messages }}", "tool_use": '{% if tools %}<tool_call>{"arguments": }{% endif %}'}, HERMES),
        ({"default": "{{ messages }}"}, DESCRIBED),
    ],
)  # fmt: skip
def test_the_format_is_found_in_the_template(template: Any, tool_format: ToolFormat) -> None:
    assert choose_format(template) == tool_format


def call(id: str, name: str, arguments: Any) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


CONVERSATION: list[dict[str, Any]] = [
    {"role": "developer", "content": "Be brief."},
    {"role": "user", "content": "1 + 1?", "name": None},
    {"role": "assistant", "content": None, "refusal": None, "audio": None,
     "tool_calls": [call("call_a", "add", '{"a": 1}'), call("call_b", "now", "{}")]},
    {"role": "tool", "tool_call_id": "call_a", "content": "2"},
    {"role": "tool", "tool_call_id": "call_b", "content": [{"type": "text", "text": "noon"}]},
    {"role": "assistant", "content": "2", "tool_calls": None},
]  # fmt: skip


def test_templates_that_render_tools_get_mappings() -> None:
    messages = render_messages(CONVERSATION, TOOLS, HERMES, "{{ tools }}")
    assert messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "content": "",
         "tool_calls": [call("call_a", "add", {"a": 1}), call("call_b", "now", {})]},
        {"role": "tool", "tool_call_id": "call_a", "content": "2", "name": "add"},
        {"role": "tool", "tool_call_id": "call_b", "content": "noon", "name": "now"},
        {"role": "assistant", "content": "2"},
    ]  # fmt: skip
    assert CONVERSATION[2]["content"] is None, "the messages of the request are not changed"
    assert render_messages(CONVERSATION, TOOLS, HERMES, "{{ tools }} developer")[0]["role"] == "developer"


def test_arguments_that_were_cut_off_stay_a_text() -> None:
    message = {"role": "assistant", "tool_calls": [call("call_a", "add", '{"a": ')]}
    [cleaned] = render_messages([message], TOOLS, HERMES, "{{ tools }}")
    assert cleaned["tool_calls"][0]["function"]["arguments"] == '{"a": '


def test_templates_of_mistral_get_short_ids() -> None:
    messages = render_messages(CONVERSATION, TOOLS, MISTRAL, "{{ tools }}")
    ids = [one["id"] for one in messages[2]["tool_calls"]]
    assert ids == [messages[3]["tool_call_id"], messages[4]["tool_call_id"]]
    assert len(set(ids)) == 2
    assert all(len(id) == 9 and id.isalnum() for id in ids)
    kept = [{"role": "assistant", "tool_calls": [call("a1B2c3D4e", "add", "{}")]}]
    assert render_messages(kept, TOOLS, MISTRAL, "{{ tools }}")[0]["tool_calls"][0]["id"] == "a1B2c3D4e"


def test_templates_of_llama_get_one_call_in_a_message() -> None:
    messages = render_messages(CONVERSATION, TOOLS, LLAMA, "{{ tools }}")
    calls = [[one["id"] for one in message.get("tool_calls", [])] for message in messages]
    assert calls == [[], [], ["call_a"], [], ["call_b"], [], []]
    assert [message.get("tool_call_id") for message in messages] == [None, None, None, "call_a", None, "call_b", None]


def test_other_templates_get_text() -> None:
    messages = render_messages(CONVERSATION, TOOLS, DESCRIBED, "{{ messages }}")
    system, *rest = messages
    assert system["role"] == "system"
    assert system["content"].startswith("Be brief.\n\n")
    for tool in TOOLS:
        assert json.dumps(tool.as_template_variable()) in system["content"].splitlines()
    assert rest == [
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "content": '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>\n'
                                         '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'},
        {"role": "user", "content": "<tool_response>\n2\n</tool_response>\n<tool_response>\nnoon\n</tool_response>"},
        {"role": "assistant", "content": "2"},
    ]  # fmt: skip
    # The text of the calls is what the parser reads.
    parser = DESCRIBED.parser(["add", "now"])
    parser.feed(rest[1]["content"])
    assert parser.num_calls == 2


def test_the_description_where_system_messages_are_not_accepted() -> None:
    template = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    [message] = render_messages([{"role": "user", "content": "Hi"}], TOOLS, DESCRIBED, template)
    assert message["role"] == "user"
    assert message["content"].endswith("</tool_call>\n\nHi")
    first = render_messages([{"role": "user", "content": "Hi"}], TOOLS, DESCRIBED, "{{ messages }}")[0]
    assert first["role"] == "system"


def test_choices() -> None:
    tools = read_tools([{"type": "function", "function": {"name": name}} for name in ("a", "b")])
    assert read_choice(None, tools) == ToolChoice("auto", ("a", "b"))
    assert read_choice("required", tools) == ToolChoice("required", ("a", "b"))
    named = ToolChoice("required", ("b",), named=True)
    assert read_choice({"type": "function", "function": {"name": "b"}}, tools) == named
    assert read_choice({"type": "function", "name": "b"}, tools) == named
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "a"}]}
    assert read_choice(allowed, tools) == ToolChoice("required", ("a",))
    assert read_choice("auto", []).mode == read_choice(None, []).mode == "none"
    for wrong in ("x", 3, {"type": "function"}, {"type": "custom", "name": "a"}, {"type": "allowed_tools"}):
        with pytest.raises(FieldError, match="tool_choice"):
            read_choice(wrong, tools)


def test_parameters_of_functions() -> None:
    [empty, partial] = read_flat_tools(
        [
            {"type": "function", "name": "a"},
            {"type": "function", "name": "b", "parameters": {"properties": {"x": {}}}, "strict": True},
        ]
    )
    assert empty.parameters == {"type": "object", "properties": {}, "additionalProperties": False}
    assert partial.parameters == {"type": "object", "properties": {"x": {}}}
    for wrong in ({"type": "string"}, [], {"title": "\ud83c"}):
        with pytest.raises(FieldError, match=r"tools\[0\]"):
            read_flat_tools([{"type": "function", "name": "a", "parameters": wrong}])


@pytest.mark.parametrize("tool_format", [HERMES, LLAMA, MISTRAL, MISTRAL_ARGS, DESCRIBED])
def test_the_enforced_text_is_what_the_parser_reads(tool_format: ToolFormat) -> None:
    enforced = tool_format.enforced(TOOLS, single=False)
    first, second = enforced.tags
    text = f'{first.begin}{{"a": 1}}{first.end}{enforced.separator}{second.begin}{{}}{second.end}'
    parser = tool_format.parser(["add", "now"])
    parser.feed(text)
    assert parser.finish() == []
    assert parser.num_calls == 2
    assert not enforced.single_tag
    assert tool_format.enforced(TOOLS, single=True).single_tag


def test_sampling_of_a_request_with_tools() -> None:
    def request(mode: Any, parallel: bool | None = None) -> ToolRequest:
        return tool_request(TOOLS, ToolChoice(mode, ("now",)), parallel, "{% if tools %}[TOOL_CALLS]{% endif %}")

    plain = SamplingParams(keep_special_tokens=("<x>",))
    assert request("none").sampling(plain, "response_format") == plain
    assert request("auto").sampling(plain, "x").keep_special_tokens == ("<x>", "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]")
    assert request("auto").sampling(plain, "x").structured_outputs is None
    required = request("required", parallel=False).sampling(plain, "x").structured_outputs
    assert required is not None
    assert (len(required.tags), required.single_tag) == (1, True)
    structured = SamplingParams(structured_outputs=StructuredOutputs(json_object=True))
    assert request("none").sampling(structured, "response_format") == structured
    with pytest.raises(FieldError, match="response_format is set with tools"):
        request("auto").sampling(structured, "response_format")
