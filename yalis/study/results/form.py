"""Declare the shape of JSON data and check values against it.

A form is one of:
- a type, or `Count` for a positive integer;
- `[form]`, a list of such values; `[form, ...]`, a list that is not empty;
- `{name: form}`, an object with at least these keys. A key ending in "?" is optional, and "*" means every key;
- `(form,)`, a value that may be null.
"""

from __future__ import annotations

import math
from typing import Any

Form = Any


class Count:
    """A positive integer."""


TYPE_NAMES: dict[type, str] = {
    Count: "a positive integer",
    float: "a number",
    int: "an integer",
    str: "a string",
    dict: "an object",
    list: "a list",
}


def find_mismatch(value: Any, form: Form, name: str = "") -> str:
    """Return the first mismatch as a phrase such as "no 'host.cores'"; empty if `value` matches the form."""
    if isinstance(form, tuple):
        return "" if value is None else find_mismatch(value, form[0], name)
    if isinstance(form, list):
        if not isinstance(value, (list, tuple)) or (len(form) > 1 and not value):
            return f"{_shorten(value)} as {name!r}; it should be a {'non-empty ' * (len(form) > 1)}list"
        return next((found for item in value if (found := find_mismatch(item, form[0], f"{name}[]"))), "")
    if isinstance(form, dict):
        return _find_mismatch_in_object(value, form, name)
    return "" if has_type(value, form) else f"{_shorten(value)} as {name!r}; it should be {TYPE_NAMES[form]}"


def _find_mismatch_in_object(value: Any, form: dict[str, Form], name: str) -> str:
    if not isinstance(value, dict):
        return f"{_shorten(value)} as {name!r}; it should be an object"
    for pattern, item_form in form.items():
        for key in value if pattern == "*" else [pattern.removesuffix("?")]:
            path = f"{name}.{key}" if name else key
            if key not in value:
                if key == pattern:
                    return f"no {path!r}"
            elif found := find_mismatch(value[key], item_form, path):
                return found
    return ""


def has_type(value: Any, expected: type) -> bool:
    """Check a JSON value's type. Numbers must be finite and integers fit 64 bits; an integer is a valid float."""
    if isinstance(value, bool):
        return expected is bool
    if expected in (int, Count):
        return isinstance(value, int) and (1 if expected is Count else -(2**63)) <= value < 2**63
    if expected is float:
        return has_type(value, int) or (isinstance(value, float) and math.isfinite(value))
    return isinstance(value, (list, tuple) if expected is list else expected)


def _shorten(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
