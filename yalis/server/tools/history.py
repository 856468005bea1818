"""Messages with tools and tool calls, in the form that chat templates expect."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from yalis.errors import YalisError
from yalis.messages import check_messages
from yalis.server.tools.definitions import FieldError, Tool
from yalis.server.tools.formats import ToolFormat
from yalis.types import Message

_SHORT_ID = re.compile(r"[A-Za-z0-9]{9}")
#: A template that raises an exception about system messages does not accept any.
_NO_SYSTEM_MESSAGES = re.compile(r"raise_exception\([^)]*system role", re.IGNORECASE)
_INSTRUCTIONS = """\
You can call functions to answer. Each line within <tools></tools> describes one of them in JSON:
<tools>
{tools}
</tools>
To call a function, write its name and its arguments as JSON within <tool_call></tool_call>, and wait for the result:
<tool_call>
{{"name": "function name", "arguments": {{"parameter name": "value"}}}}
</tool_call>"""


def render_messages(
    messages: Sequence[Message], tools: Sequence[Tool], tool_format: ToolFormat, chat_template: str
) -> list[Message]:
    """Return the messages as the chat template expects them.

    Calls of earlier answers get their arguments as a mapping. If the template does not render tools, calls and their
    results become text, and a system message describes the tools. Raises FieldError for malformed messages.
    """
    try:
        return _render(check_messages(list(messages)), tools, tool_format, chat_template)
    except FieldError:
        raise
    except YalisError as error:
        raise FieldError("messages", str(error)) from error
    except RecursionError:
        raise FieldError("messages", "the messages or the tools are nested too deeply") from None


def _render(
    messages: Sequence[Message], tools: Sequence[Tool], tool_format: ToolFormat, chat_template: str
) -> list[Message]:
    cleaned = [_clean(f"messages[{index}]", message) for index, message in enumerate(messages)]
    if "developer" not in chat_template:  # the newer name of the role
        cleaned = [{**one, "role": "system"} if one.get("role") == "developer" else one for one in cleaned]
    if tool_format.described:
        described = _describe_calls(cleaned)
        return _add_instructions(described, tools, chat_template) if tools else described
    _name_results(cleaned)
    if tool_format.short_ids:
        _shorten_ids(cleaned)
    return list(_split_calls(cleaned)) if tool_format.single_call_messages else cleaned


def _clean(where: str, message: Message) -> Message:
    """Return a copy without the fields that are null, and with well-formed tool calls.

    Clients send messages back as they got them. Templates check whether a message has "tool_calls", not their value.
    """
    cleaned = {key: value for key, value in message.items() if value is not None}
    if not isinstance(cleaned.get("tool_call_id", ""), str):
        raise FieldError("messages", f"the tool_call_id of {where} is not a text; give the id of a call")
    calls = cleaned.pop("tool_calls", None)
    if not calls:
        return cleaned
    if message.get("role") != "assistant" or not isinstance(calls, list):
        raise FieldError("messages", f"{where} has tool_calls; only messages of the assistant have them, as a list")
    cleaned["tool_calls"] = [_clean_call(f"{where}.tool_calls[{i}]", call) for i, call in enumerate(calls)]
    cleaned.setdefault("content", "")  # some templates read it
    return cleaned


def _clean_call(where: str, call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise FieldError(
            "messages", f'{where} is malformed; give {{"id", "type", "function": {{"name", "arguments"}}}}'
        )
    id = call.get("id")
    if not isinstance(id, str):
        raise FieldError("messages", f"{where} has no id; give the id that the answer had")
    arguments = function.get("arguments", "{}")
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):  # of an answer that was cut off; templates print a text as it is
            arguments = json.loads(arguments or "{}")
    return {"id": id, "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def _calls(messages: Sequence[Message]) -> Iterator[dict[str, Any]]:
    for message in messages:
        yield from message.get("tool_calls", ())


def _name_results(messages: Sequence[Message]) -> None:
    """Give messages with results the name of the function that was called, which some templates read."""
    names = {call["id"]: call["function"]["name"] for call in _calls(messages)}
    for message in messages:
        if message.get("role") == "tool" and message.get("tool_call_id") in names:
            message.setdefault("name", names[message["tool_call_id"]])


def _shorten_ids(messages: Sequence[Message]) -> None:
    for call in _calls(messages):
        call["id"] = _short_id(call["id"])
    for message in messages:
        if isinstance(message.get("tool_call_id"), str):
            message["tool_call_id"] = _short_id(message["tool_call_id"])


def _short_id(id: str) -> str:
    return id if _SHORT_ID.fullmatch(id) else hashlib.sha256(id.encode("utf-8", "surrogatepass")).hexdigest()[:9]


def _split_calls(messages: Sequence[Message]) -> Iterator[Message]:
    """Yield a message for each call, and after it the result of the call."""
    index = 0
    while index < len(messages):
        message, index = messages[index], index + 1
        calls = message.get("tool_calls", ())
        if len(calls) < 2:
            yield message
            continue
        first = index
        while index < len(messages) and messages[index].get("role") == "tool":
            index += 1
        results = list(messages[first:index])
        for call in calls:
            yield {**message, "tool_calls": [call]}
            message = {**message, "content": ""}
            answers = [result for result in results if result.get("tool_call_id") == call["id"]]
            yield from answers
            results = [result for result in results if result not in answers]
        yield from results


def _describe_calls(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with calls and their results as text."""
    described: list[Message] = []
    results: list[str] = []
    for message in [*messages, None]:
        if message is not None and message.get("role") == "tool":
            results.append(f"<tool_response>\n{message['content']}\n</tool_response>")
            continue
        if results:
            described.append({"role": "user", "content": "\n".join(results)})
            results = []
        if message is not None:
            described.append(_describe_message(message))
    return described


def _describe_message(message: Message) -> Message:
    if "tool_calls" not in message:
        return message
    parts = [message["content"]] if message["content"] else []
    for call in message["tool_calls"]:
        parts.append(f"<tool_call>\n{json.dumps(call['function'], ensure_ascii=False)}\n</tool_call>")
    return {"role": "assistant", "content": "\n".join(parts)}


def _add_instructions(messages: Sequence[Message], tools: Sequence[Tool], chat_template: str) -> list[Message]:
    """Add the description of the tools to the system message, or to the first message if there cannot be one."""
    lines = [json.dumps(tool.as_template_variable(), ensure_ascii=False) for tool in tools]
    text = _INSTRUCTIONS.format(tools="\n".join(lines))
    first = messages[0]
    if first.get("role") in ("system", "developer"):
        return [{**first, "content": f"{first['content']}\n\n{text}"}, *messages[1:]]
    if _NO_SYSTEM_MESSAGES.search(chat_template) and first.get("role") == "user":
        return [{**first, "content": f"{text}\n\n{first['content']}"}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]
