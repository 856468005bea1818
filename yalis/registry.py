"""Named implementations that are imported on first use."""

from __future__ import annotations

from importlib import import_module
from typing import Any, Generic, TypeVar

from yalis.errors import YalisError

T = TypeVar("T")


class Registry(Generic[T]):
    """Maps a name that a user types to "module:attribute"; the module is imported on first use."""

    def __init__(self, what: str, entries: dict[str, str]) -> None:
        self.what = what
        self._entries = dict(entries)

    def names(self) -> list[str]:
        return list(self._entries)

    def load(self, name: str) -> T:
        if name not in self._entries:
            raise YalisError(f"unknown {self.what} {name!r}; accepted: {', '.join(self.names())}")
        module, _, attribute = self._entries[name].partition(":")
        loaded: Any = getattr(import_module(module), attribute)
        return loaded
