"""Slurm's short forms: "node[01-03,7],gpu1" for nodes, "4(x2),1" for tasks per node."""

from __future__ import annotations

import re

from yalis.errors import YalisError


def expand_nodes(text: str) -> list[str]:
    """The host names of a Slurm node list, in its order."""
    return [name for part in _split(text.strip(), text) for name in _expand(part, text)]


def expand_counts(text: str) -> list[int]:
    """Tasks per node, one number for each node."""
    counts: list[int] = []
    for part in filter(None, text.strip().split(",")):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if not match:
            raise YalisError(f"{text!r} is not a Slurm list of tasks per node, as in 4(x2),1")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _split(text: str, whole: str) -> list[str]:
    """Cut at the commas outside brackets."""
    parts, depth, begin = [], 0, 0
    for index, char in enumerate(text):
        depth += (char == "[") - (char == "]")
        if depth not in (0, 1):
            raise _bad(whole)
        if char == "," and not depth:
            parts.append(text[begin:index])
            begin = index + 1
    if depth:
        raise _bad(whole)
    parts.append(text[begin:])
    if text and not all(parts):
        raise _bad(whole)
    return parts if text else []


def _expand(part: str, whole: str) -> list[str]:
    """The names that one part stands for; several brackets vary the last one fastest."""
    match = re.search(r"\[([^\]]*)\]", part)
    if not match:
        return [part]
    names = []
    for item in match[1].split(","):
        bounds = re.fullmatch(r"(\d+)(?:-(\d+))?", item.strip())
        if not bounds:
            raise _bad(whole)
        first, last = bounds[1], bounds[2] or bounds[1]
        numbers = range(int(first), int(last) + 1)
        if not numbers or len(numbers) > 1_000_000:
            raise _bad(whole)
        names += [part[: match.start()] + str(number).zfill(len(first)) for number in numbers]
    tails = _expand(part[match.end() :], whole)
    return [name + tail for name in names for tail in tails]


def _bad(text: str) -> YalisError:
    return YalisError(f"{text!r} is not a Slurm node list, as in node[01-03,7],gpu1")
