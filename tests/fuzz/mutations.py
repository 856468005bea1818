"""Mutations of JSON values and of bytes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from copy import deepcopy
from random import Random
from typing import Any


class Raw(str):
    """JSON text that is written unchanged, for text that json.dumps does not produce."""


class Pairs(list[tuple[str, Any]]):
    """A JSON object as a list of pairs, which may repeat a key."""


#: Numbers around the limits of C integers, of memory and of what a model can have.
NUMBERS: tuple[Any, ...] = (
    *(0, 1, 2, 3, 7, -1, -(2**31), 2**15, 2**20, 2**31 - 1, 2**31, 2**32, 600_000_000, 2**40, 2**53 + 1),
    *(2**63 - 1, 2**63, 2**64 - 1, 2**64, -(2**63) - 1, 10**30, 10**400),
    *(0.0, -0.0, 0.5, 1.5, -2.5, 1e-320, 1e-45, 1e308, -1e308),
    *map(Raw, ("NaN", "Infinity", "-Infinity", "1e999", "-1e999", "1E400", "-0", "9" * 5000, "0." + "3" * 5000)),
)
STRINGS = (
    *("", "x", "0", "1e9", "true", "NaN", "\0", "\ud800", "\udfff\ud800", "é", "💥" * 300, "%s%n{0}{x}", "\x1b[2J\r\n"),
    *("é" * 20_000, "a" * 100_000, "../../../../etc/passwd", "/dev/zero", "/proc/self/mem", ".", "a/../b", "x" * 255),
    *("LlamaForCausalLM", "Gemma2ForCausalLM", "llama3", "longrope", "yarn", "float64", "__class__", "F64", "I4"),
)


def _containers(rng: Random) -> Any:
    depth = rng.choice((2, 50, 900, 60_000))
    return rng.choice(
        (
            [], {}, [[]], [None], {"": {}}, [0] * 7, [0] * 100_000, [1e400, "a", None, {}], {"a": [{"b": {}}]},
            Raw("[" * depth + "]" * depth), Raw('{"a":' * depth + "1" + "}" * depth), Raw("[" * depth),
        )
    )  # fmt: skip


def extreme(rng: Random) -> Any:
    """Return a value that no field expects."""
    kind = rng.random()
    if kind < 0.5:
        return rng.choice(NUMBERS)
    return rng.choice((None, True, False)) if kind < 0.6 else rng.choice(STRINGS) if kind < 0.8 else _containers(rng)


def _replacement(old: Any, rng: Random) -> Any:
    """Return an extreme value, often one of the type of the old value."""
    if rng.random() < 0.4:
        if isinstance(old, str):
            return rng.choice(STRINGS)
        if isinstance(old, (int, float)) and not isinstance(old, bool):
            return rng.choice(NUMBERS)
    return extreme(rng)


def _nodes(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield (container, key) of every value inside `value`, which has Pairs instead of dicts."""
    if isinstance(value, Pairs):
        for index, (_, inner) in enumerate(value):
            yield value, index
            yield from _nodes(inner)
    elif isinstance(value, list):
        for index, inner in enumerate(value[:64]):
            yield value, index
            yield from _nodes(inner)


def _get(container: Any, index: int) -> Any:
    return container[index][1] if isinstance(container, Pairs) else container[index]


def _set(container: Any, index: int, value: Any) -> None:
    container[index] = (container[index][0], value) if isinstance(container, Pairs) else value


def to_pairs(value: Any) -> Any:
    """Return a copy of a JSON value with Pairs instead of dicts."""
    if isinstance(value, dict):
        return Pairs((key, to_pairs(inner)) for key, inner in value.items())
    return [to_pairs(inner) for inner in value] if isinstance(value, list) else value


def mutate_json(value: Any, rng: Random) -> Any:
    """Return a copy of a JSON value with one to four changes; the result is for `dump`."""
    value = to_pairs(value)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        nodes = list(_nodes(value))
        if not nodes or rng.random() < 0.02:
            return extreme(rng)
        _mutate_node(*rng.choice(nodes), nodes, rng)
    return value


def _mutate_node(container: Any, index: int, nodes: list[tuple[Any, Any]], rng: Random) -> None:
    old = _get(container, index)
    action = rng.choice(("extreme", "extreme", "extreme", "arithmetic", "other", "remove", "repeat", "key", "wrap"))
    if action == "arithmetic" and isinstance(old, (int, float)) and not isinstance(old, bool):
        _set(container, index, rng.choice((old + 1, old - 1, -old, old * 2, old * 3, old // 3, old * 10**6)))
    elif action == "other":
        _set(container, index, deepcopy(_get(*rng.choice(nodes))))
    elif action == "remove":
        del container[index]
    elif action == "repeat":
        copy = (container[index][0], extreme(rng)) if isinstance(container, Pairs) else container[index]
        container.insert(rng.choice((index, index + 1)), copy)
    elif action == "key" and isinstance(container, Pairs):
        container[index] = (rng.choice((*STRINGS, container[index][0].upper())), old)
    elif action == "wrap":
        _set(container, index, rng.choice(([old], Pairs([("a", old)]), [old] * 3, str(old))))
    else:
        _set(container, index, _replacement(old, rng))


def dump(value: Any, ascii_only: bool = True) -> bytes:
    """Return the JSON text of a value with Raw and Pairs; lone surrogates are escaped, or written as invalid UTF-8."""
    parts: list[str] = []

    def write(value: Any) -> None:
        if isinstance(value, Raw):
            parts.append(value)
        elif isinstance(value, (Pairs, dict)):
            parts.append("{")
            for number, (key, inner) in enumerate(value.items() if isinstance(value, dict) else value):
                parts.append("," * bool(number) + json.dumps(key, ensure_ascii=ascii_only) + ":")
                write(inner)
            parts.append("}")
        elif isinstance(value, list):
            parts.append("[")
            for number, inner in enumerate(value):
                parts.append("," * bool(number))
                write(inner)
            parts.append("]")
        else:
            parts.append(json.dumps(value, ensure_ascii=ascii_only))

    write(value)
    return "".join(parts).encode("utf-8", "surrogatepass")


def mutate_bytes(data: bytes, rng: Random, limit: int | None = None) -> bytes:
    """Return the bytes with a few changes in the first `limit` of them: flips, truncation, repeats, other integers."""
    changed = bytearray(data)
    limit = len(data) if limit is None else limit
    for _ in range(rng.choice((1, 1, 2, 8))):
        size = min(limit, len(changed))
        at = rng.randrange(size) if size else 0
        action = rng.choice(("bit", "byte", "cut", "integer", "integer", "insert", "repeat", "remove"))
        if action == "bit" and size:
            changed[at] ^= 1 << rng.randrange(8)
        elif action == "byte" and size:
            changed[at] = rng.randrange(256)
        elif action == "cut":
            del changed[at:]
        elif action == "integer":
            width = rng.choice((4, 8))
            number = rng.choice([number for number in NUMBERS if isinstance(number, int)])
            changed[at : at + width] = (number % (1 << 8 * width)).to_bytes(width, rng.choice(("little", "big")))
        elif action == "insert":
            changed[at:at] = rng.choice((b"\0", b"\xff" * 8, b'"', b"[" * 60_000, b"\xed\xa0\x80", rng.randbytes(16)))
        elif action == "repeat":
            changed[at:at] = changed[at : at + rng.choice((1, 8, 200))] * rng.choice((1, 3, 50))
        else:
            del changed[at : at + rng.choice((1, 8, 200))]
    return bytes(changed)


def mutate_json_text(value: Any, rng: Random) -> bytes:
    """Return the text of a mutated JSON value; in about one of six, bytes of the text are mutated."""
    if rng.random() < 0.1:
        return mutate_bytes(dump(value), rng)
    text = dump(mutate_json(value, rng), ascii_only=rng.random() < 0.8)
    return mutate_bytes(text, rng) if rng.random() < 0.07 else text
