"""Results as one page: every plot with its table and the command that made it, readable without a network.

Results of one machine may stand in one figure; those of different machines never do, so no ratio joins them.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from yalis import results
from yalis.engine.interrupts import if_stopped, interrupts_held
from yalis.errors import YalisError, YalisFailure
from yalis.study import figures
from yalis.study.report_cards import Card, Given, machines_of, make_sections
from yalis.study.report_page import make_page, name_machines, plots_of, show_card, show_section
from yalis.study.requests import ThroughputPlan

_WORK = [one.name for one in fields(ThroughputPlan)]


def find_results(paths: Sequence[Path], skipped: Callable[[str], None]) -> list[Given]:
    """The results that these files and folders hold, each once; `skipped` hears of a folder's files that are none."""
    found: dict[Path, Given] = {}
    for path in paths:
        given = _in_folder(path, skipped) if path.is_dir() else [Given(path, results.read(path))]
        for one in given:
            found.setdefault(one.path.resolve(), one)
    if not found:
        told = ", ".join(map(str, paths))
        raise YalisError(f"there is no result in {told}; give files, or folders of files, that a yalis benchmark wrote")
    return list(found.values())


def _in_folder(folder: Path, skipped: Callable[[str], None]) -> list[Given]:
    """A folder's results, and those of folders inside.

    A study is told anew each time it is run, so its newest telling counts, and speaks for the settings it names.
    """
    found: list[Given] = []
    for path in sorted(folder.rglob("*.json")):
        try:
            found.append(Given(path, results.read(path)))
        except YalisError as error:
            skipped(str(error))
    newest: dict[str, Given] = {}
    studies = [given for given in found if given.result.kind == "scaling"]
    for given in sorted(studies, key=lambda given: results.age(given.path, given.result)):
        newest[_study(given)] = given
    told = {given.path.parent / row["file"] for given in newest.values() for row in given.result.rows if row["file"]}
    left = {given.path for given in studies} - {given.path for given in newest.values()}
    return [given for given in found if given.path not in told | left]


def _study(given: Given) -> str:
    """Equal for tellings of one study: those in one folder, of the same work and engine."""
    facts = {name: given.result.parameters.get(name) for name in ("engine", *_WORK)}
    return json.dumps([str(given.path.parent), facts], sort_keys=True)


def write_report(found: Sequence[Given], page: Path, title: str) -> tuple[Path, list[Path]]:
    """Write the page, and its plots as PNG and SVG into a folder beside it; returns where.

    Plots that only the page before it had are removed. Nothing is touched before all of it is drawn.
    """
    _check_page(page)
    machines: list[dict[str, Any]] = []
    for given in found:
        machines += [machine for machine in machines_of(given.result) if machine not in machines]
    together = sorted(found, key=lambda given: machines.index(machines_of(given.result)[0]))
    found = [_renumber(given, machines) for given in together]
    folder = page.with_name(f"{page.stem}-plots")
    drafts: list[Path] = []
    parts = []
    sections = make_sections(found)
    names = iter(_name_cards([card for section in sections for card in section.cards]))
    try:
        with TemporaryDirectory(prefix="yalis-report-") as aside:
            for section in sections:
                cards = []
                for card in section.cards:
                    name, drawing = next(names), ""
                    if card.draw is not None:
                        figure = card.draw()
                        drawing = figures.inline(figure, name)
                        notes = [*card.notes, *name_machines(card, machines)]
                        drafts += figures.save(figure, Path(aside) / name, f"{section.title}: {card.title}", notes)
                    cards.append(show_card(card, name, drawing, machines))
                parts.append(show_section(section, cards))
            text = make_page(title, found, machines, parts)
            with if_stopped(f"{page} is whole"), interrupts_held():
                return page, _replace(page, text, folder, drafts)
    except OSError as error:
        raise YalisFailure(f"cannot write {error.filename or page}: {error.strerror}; give another --output") from error


def _replace(page: Path, text: str, folder: Path, drafts: Sequence[Path]) -> list[Path]:
    """Put the new page and its plots in the place of the old ones."""
    before = plots_of(page.read_text(encoding="utf-8", errors="replace")) if page.is_file() else []
    folder.mkdir(parents=True, exist_ok=True)
    plots = [Path(shutil.copyfile(draft, folder / draft.name)) for draft in drafts]
    page.write_text(text, encoding="utf-8")
    for path in {folder / f"{name}.{kind}" for name in before for kind in ("png", "svg")} - set(plots):
        path.unlink(missing_ok=True)
    return plots


def _name_cards(cards: Sequence[Card]) -> list[str]:
    """After a card's result file, or its kind where it shows several; numbered only where two would be the same."""
    wanted = [card.given[0].path.stem if len(card.given) == 1 else card.kind for card in cards]
    wanted = [re.sub(r"[^\w.-]+", "-", name) for name in wanted]  # also a part of links
    names: list[str] = []
    for plain in wanted:
        name, number = plain, 1
        while name in names or (number > 1 and name in wanted):
            number += 1
            name = f"{plain}-{number}"
        names.append(name)
    return names


def _renumber(given: Given, machines: Sequence[dict[str, Any]]) -> Given:
    """A study of several machines counts its own; on a page they have the page's numbers."""
    own = machines_of(given.result)
    if len(own) == 1:
        return given
    rows = [
        {**row, "machine": row["machine"] and 1 + machines.index(own[row["machine"] - 1])} for row in given.result.rows
    ]
    return replace(given, result=replace(given.result, rows=rows))


def _check_page(page: Path) -> None:
    if page.suffix != ".html":
        raise YalisError(f"--output is {page}, which is no page; give a name that ends in .html")
    figures.need_matplotlib()
