"""Typed access to the keys of a config.json, with one sentence for each invalid value."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from yalis.errors import YalisError


class ConfigReader:
    """Typed access to the keys of a config.json. A missing key and null both mean the default."""

    def __init__(self, config: Mapping[str, Any], label: str) -> None:
        self.config, self.label = config, label

    def integer(self, key: str, default: int | None = None, maximum: int = 2**32) -> int:
        """Return a whole number from 1 to `maximum`. A value above it would only exhaust memory or time."""
        value = self.config.get(key)
        value = default if value is None else value
        if value is None:
            raise YalisError(f"the config of {self.label} has no {key}; add it, as in the original model's config.json")
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise YalisError(f"{key} in {self.label} is {value!r}; it must be a whole number of at least 1")
        if value > maximum:
            raise YalisError(f"{key} in {self.label} is {value}; it must be at most {maximum}")
        return value

    def count(self, key: str, default: int) -> int:
        """Return a whole number from 0."""
        value = self.config.get(key)
        return 0 if type(value) is int and value == 0 else self.integer(key, default)

    def number(self, key: str, default: float) -> float:
        value = self.config.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise YalisError(f"{key} in {self.label} is {value!r}; it must be a number")
        return float(value)

    def positive(self, key: str, default: float) -> float:
        value = self.number(key, default)
        if not 0 < value < math.inf:
            raise YalisError(f"{key} in {self.label} is {value:g}; it must be above 0")
        return value

    def optional_number(self, key: str) -> float | None:
        return None if self.config.get(key) is None else self.number(key, 0.0)

    def flag(self, key: str) -> bool:
        value = self.config.get(key)
        if value is not None and not isinstance(value, bool):
            raise YalisError(f"{key} in {self.label} is {value!r}; it must be true or false")
        return bool(value)
