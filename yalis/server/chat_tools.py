"""Tools in /v1/chat/completions: the messages and chunks of answers that may contain calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from yalis.openai_api import finish_reason
from yalis.server.answers import encode
from yalis.server.protocol import ChatRequest, TokenizeRequest
from yalis.server.state import ServerState
from yalis.server.tools.definitions import read_choice, read_tools
from yalis.server.tools.deltas import CallStart, ContentDelta, ParsedDelta, join_deltas
from yalis.server.tools.parser import ToolCallParser
from yalis.server.tools.request import ToolRequest, tool_request
from yalis.types import Completion, RequestEvent


def chat_tools(state: ServerState, body: ChatRequest | TokenizeRequest) -> ToolRequest:
    """Return the tools of a request; raises FieldError if they are wrong."""
    tools, tokenizer = read_tools(body.tools), state.llm.tokenizer
    choice = read_choice(body.tool_choice, tools)
    return tool_request(tools, choice, body.parallel_tool_calls, tokenizer.hf.chat_template if tokenizer else None)


class AnswerParser:
    """Finds the calls in one choice of an answer, whole or as it is generated."""

    def __init__(self, tools: ToolRequest) -> None:
        self._parser: ToolCallParser | None = tools.parser()

    def message(self, completion: Completion) -> dict[str, Any]:
        """Return the message and the finish reason of a choice."""
        if self._parser is None:
            return {"message": _message(completion.text), "finish_reason": self.finish_reason(completion)}
        answer = join_deltas([*self._parser.feed(completion.text), *self._parser.finish()])
        message = _message(answer.content or (None if answer.calls else ""))
        if answer.calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in answer.calls
            ]
        return {"message": message, "finish_reason": self.finish_reason(completion)}

    def deltas(self, event: RequestEvent) -> list[str]:
        """Return the new deltas of a choice as JSON."""
        if self._parser is None:
            return [f'{{"content":{encode(event.text)}}}'] if event.text else []
        found: Sequence[ParsedDelta] = self._parser.feed(event.text)
        if event.completion is not None:
            found = [*found, *self._parser.finish()]
        return [encode(_delta(delta)) for delta in found]

    def finish_reason(self, completion: Completion) -> str:
        """Return the finish reason after the whole text was read."""
        called = self._parser is not None and self._parser.num_calls > 0
        reason = finish_reason(completion.finish_reason)
        return "tool_calls" if called and reason == "stop" else reason


def _message(content: str | None) -> dict[str, Any]:
    return {"role": "assistant", "content": content, "refusal": None, "annotations": []}


def _delta(delta: ParsedDelta) -> dict[str, Any]:
    if isinstance(delta, ContentDelta):
        return {"content": delta.text}
    if isinstance(delta, CallStart):
        call = {"id": delta.id, "type": "function", "function": {"name": delta.name, "arguments": ""}}
        return {"tool_calls": [{"index": delta.index, **call}]}
    return {"tool_calls": [{"index": delta.index, "function": {"arguments": delta.text}}]}
