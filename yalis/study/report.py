"""Results as one page: every plot with its table and the command that made it, readable without a network.

Results of one machine may stand in one figure; those of different machines never do, so no ratio joins them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from yalis import results
from yalis.errors import YalisError, YalisFailure
from yalis.study import figures
from yalis.study.report_cards import Given, make_sections
from yalis.study.report_page import make_page, show_card, show_section


def find_results(paths: Sequence[Path]) -> list[Given]:
    """The results that these files and folders hold, each once."""
    found: dict[Path, Given] = {}
    for path in paths:
        for file in _files(path):
            found.setdefault(file.resolve(), Given(file, results.read(file)))
    if not found:
        told = ", ".join(map(str, paths))
        raise YalisError(f"there is no result in {told}; give files, or folders of files, that a yalis benchmark wrote")
    return list(found.values())


def _files(path: Path) -> list[Path]:
    """A folder's JSON files, and those of folders inside; a scaling study speaks for the settings below it."""
    if not path.is_dir():
        return [path]
    files = sorted(path.glob("*.json"))
    if studies := [file for file in files if file.name.startswith("scaling")]:
        return [file for file in files if file not in studies[:-1]]  # told anew each time, so the last counts
    return [*files, *(file for folder in sorted(path.iterdir()) if folder.is_dir() for file in _files(folder))]


def write_report(found: Sequence[Given], page: Path, title: str) -> tuple[Path, list[Path]]:
    """Write the page, and its plots as PNG and SVG into a folder beside it; returns where."""
    _check_page(page)
    machines: list[dict[str, Any]] = []
    for given in found:
        if (machine := results.machine(given.result)) not in machines:
            machines.append(machine)
    folder = page.with_name(f"{page.stem}-plots")
    plots: list[Path] = []
    counts: dict[str, int] = {}
    parts = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for section in make_sections(found):
            cards = []
            for card in section.cards:
                counts[card.kind] = counts.get(card.kind, 0) + 1
                name = card.kind if counts[card.kind] == 1 else f"{card.kind}-{counts[card.kind]}"
                drawing = ""
                if card.draw is not None:
                    figure = card.draw()
                    drawing = figures.inline(figure, name)
                    plots += figures.save(figure, folder / name, f"{section.title}: {card.title}", card.drawn_notes)
                cards.append(show_card(card, name, drawing, machines))
            parts.append(show_section(section, cards))
        page.write_text(make_page(title, found, machines, parts), encoding="utf-8")
    except OSError as error:
        raise YalisFailure(f"cannot write {error.filename or page}: {error.strerror}; give another --output") from error
    return page, plots


def _check_page(page: Path) -> None:
    if page.suffix != ".html":
        raise YalisError(f"--output is {page}, which is no page; give a name that ends in .html")
    figures.need_matplotlib()
