"""README and docs: links resolve, lines are wrapped, and the command line accepts every `yalis` command in them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from yalis.cli.main import build_parser
from yalis.families import FAMILIES

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
MAX_README_WORDS = 600
MAX_LINE = 120


def prose(text: str) -> str:
    """Return a page without code blocks, tables and images."""
    text = re.sub(r"```.*?```", "", text, flags=re.S)
    return "\n".join(line for line in text.split("\n") if not line.startswith(("    ", "|", "![")))


def commands(page: Path) -> Iterator[str]:
    """Yield the `yalis` commands of the code blocks of a page, without comments, launchers and pipes."""
    text = re.sub(r"\\\n\s*", "", page.read_text())
    for line in text.split("\n"):
        if line.startswith("    "):
            for part in re.split(r"\||&&", line.partition("  #")[0]):
                found = re.search(r"(?:^|\s)yalis (?=[a-z])(.*)", part)
                if found and "..." not in found[1].replace('"..."', ""):
                    yield found[1]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_page(page: Path) -> None:
    text = page.read_text()
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
    in_code = False
    for line in text.split("\n"):
        in_code ^= line.startswith("```")
        if not in_code and not line.startswith(("|", "![", "    ")):
            assert len(line) <= MAX_LINE, line


def test_words_have_one_spelling() -> None:
    sources = [*PAGES, ROOT / "CHANGELOG.md", *(ROOT / "yalis").rglob("*.py")]
    found = [path.name for path in sources if re.search(r"quantis|\balias(es)? \(see|model alias", path.read_text())]
    assert found == []


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs" / "README.md").read_text()
    assert [page.name for page in (ROOT / "docs").glob("*.md") if f"({page.name})" not in index] == ["README.md"]


def test_the_readme_is_short() -> None:
    assert len(prose((ROOT / "README.md").read_text()).split()) <= MAX_README_WORDS


def test_commands_are_accepted() -> None:
    parser, count = build_parser(), 0
    for page in PAGES:
        for command in commands(page):
            parser.parse_args(shlex.split(command))  # raises a YalisError that names the argument
            count += 1
    assert count > 30


def test_the_table_of_families_is_complete() -> None:
    page = (ROOT / "docs" / "models.md").read_text()
    for name, family in FAMILIES.items():
        assert f"| `{name}` | {family.models} |" in page
