"""Status output on stderr: notes, and the formatting of durations and rates."""

from __future__ import annotations

import sys
from collections.abc import Container, Mapping
from typing import Any

from yalis.errors import count_of


def print_status(text: str) -> None:
    """Print a line for the user to stderr; stdout is for results."""
    print(f"yalis: {text}", file=sys.stderr, flush=True)


def format_duration(seconds: float) -> str:
    """Return "42s", "3m05s" or "2h07m"."""
    rounded = round(seconds)
    if rounded < 60:
        return f"{rounded}s"
    minutes, rest = divmod(rounded, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02}m" if hours else f"{minutes}m{rest:02}s"


def format_speed(tokens: int, seconds: float) -> str:
    rate = tokens / seconds if seconds > 0 else 0.0
    return f"{count_of(tokens, 'token')} in {seconds:.2f} s, {rate:.1f} tokens/s"


def report_model_defaults(defaults: Mapping[str, Any], given: Container[str]) -> None:
    """Print which sampling fields have the model's defaults, because no flag was given for them."""
    used = ", ".join(f"{name} {value}" for name, value in defaults.items() if name not in given)
    if used:
        print_status(f"from the model's generation_config.json: {used} (--generation-config none ignores it)")
