"""README and docs: links resolve, lines are wrapped, code is marked by language, and named verbs and targets exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.pages import PAGES, ROOT, blocks, names, without_code
from yalis.cli.main import build_parser
from yalis.cli.models import family_table

MAX_README_WORDS = 600
MAX_LINE = 120
LANGUAGES = {"sh", "python", "json", "text"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_page(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
    assert {block.language for block in blocks(page)} <= LANGUAGES
    prose = without_code(page)
    assert not re.findall(r"\n\n    .*", re.sub(r"^ *([-*]|\d+\.) .*?(?=\n\n\S|\Z)", "", prose, flags=re.M | re.S)), (
        "fence commands as ```sh, so that test_docs_commands.py finds them"
    )
    lines = [line for block in blocks(page) for line in block.text.split("\n")]
    lines += [line for line in prose.split("\n") if not line.startswith(("|", "!["))]
    assert [line for line in lines if len(line) > MAX_LINE] == []


def test_words_have_one_spelling() -> None:
    sources = [*PAGES, ROOT / "CHANGELOG.md", *(ROOT / "yalis").rglob("*.py")]
    found = [path.name for path in sources if re.search(r"quantis|\balias(es)? \(see|model alias", path.read_text())]
    assert found == []


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs" / "README.md").read_text()
    assert [page.name for page in (ROOT / "docs").glob("*.md") if f"({page.name})" not in index] == ["README.md"]


def test_the_readme_is_short() -> None:
    lines = without_code(ROOT / "README.md").split("\n")
    words = [word for line in lines if not line.startswith(("|", "![")) for word in line.split()]
    assert len(words) <= MAX_README_WORDS


def test_named_verbs_and_targets_exist() -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M)
    found = {name for page in PAGES for name in names(page)}
    for program, _, name in (name.partition(" ") for name in sorted(found)):
        if program == "make":
            assert name in targets
        else:
            with pytest.raises(SystemExit) as exit_:
                build_parser().parse_args([*name.split(), "--help"])
            assert exit_.value.code == 0
    assert len(found) > 10


def test_the_table_of_families_is_generated() -> None:
    page = (ROOT / "docs" / "models.md").read_text()
    table = "\n".join(line for line in page.split("## ")[1].split("\n") if line.startswith("|"))
    assert table == family_table(), "replace the table of docs/models.md with the output of `yalis models --markdown`"
