"""Find results and write the report: an HTML page with every plot, its table and its command, readable offline.

Results of one machine may share a plot. Results of different machines never do, and no ratio is made of them.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from yalis.engine.interrupts import if_stopped, interrupts_held
from yalis.errors import YalisError, YalisFailure
from yalis.study import results
from yalis.study.report.page import list_plots, make_page, name_machines, render_card, render_section
from yalis.study.results import KINDS, StoredResult, drawing, kind_of
from yalis.study.results.card import Card, Section


def find_results(paths: Sequence[Path], on_skip: Callable[[str], None]) -> list[StoredResult]:
    """Return the results in these files and folders, each once.

    A folder may hold other JSON files: `on_skip` is called with the reason for each that is left out."""
    found: dict[Path, StoredResult] = {}
    for path in paths:
        for source in _find_in_folder(path, on_skip) if path.is_dir() else [StoredResult(path, results.read(path))]:
            found.setdefault(source.path.resolve(), source)
    if not found:
        names = ", ".join(map(str, paths))
        raise YalisError(f"there is no result in {names}; give files that a yalis benchmark wrote, or their folder")
    return list(found.values())


def _find_in_folder(folder: Path, on_skip: Callable[[str], None]) -> list[StoredResult]:
    """Return the results in a folder and its sub-folders, without those that another one supersedes."""
    found: list[StoredResult] = []
    for path in sorted(folder.rglob("*.json")):
        try:
            found.append(StoredResult(path, results.read(path)))
        except YalisError as error:
            on_skip(str(error))
    superseded: set[Path] = set()
    for name, kind in KINDS.items():
        superseded |= kind.superseded([source for source in found if source.result.kind == name])
    return [source for source in found if source.path not in superseded]


def write_report(found: Sequence[StoredResult], page: Path, title: str) -> tuple[Path, list[Path]]:
    """Write the page, and its plots as PNG and SVG into a folder next to it. Returns the paths of page and plots.

    Plots that only the previous page had are removed. No file is changed before everything is drawn."""
    _check_page(page)
    machines: list[dict[str, Any]] = []
    for source in found:
        machines += [one for one in kind_of(source.result).machines(source.result) if one not in machines]
    found = sorted(found, key=lambda source: machines.index(kind_of(source.result).machines(source.result)[0]))
    found = [
        replace(source, result=kind_of(source.result).renumber_machines(source.result, machines)) for source in found
    ]
    sections = make_sections(found)
    names = iter(_name_cards([card for _, cards in sections for card in cards]))
    plots: list[Path] = []
    parts = []
    try:
        with TemporaryDirectory(prefix="yalis-report-") as temporary:
            for section, cards in sections:
                rendered = []
                for card in cards:
                    name, svg = next(names), ""
                    if card.draw is not None:
                        figure = card.draw()
                        svg = drawing.to_inline_svg(figure, name)
                        notes = [*card.notes, *name_machines(card, machines)]
                        plots += drawing.save(figure, Path(temporary) / name, f"{section.title}: {card.title}", notes)
                    rendered.append(render_card(card, name, svg, machines))
                parts.append(render_section(section, rendered))
            text = make_page(title, found, machines, parts)
            with if_stopped(f"{page} is complete"), interrupts_held():
                return page, _replace(page, text, plots)
    except OSError as error:
        raise YalisFailure(f"cannot write {error.filename or page}: {error.strerror}; give another --output") from error


def make_sections(found: Sequence[StoredResult]) -> list[tuple[Section, list[Card]]]:
    """Return the sections that have cards, in the order of the kinds."""
    sections: dict[Section, list[Card]] = {}
    for name, kind in KINDS.items():
        if sources := [source for source in found if source.result.kind == name]:
            sections.setdefault(kind.section, []).extend(kind.cards(sources))
    return list(sections.items())


def _replace(page: Path, text: str, new_plots: Sequence[Path]) -> list[Path]:
    """Copy the new plots, write the page, and delete the plots that only the previous page had."""
    folder = page.with_name(f"{page.stem}-plots")
    old_names = list_plots(page.read_text(encoding="utf-8", errors="replace")) if page.is_file() else []
    folder.mkdir(parents=True, exist_ok=True)
    plots = [Path(shutil.copyfile(plot, folder / plot.name)) for plot in new_plots]
    page.write_text(text, encoding="utf-8")
    for path in {folder / f"{name}.{suffix}" for name in old_names for suffix in ("png", "svg")} - set(plots):
        path.unlink(missing_ok=True)
    return plots


def _name_cards(cards: Sequence[Card]) -> list[str]:
    """Name each card after its result file, or its kind if it shows several. Equal names are numbered."""
    plain_names = [card.sources[0].path.stem if len(card.sources) == 1 else card.kind for card in cards]
    plain_names = [re.sub(r"[^\w.-]+", "-", name) for name in plain_names]  # they are used in URLs
    names: list[str] = []
    for plain in plain_names:
        name, number = plain, 1
        while name in names or (number > 1 and name in plain_names):
            number += 1
            name = f"{plain}-{number}"
        names.append(name)
    return names


def _check_page(page: Path) -> None:
    if page.suffix != ".html":
        raise YalisError(f"--output is {page}, which is not an HTML file; give a name that ends in .html")
    drawing.require_matplotlib()
