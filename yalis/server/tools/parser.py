"""Finds tool calls in a text while it is generated.

A parser reads one character at a time, so its result does not depend on how the text is cut. Text that is no
well-formed call of one of the request's tools is content. What has been delivered is never taken back: if the JSON of
arguments becomes invalid after their beginning was delivered, the call has only this beginning, and the rest is
content.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Generator
from dataclasses import dataclass
from typing import TypeVar

from yalis.server.tools.deltas import ArgumentsDelta, CallStart, ContentDelta, ParsedDelta
from yalis.server.tools.json_scanner import SPACE, JsonError, JsonScanner

_Value = TypeVar("_Value")
#: A part of a parser, and what it returns. `yield` moves on to the next character of the text.
_Reader = Generator[None, None, _Value]
_ARGUMENT_KEYS = ("arguments", "parameters")
_OTHER_KEYS = ("type", "id")  # some models write them, as in the API's form of a call
_NAME_CHARS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.-")


class _NoCallError(Exception):
    """The text that was read is no call."""


@dataclass
class _Call:
    """A call while it is read."""

    name: str | None = None
    arguments: str | None = None  # read, but not delivered; None before they begin
    started: bool = False  # whether its beginning was delivered


class ToolCallParser:
    """Splits a generated text into content and calls of the tools with the given names.

    max_calls: later calls are dropped; None: no limit
    new_id: makes the id of a call

    The subclasses read the calls of a format.
    """

    marker = ""  #: the text before calls

    def __init__(self, names: Collection[str], new_id: Callable[[], str], max_calls: int | None = None) -> None:
        self._names, self._new_id, self._max_calls = frozenset(names), new_id, max_calls
        self._deltas: list[ParsedDelta] = []
        self._num_calls = 0
        self._space = ""  # the end of the content so far; dropped if a call or the end of the text follows
        self._char = ""  # the character to read next; empty at the end of the text
        self._undecided = ""  # neither content nor part of a call yet; ends with _char
        self._call = _Call()
        self._reader = self._read_text()

    @property
    def num_calls(self) -> int:
        """The calls that were found so far, including dropped ones."""
        return self._num_calls

    def feed(self, text: str) -> list[ParsedDelta]:
        """Read more text and return what is now certain."""
        for char in text:
            self._char = char
            self._undecided += char
            next(self._reader)
        return self._take_deltas()

    def finish(self) -> list[ParsedDelta]:
        """Return the rest at the end of the text; no text may follow."""
        self._char = ""
        next(self._reader, None)
        if not self._num_calls:
            self._deltas.append(ContentDelta(self._space))
        return self._take_deltas()

    def _take_deltas(self) -> list[ParsedDelta]:
        """Return the deltas since the last call, those of the same kind that follow each other as one."""
        joined: list[ParsedDelta] = []
        for delta in self._deltas:
            last = joined[-1] if joined else None
            if isinstance(delta, ContentDelta) and isinstance(last, ContentDelta):
                joined[-1] = ContentDelta(last.text + delta.text)
            elif isinstance(delta, ArgumentsDelta) and isinstance(last, ArgumentsDelta) and last.index == delta.index:
                joined[-1] = ArgumentsDelta(last.index, last.text + delta.text)
            elif isinstance(delta, CallStart) or delta.text:
                joined.append(delta)
        self._deltas = []
        return joined

    def _read_text(self) -> _Reader[None]:
        while self._char:
            if (yield from self._read_content()):
                yield from self._read_region()

    def _read_content(self) -> _Reader[bool]:
        """Read up to and including the next marker; return False at the end of the text."""
        while self._char:
            while not self.marker.startswith(self._undecided):
                self._add_content(self._undecided[0])
                self._undecided = self._undecided[1:]
            found = self._undecided == self.marker
            yield
            if found:
                return True
        self._reject()
        return False

    def _read_region(self) -> _Reader[None]:
        """Read calls after a marker. What is no call becomes content."""
        try:
            yield from self._read_calls()
        except (_NoCallError, JsonError):
            self._reject()

    def _read_calls(self) -> _Reader[None]:
        raise NotImplementedError

    def _accept(self) -> None:
        """Drop the undecided text, which is part of a call."""
        self._undecided = self._char

    def _reject(self) -> None:
        """Make the undecided text content, except for the character to read next."""
        self._add_content(self._undecided[: len(self._undecided) - len(self._char)])
        self._undecided = self._char

    def _add_content(self, text: str) -> None:
        text = self._space + text
        visible = text.rstrip(" \t\r\n")
        self._space = text[len(visible) :]
        self._deltas.append(ContentDelta(visible))

    # Parts of calls. Each begins with `_char`, and leaves the character after its end there.

    def _skip_space(self) -> _Reader[None]:
        while self._char in SPACE:
            yield

    def _read_literal(self, text: str) -> _Reader[None]:
        for char in text:
            if self._char != char:
                raise _NoCallError
            yield

    def _read_string(self) -> _Reader[str]:
        """Read a JSON string and return its value."""
        if self._char != '"':
            raise _NoCallError
        scanner, text = JsonScanner(), ""
        while not scanner.done:
            if self._char < " ":  # also at the end of the text
                raise _NoCallError
            text += scanner.feed(self._char)
            yield
        value: str = json.loads(text)
        return value

    def _read_list(self) -> _Reader[None]:
        """Read an array of call objects."""
        yield from self._read_literal("[")
        while True:
            yield from self._skip_space()
            yield from self._read_object()
            yield from self._skip_space()
            if self._char != ",":
                break
            yield
        yield from self._read_literal("]")
        self._accept()

    def _read_object(self) -> _Reader[None]:
        """Read {"name": ..., "arguments": {...}}; the last bracket may be missing."""
        self._call = _Call()
        yield from self._read_literal("{")
        while True:
            yield from self._skip_space()
            yield from self._read_entry()
            yield from self._skip_space()
            if self._char != ",":
                break
            yield
        if self._char == "}":
            if self._call.name is None:
                raise _NoCallError
            if self._call.arguments is None:
                self._add_arguments("{}")
            yield
        elif not self._call.started:
            raise _NoCallError
        self._accept()

    def _read_entry(self) -> _Reader[None]:
        """Read a key and its value in a call object."""
        key = yield from self._read_string()
        yield from self._skip_space()
        yield from self._read_literal(":")
        yield from self._skip_space()
        if key == "name" and self._call.name is None:
            name = yield from self._read_string()
            self._set_name(name)
        elif key in _ARGUMENT_KEYS and self._call.arguments is None:
            yield from self._read_arguments()
        elif key in _OTHER_KEYS:
            yield from self._read_string()
        else:
            raise _NoCallError
        self._accept_delivered()

    def _read_arguments(self) -> _Reader[None]:
        """Read the arguments: an object, null, or a string that contains an object."""
        if self._char == "n":
            yield from self._read_literal("null")
            self._add_arguments("{}")
        elif self._char == '"':
            text = yield from self._read_string()
            try:
                if not isinstance(json.loads(text), dict):
                    raise _NoCallError
                text.encode()  # half a surrogate pair is no text
            except (ValueError, RecursionError):
                raise _NoCallError from None
            self._add_arguments(text)
        elif self._char == "{":
            scanner = JsonScanner()
            while self._char and not scanner.done:
                text = scanner.feed(self._char)
                self._add_arguments(text)
                yield
                if text:
                    self._accept_delivered()
            if not scanner.done:  # the text ends inside of the arguments
                self._add_arguments(scanner.held)
        else:
            raise _NoCallError

    def _set_name(self, name: str) -> None:
        if name not in self._names:
            raise _NoCallError
        self._call.name = name
        if self._call.arguments is not None:
            self._add_arguments("")

    def _add_arguments(self, text: str) -> None:
        """Add to the arguments of the call, and deliver them once its name is known."""
        call = self._call
        call.arguments = (call.arguments or "") + text
        if call.name is None:
            return
        if not call.started:
            call.started = True
            self._space = ""
            self._num_calls += 1
            self._deliver(CallStart(self._num_calls - 1, self._new_id(), call.name))
        self._deliver(ArgumentsDelta(self._num_calls - 1, call.arguments))
        call.arguments = ""

    def _accept_delivered(self) -> None:
        """Drop the undecided text if it was delivered as a part of the call."""
        if self._call.started:
            self._accept()

    def _deliver(self, delta: CallStart | ArgumentsDelta) -> None:
        if self._max_calls is None or delta.index < self._max_calls:
            self._deltas.append(delta)


class HermesParser(ToolCallParser):
    """<tool_call>{"name": ..., "arguments": {...}}</tool_call>, with one object, several, or an array of them."""

    marker = "<tool_call>"

    def _read_calls(self) -> _Reader[None]:
        yield from self._skip_space()
        if self._char == "[":
            yield from self._read_list()
            yield from self._skip_space()
        else:
            yield from self._read_object()
            yield from self._skip_space()
            while self._char == "{":
                yield from self._read_object()
                yield from self._skip_space()
        if self._char:  # a call at the end of the text is complete without its end mark
            yield from self._read_literal("</tool_call>")
        self._accept()


class LlamaParser(ToolCallParser):
    """{"name": ..., "parameters": {...}}, separated by semicolons, at the start or after <|python_tag|>."""

    marker = "<|python_tag|>"

    def _read_text(self) -> _Reader[None]:
        yield from self._skip_space()
        if self._char == "{":
            yield from self._read_region()
        else:
            self._reject()
        yield from super()._read_text()

    def _read_calls(self) -> _Reader[None]:
        yield from self._skip_space()
        while True:
            yield from self._read_object()
            yield from self._skip_space()
            if self._char == ";":
                yield
                yield from self._skip_space()
            if not self._char:
                self._accept()
                return


class MistralParser(ToolCallParser):
    """[TOOL_CALLS][{"name": ..., "arguments": {...}}], or [TOOL_CALLS]name[ARGS]{...} of newer models."""

    marker = "[TOOL_CALLS]"

    def _read_calls(self) -> _Reader[None]:
        yield from self._skip_space()
        if self._char == "[":
            yield from self._read_list()
        elif self._char == "{":
            yield from self._read_object()
        else:
            yield from self._read_named()

    def _read_named(self) -> _Reader[None]:
        """Read name{...}, name[ARGS]{...} or name[CALL_ID]id[ARGS]{...}."""
        self._call = _Call()
        name = yield from self._read_word()
        yield from self._skip_space()
        if self._char == "[":
            yield
            if self._char == "C":
                yield from self._read_literal("CALL_ID]")
                yield from self._read_word()
                yield from self._read_literal("[")
            yield from self._read_literal("ARGS]")
            yield from self._skip_space()
        if self._char != "{":
            raise _NoCallError
        self._set_name(name)
        yield from self._read_arguments()
        self._accept()

    def _read_word(self) -> _Reader[str]:
        word = ""
        while self._char in _NAME_CHARS:
            word += self._char
            yield
        return word
