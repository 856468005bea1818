"""Reads the JSON files of a model. Their contents may come from anywhere, so every malformed file is a YalisError."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from yalis.errors import YalisError

_MAX_BYTES = 1 << 28  # the largest index of a model has a few megabytes
_MAX_DEPTH = 100  # levels of nesting; code that recurses over deeper values could exceed Python's recursion limit
_TOO_DEEP = f"has more than {_MAX_DEPTH} levels of nesting"


def read_json_object(path: Path, advice: str) -> dict[str, Any]:
    """Return the JSON object in a file. Raises YalisError if there is none; its message ends with `advice`."""
    try:
        if path.exists() and not path.is_file():
            raise YalisError(f"{path} is not a regular file; {advice}")
        if path.stat().st_size > _MAX_BYTES:
            raise YalisError(f"{path} has more than {_MAX_BYTES >> 20} MiB; {advice}")
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise YalisError(f"cannot read {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise YalisError(f"{path} is not valid JSON ({error}); {advice}") from error
    except RecursionError:
        raise YalisError(f"{path} {_TOO_DEEP}; {advice}") from None
    if _is_deeper(content, _MAX_DEPTH):
        raise YalisError(f"{path} {_TOO_DEEP}; {advice}")
    if not isinstance(content, dict):
        raise YalisError(f"{path} does not contain a JSON object; {advice}")
    return content


def _is_deeper(value: Any, levels: int) -> bool:
    if not isinstance(value, (dict, list)):
        return False
    parts = value.values() if isinstance(value, dict) else value
    return not levels or any(_is_deeper(part, levels - 1) for part in parts)
