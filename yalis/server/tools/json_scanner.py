"""Checks JSON while it is generated, one character at a time."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

SPACE = frozenset(" \t\r\n")
_SCALAR = re.compile(r"true|false|null|-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
_SCALAR_START = frozenset("-0123456789tfn")
_SCALAR_END = frozenset(" \t\r\n,]}")
_HEX = frozenset("0123456789abcdefABCDEF")


class JsonError(ValueError):
    """The text is no JSON."""


class JsonScanner:
    """Reads one object, array or string. `done` is true after its last character."""

    def __init__(self) -> None:
        self.done = False
        self.held = ""  # a number or a word that may continue
        self._closing: list[str] = []  # the brackets that close the open arrays and objects
        self._state: Callable[[str], str] = self._value
        self._in_key = False
        self._hex_digits = 0

    def feed(self, char: str) -> str:
        """Read a character and return the text that is now known to be JSON; raise JsonError if it is none.

        Control characters in strings, such as line breaks, are returned as escapes.
        """
        if self.done or not char:
            raise JsonError
        return self._state(char)

    def _value(self, char: str) -> str:
        if char in SPACE:
            return char
        if char == "{":
            self._closing.append("}")
            self._state = self._first_key
        elif char == "[":
            self._closing.append("]")
            self._state = self._first_item
        elif char == '"':
            self._state = self._string
        elif char in _SCALAR_START and self._closing:
            self.held, self._state = char, self._scalar
            return ""
        else:
            raise JsonError
        return char

    def _first_item(self, char: str) -> str:
        return self._close(char) if char == "]" else self._value(char)

    def _first_key(self, char: str) -> str:
        return self._close(char) if char == "}" else self._key(char)

    def _key(self, char: str) -> str:
        if char == '"':
            self._in_key, self._state = True, self._string
        elif char not in SPACE:
            raise JsonError
        return char

    def _colon(self, char: str) -> str:
        if char == ":":
            self._state = self._value
        elif char not in SPACE:
            raise JsonError
        return char

    def _after_value(self, char: str) -> str:
        if char == self._closing[-1]:
            return self._close(char)
        if char == ",":
            self._state = self._key if self._closing[-1] == "}" else self._value
        elif char not in SPACE:
            raise JsonError
        return char

    def _close(self, char: str) -> str:
        self._closing.pop()
        self._end_value()
        return char

    def _end_value(self) -> None:
        self.done = not self._closing
        self._state = self._after_value

    def _scalar(self, char: str) -> str:
        if char not in _SCALAR_END:
            self.held += char
            return ""
        if not _SCALAR.fullmatch(self.held):
            raise JsonError
        self._end_value()
        text = self.held + self._after_value(char)
        self.held = ""
        return text

    def _string(self, char: str) -> str:
        if char == "\\":
            self._state = self._escape
        elif char == '"':
            if self._in_key:
                self._in_key, self._state = False, self._colon
            else:
                self._end_value()
        elif char < " ":
            return json.dumps(char)[1:-1]
        return char

    def _escape(self, char: str) -> str:
        if char == "u":
            self._hex_digits, self._state = 4, self._unicode_escape
        elif char in '"\\/bfnrt':
            self._state = self._string
        else:
            raise JsonError
        return char

    def _unicode_escape(self, char: str) -> str:
        if char not in _HEX:
            raise JsonError
        self._hex_digits -= 1
        if not self._hex_digits:
            self._state = self._string
        return char
