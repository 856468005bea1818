"""The input of /v1/responses as the messages of a conversation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from yalis.server.errors import ApiError, shown
from yalis.types import Message

_ROLES = ("user", "assistant", "system", "developer")
#: Fields of items that say how they came about. Clients send the items of earlier responses back as they got them.
_ORIGIN = frozenset({"type", "id", "status"})
_FIELDS = {
    "message": _ORIGIN | {"role", "content", "phase"},
    "function_call": _ORIGIN | {"call_id", "name", "arguments"},
    "function_call_output": _ORIGIN | {"call_id", "output"},
}
_TEXT_PARTS = ("input_text", "output_text", "text")


def read_input(value: Any, instructions: str | None) -> list[Message]:
    """Return the messages of a request; raise ApiError for an item or a part that is not supported.

    Instructions and leading system messages become one message: many templates accept no second one.
    """
    messages: list[Message] = []
    if instructions:
        messages.append({"role": "system", "content": instructions})
    if isinstance(value, str):
        return [*messages, {"role": "user", "content": value}]
    if not isinstance(value, list) or not value:
        raise _bad("input", f"input is {shown(value)}; give a text, or a list of at least one item")
    for index, item in enumerate(value):
        _add_item(messages, f"input.{index}", item)
    return messages


def _add_item(messages: list[Message], where: str, item: Any) -> None:
    kind = item.get("type", "message" if "role" in item else None) if isinstance(item, Mapping) else None
    if not isinstance(kind, str) or kind not in _FIELDS:
        accepted = ", ".join(_FIELDS)
        raise _bad(where, f"{where} is an item of type {shown(kind)}, which is not supported; accepted: {accepted}")
    for name, value in item.items():
        if name not in _FIELDS[kind] and value is not None:
            raise _bad(f"{where}.{name}", f"{where} has {shown(name)}, which is not supported; leave it out")
    last = messages[-1] if messages else {}
    if kind == "message":
        role = item.get("role")
        if role not in _ROLES:
            raise _bad(f"{where}.role", f"{where} has the role {shown(role)}; accepted: {', '.join(_ROLES)}")
        text = _text(f"{where}.content", item.get("content"))
        role = "system" if role == "developer" else role
        if role == "system" and len(messages) == 1 and last["role"] == "system":
            last["content"] += f"\n\n{text}"
        else:
            messages.append({"role": role, "content": text})
    elif kind == "function_call":
        for name in ("call_id", "name", "arguments"):
            _check_string(where, item, name)
        function = {"name": item["name"], "arguments": item["arguments"]}
        call = {"id": item["call_id"], "type": "function", "function": function}
        if last.get("role") == "assistant":  # the calls of one answer are one message
            last.setdefault("tool_calls", []).append(call)
        else:
            messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
    else:
        _check_string(where, item, "call_id")
        output = _text(f"{where}.output", item.get("output"))
        messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": output})


def _check_string(where: str, item: Mapping[str, Any], name: str) -> None:
    if not isinstance(item.get(name), str):
        raise _bad(f"{where}.{name}", f"{name} of {where} is {shown(item.get(name))}; give a text")


def _text(where: str, content: Any) -> str:
    """Return the text of a content, which is a string or a list of parts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _bad(where, f"{where} is {shown(content)}; give a text, or a list of parts")
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind not in _TEXT_PARTS:
            raise _bad(f"{where}.{index}", f"{where}.{index} is a part of type {shown(kind)}; only text is supported")
        if not isinstance(part.get("text"), str):
            raise _bad(f"{where}.{index}.text", f"text of {where}.{index} is {shown(part.get('text'))}; give a text")
        texts.append(part["text"])
    return "".join(texts)


def _bad(param: str, message: str) -> ApiError:
    return ApiError(message, param=param, code="unsupported" if "supported" in message else "invalid_value")
