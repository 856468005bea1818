"""The tools of a request, and which of them the model must call."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from yalis.errors import YalisError

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
_MODES = ("none", "auto", "required")


class FieldError(YalisError):
    """A field of a request is wrong. `param` is its name."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param


@dataclass(frozen=True)
class Tool:
    """A function that the model may call."""

    name: str
    description: str
    parameters: dict[str, Any]  # the JSON schema of an object

    def as_template_variable(self) -> dict[str, Any]:
        """Return the tool in the form that chat templates expect."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}


@dataclass(frozen=True)
class ToolChoice:
    """Whether the model may or must call one of some tools. One tool alone is called exactly once."""

    mode: Literal["none", "auto", "required"]
    names: tuple[str, ...]
    named: bool = False  # the request named this tool


def read_tools(value: Any) -> list[Tool]:
    """Return the tools of a chat request: {"type": "function", "function": {...}}."""
    return _unique([_read_tool(f"tools[{index}]", entry) for index, entry in enumerate(_entries(value))])


def read_flat_tools(value: Any) -> list[Tool]:
    """Return the tools of a Responses request: {"type": "function", "name": ..., "parameters": ...}."""
    return _unique([_read_flat_tool(f"tools[{index}]", entry) for index, entry in enumerate(_entries(value))])


def read_choice(value: Any, tools: Sequence[Tool]) -> ToolChoice:
    """Return the tool_choice of a request, in the form of either API; without one the model decides."""
    names = tuple(tool.name for tool in tools)
    if isinstance(value, Mapping) and value.get("type") == "allowed_tools":
        return _read_allowed(value.get("allowed_tools", value), names)
    if isinstance(value, Mapping):
        return ToolChoice("required", (_read_name("tool_choice", value, names),), named=True)
    mode: Any = value if value is not None else "auto"
    if mode not in _MODES:
        raise FieldError(
            "tool_choice",
            f'tool_choice is {value!r}; give "none", "auto", "required" or '
            '{"type": "function", "function": {"name": ...}}',
        )
    if mode == "required" and not tools:
        raise FieldError("tool_choice", 'tool_choice is "required", but there are no tools; give tools')
    return ToolChoice(mode if tools else "none", names)


def _read_allowed(value: Any, names: Sequence[str]) -> ToolChoice:
    entries = value.get("tools") if isinstance(value, Mapping) else None
    mode = value.get("mode", "auto") if isinstance(value, Mapping) else None
    if not isinstance(entries, list) or not entries or mode not in ("auto", "required"):
        raise FieldError(
            "tool_choice",
            'allowed_tools of tool_choice is malformed; give "mode" ("auto" or "required") and "tools", a list',
        )
    return ToolChoice(mode, tuple(_read_name("tool_choice.tools", entry, names) for entry in entries))


def _read_name(where: str, value: Any, names: Sequence[str]) -> str:
    """Return the name in {"type": "function", "function": {"name": ...}} or {"type": "function", "name": ...}."""
    kind = value.get("type") if isinstance(value, Mapping) else None
    if kind != "function":
        raise FieldError("tool_choice", f'{where} has the type {kind!r}; only "function" is supported')
    function = value.get("function", value)
    name = function.get("name") if isinstance(function, Mapping) else None
    if name not in names:
        raise FieldError("tool_choice", f"{where} names {name!r}, which is not one of tools; give one of their names")
    return str(name)


def _entries(value: Any) -> list[Any]:
    if value is not None and not isinstance(value, list):
        raise FieldError("tools", "tools is not a list; give a list of functions")
    return value or []


def _read_tool(where: str, entry: Any) -> Tool:
    _check_type(where, entry)
    function = entry.get("function")
    if not isinstance(function, Mapping):
        raise FieldError(
            "tools", f'{where} has no "function"; give {{"type": "function", "function": {{"name": ...}}}}'
        )
    return _read_function(f"{where}.function", function)


def _read_flat_tool(where: str, entry: Any) -> Tool:
    _check_type(where, entry)
    return _read_function(where, entry)


def _check_type(where: str, entry: Any) -> None:
    kind = entry.get("type") if isinstance(entry, Mapping) else None
    if kind != "function":
        raise FieldError("tools", f'{where} has the type {kind!r}; only "function" is supported')


def _read_function(where: str, function: Mapping[str, Any]) -> Tool:
    name, description = function.get("name"), function.get("description")
    parameters = function.get("parameters")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise FieldError(
            "tools", f"{where} has the name {name!r}; give 1 to 128 letters, digits, underscores, dashes and dots"
        )
    if description is not None and not isinstance(description, str):
        raise FieldError("tools", f"the description of {where} is not a text; give one, or leave it out")
    if parameters is None:
        return Tool(name, description or "", _NO_PARAMETERS)
    if not isinstance(parameters, dict) or parameters.get("type", "object") != "object":
        raise FieldError(
            "tools", f'the parameters of {where} are not the JSON schema of an object; give "type": "object"'
        )
    try:
        json.dumps(parameters, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise FieldError("tools", f"the parameters of {where} are no JSON schema ({error}); give one") from None
    return Tool(name, description or "", {"type": "object", "properties": {}, **parameters})


def _unique(tools: list[Tool]) -> list[Tool]:
    seen: set[str] = set()
    for tool in tools:
        if tool.name in seen:
            raise FieldError("tools", f"two tools have the name {tool.name!r}; give each another name")
        seen.add(tool.name)
    return tools
