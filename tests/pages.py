"""README, CONTRIBUTING and docs/ as pages: their prose, code blocks and commands."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]

_BLOCK = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.M | re.S)
_SPAN = re.compile(r"(?<!`)`([^`]+)`(?!`)")
#: The first word of a code span that is a command; variables may come before it.
_PROGRAMS = (
    "yalis|make|curl|pip|hf|git|python|pytest|torchrun|mpirun|srun|sbatch|nsys|bash|benchmarks/[a-z_]+\\.(?:sh|py)"
)
_COMMAND = re.compile(rf"(?:[A-Z_]+=\S* )*(?:\.venv/bin/)?(?:{_PROGRAMS}) \S")
#: Names a verb or a target; not meant to be typed as it is.
_NAME = re.compile(r"yalis [a-z]+( [a-z]+)?|make [a-z-]+")


class Block(NamedTuple):
    language: str
    text: str
    start: int  # offset in the page


def blocks(page: Path) -> list[Block]:
    """Return the fenced code blocks of a page, without the indentation of the list item they are in."""
    found = _BLOCK.finditer(page.read_text())
    return [Block(m[2], re.sub(f"^{m[1]}", "", m[3], flags=re.M), m.start()) for m in found]


def without_code(page: Path) -> str:
    return _BLOCK.sub("", page.read_text())


def spans(page: Path) -> Iterator[tuple[int, str]]:
    """Yield the offset and the text of each inline code span, on one line."""
    text = _BLOCK.sub(lambda block: " " * len(block[0]), page.read_text())
    for found in _SPAN.finditer(text):
        yield found.start(), " ".join(found[1].split())


def names(page: Path) -> list[str]:
    """Return the code spans that name a verb of `yalis` or a target of `make`."""
    return [span for _, span in spans(page) if _NAME.fullmatch(span)]


def steps(page: Path) -> list[Block]:
    """Return what a reader of the page would run, in order: one `sh` block per command, and the `python` blocks."""
    found = [Block("sh", span, at) for at, span in spans(page) if _COMMAND.match(span) and not _NAME.fullmatch(span)]
    for block in blocks(page):
        if block.language == "python":
            found.append(block)
        elif block.language == "sh":
            for line in re.sub(r"\\\n\s*", "", block.text).splitlines():
                if command := re.sub(r"(^|\s+)#.*", "", line):
                    found.append(Block("sh", command, block.start))
    return sorted(found, key=lambda step: step.start)
