"""Requests with tools, and a model whose answers to them are known."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.scripted_model import save_scripted
from tests.server import RunningServer, running_server
from yalis import LLM

#: Hermes' format. The last character of a conversation selects what the model answers.
TEMPLATE = """\
{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}\
{% for m in messages %}<{{ m.role }}>{{ m.content }}\
{% for call in m.tool_calls or [] %}<tool_call>{{ call.function.name }}\
{{ call.function.arguments.items() | list }}</tool_call>{% endfor %}{% endfor %}"""
CITY = '{"city": "São Paulo 🎉", "days": [1, 2.5]}'
SCRIPTS = {
    "1": ["Let me ", "look.\n", "<tool_call>", '\n{"na', 'me": "get_wea', 'ther", "arguments": {"city": "S',
          "ão Paulo ", "🎉", '", "days": [1', ", 2.5]}", "}\n", "</tool_call>"],
    "2": ['<tool_call>{"name": "get_weather", "argu', 'ments": {}}</tool_call>', '<tool_call>{"name": "now"}</tool',
          "_call>"],
    "3": ["I would <too", "l_call> but ", 'cannot. <tool_call>{"name": "other"}', "</tool_call> done"],
    "!": ["It is ", "sunny."],
    ".": ["Hello, ", "dear friend"],
}  # fmt: skip
SPECIAL = ["<tool_call>", "</tool_call>", "<unused>"]
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "array", "items": {"type": "number"}}},
    "required": ["city"],
}
WEATHER = {"name": "get_weather", "description": "The weather of a city.", "parameters": PARAMETERS}
TOOLS: Any = [{"type": "function", "function": WEATHER}, {"type": "function", "function": {"name": "now"}}]
FLAT_TOOLS: Any = [{"type": "function", **WEATHER, "strict": False}, {"type": "function", "name": "now"}]
EXPECTED = {
    "1": ("Let me look.", [("get_weather", CITY)], "tool_calls"),
    "2": (None, [("get_weather", "{}"), ("now", "{}")], "tool_calls"),
    "3": ('I would <tool_call> but cannot. <tool_call>{"name": "other"}</tool_call> done', [], "stop"),
    "!": ("It is sunny.", [], "stop"),
}
CITIES = {"type": "object", "properties": {"city": {"enum": ["Paris", "New York"]}}, "required": ["city"]}
ENUM = {"name": "get_weather", "parameters": {**CITIES, "additionalProperties": False}}
ENUM_TOOLS: Any = [{"type": "function", "function": ENUM}, TOOLS[1]]


@contextmanager
def scripted_server(folder: Path) -> Iterator[RunningServer]:
    save_scripted(folder, SCRIPTS, TEMPLATE, SPECIAL)
    with LLM(str(folder), threads=1, kv_memory=0.05) as llm, running_server(llm, served_model_name="tiny") as running:
        yield running


def ask(text: str) -> Any:
    return [{"role": "user", "content": text}]


def calls_of(message: Any) -> list[tuple[str, str]]:
    return [(call.function.name, call.function.arguments) for call in message.tool_calls or []]


def check_calls(calls: list[tuple[str, str]], names: list[str]) -> None:
    assert calls
    for name, arguments in calls:
        assert name in names
        if name == "get_weather":
            assert json.loads(arguments) in [{"city": "Paris"}, {"city": "New York"}]
        else:
            assert json.loads(arguments) == {}
