"""What a parser of tool calls finds in a generated text, as it is found, and the whole answer made from it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Union


@dataclass(frozen=True)
class ContentDelta:
    """More text of the answer outside of calls."""

    text: str


@dataclass(frozen=True)
class CallStart:
    """A call begins."""

    index: int  # from 0, in the order of the calls
    id: str
    name: str


@dataclass(frozen=True)
class ArgumentsDelta:
    """More of the JSON text with the arguments of a call."""

    index: int
    text: str


ParsedDelta = Union[ContentDelta, CallStart, ArgumentsDelta]


@dataclass
class ParsedCall:
    id: str
    name: str
    arguments: str = ""


@dataclass
class ParsedAnswer:
    """A whole answer."""

    content: str = ""
    calls: list[ParsedCall] = field(default_factory=list)


def join_deltas(deltas: Iterable[ParsedDelta]) -> ParsedAnswer:
    """Return the answer that the deltas make together."""
    answer = ParsedAnswer()
    content: list[str] = []
    arguments: list[list[str]] = []
    for delta in deltas:
        if isinstance(delta, ContentDelta):
            content.append(delta.text)
        elif isinstance(delta, CallStart):
            answer.calls.append(ParsedCall(delta.id, delta.name))
            arguments.append([])
        else:
            arguments[delta.index].append(delta.text)
    answer.content = "".join(content)
    for call, parts in zip(answer.calls, arguments, strict=True):
        call.arguments = "".join(parts)
    return answer
