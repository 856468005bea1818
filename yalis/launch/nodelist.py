"""Slurm's compact lists: "node[01-03,7],gpu1" for nodes, "4(x2),1" for tasks per node."""

from __future__ import annotations

import re

from yalis.errors import YalisError


def expand_nodes(text: str) -> list[str]:
    """Return the host names of a Slurm node list, in its order."""
    return [name for part in _split(text.strip(), text) for name in _expand(part, text)]


def expand_counts(text: str) -> list[int]:
    """Return the number of tasks of each node."""
    counts: list[int] = []
    for part in filter(None, text.strip().split(",")):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if not match:
            raise YalisError(f"{text!r} is not a Slurm list of tasks per node, as in 4(x2),1")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _split(text: str, whole: str) -> list[str]:
    """Split at the commas outside brackets. `whole` is the list for the error message."""
    parts, depth, begin = [], 0, 0
    for index, char in enumerate(text):
        depth += (char == "[") - (char == "]")
        if depth not in (0, 1):
            raise _invalid(whole)
        if char == "," and not depth:
            parts.append(text[begin:index])
            begin = index + 1
    if depth:
        raise _invalid(whole)
    parts.append(text[begin:])
    if text and not all(parts):
        raise _invalid(whole)
    return parts if text else []


def _expand(part: str, whole: str) -> list[str]:
    """Return the names of one part. With several brackets, the last one varies fastest."""
    match = re.search(r"\[([^\]]*)\]", part)
    if not match:
        return [part]
    names = []
    for item in match[1].split(","):
        bounds = re.fullmatch(r"(\d+)(?:-(\d+))?", item.strip())
        if not bounds:
            raise _invalid(whole)
        first, last = bounds[1], bounds[2] or bounds[1]
        numbers = range(int(first), int(last) + 1)
        if not numbers or len(numbers) > 1_000_000:
            raise _invalid(whole)
        names += [part[: match.start()] + str(number).zfill(len(first)) for number in numbers]
    tails = _expand(part[match.end() :], whole)
    return [name + tail for name in names for tail in tails]


def _invalid(text: str) -> YalisError:
    return YalisError(f"{text!r} is not a Slurm node list, as in node[01-03,7],gpu1")
