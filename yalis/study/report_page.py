"""The HTML of a report: one page without scripts, with nothing to fetch."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from yalis.launch.launchers import launch_command
from yalis.results import Result
from yalis.study.plots import machine_name
from yalis.study.report_cards import Card, Column, Given, Section, Table, machines_of

# A longer table is shown when it is asked for.
_MOST_OPEN_ROWS = 12


def show_section(section: Section, cards: Sequence[str]) -> str:
    head = f"<h2>{_text(section.title)}</h2><p class='about'>{_text(section.about)}</p>"
    return f"<section>{head}{''.join(cards)}</section>"


def _text(text: object) -> str:
    return html.escape(str(text), quote=True)


def name_machines(card: Card, machines: Sequence[dict[str, Any]]) -> list[str]:
    """What a card was measured on, with the page's numbers where it was on several."""
    own = machines_of(card.given[0].result)
    return [f"Machine {1 + machines.index(one)}: " * (len(own) > 1) + machine_name(one) for one in own]


def plots_of(page: str) -> list[str]:
    """The names of the plots that a page of ours shows."""
    articles = re.findall(r"<article id='([\w.-]+)'>(.*?)</article>", page, re.DOTALL)
    return [name for name, shown in articles if "<figure role='img'" in shown]


def show_card(card: Card, name: str, drawing: str, machines: Sequence[dict[str, Any]]) -> str:
    numbers = [str(1 + machines.index(machine)) for machine in machines_of(card.given[0].result)]
    which = f"machine{'s' * (len(numbers) > 1)} {', '.join(numbers)}"
    badge = f"<span class='badge'>{which}</span>" if len(machines) > 1 else ""
    about = f"{_text(card.kind)}: {_text(card.title)}"
    closed = len(card.table.rows) > _MOST_OPEN_ROWS
    parts = [
        f"<h3>{_text(card.title)}{badge}</h3>",
        f"<figure role='img' aria-label='{about}'>{drawing}</figure>" if drawing else "",
        _list(card.notes),
        f"<details{'' if closed else ' open'}><summary>{len(card.table.rows)} rows</summary>",
        f"{_table(card.table)}{_list(card.remarks)}</details>",
        *map(_source, card.given),
    ]
    return f"<article id='{name}'>{''.join(parts)}</article>"


def _list(notes: Sequence[str]) -> str:
    return f"<ul class='notes'>{''.join(f'<li>{_text(note)}</li>' for note in notes)}</ul>" if notes else ""


def _table(table: Table) -> str:
    columns = [column for column in table.columns if any(column.cell(row) for row in table.rows)]
    heads = "".join(f"<th{_side(column)}>{_head(column, table)}</th>" for column in columns)
    body = "".join(
        "<tr>" + "".join(f"<td{_side(column)}>{_cell(column, row)}</td>" for column in columns) + "</tr>"
        for row in table.rows
    )
    return f"<div class='scroll'><table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table></div>"


def _head(column: Column, table: Table) -> str:
    spread = column.spread is not None and any(column.spread(row) for row in table.rows)
    return _text(column.head) + "<small>10%..90%</small>" * spread


def _cell(column: Column, row: dict[str, Any]) -> str:
    spread = column.spread(row) if column.spread is not None else None
    return _text(column.cell(row) or "") + (f"<small>{_text(spread)}</small>" if spread else "")


def _side(column: Column) -> str:
    return " class='text'" if column.text else ""


def _source(given: Given) -> str:
    result = given.result
    versions = [
        f"{name} {version}" for name, version in result.versions.items() if version and name in ("yalis", "torch")
    ]
    revision = (
        f"revision {result.revision[:10]}{'-dirty' * result.revision.endswith('-dirty')}" if result.revision else ""
    )
    told = " · ".join(filter(None, [given.path.name, result.created[:10], *versions, revision]))
    return f"<div class='source'><pre><code>{_text(_command(result))}</code></pre><p>{_text(told)}</p></div>"


def _command(result: Result) -> str:
    """What to type: behind the launcher that started the ranks, if one did. A lab starts its own."""
    if result.topology is None or result.parameters.get("lab"):
        return result.command
    ranks, hosts = result.topology["ranks"], result.topology["ranks_per_host"]
    return " ".join([*launch_command(result.topology.get("launcher", ""), ranks, hosts), result.command])


def make_page(title: str, found: Sequence[Given], machines: Sequence[dict[str, Any]], parts: Sequence[str]) -> str:
    days = sorted({given.result.created[:10] for given in found})
    when = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    told = [f"Machine {number}: {machine_name(machine)}" for number, machine in enumerate(machines, 1)]
    names = "".join(f"<li>{_text(name)}</li>" for name in told)
    style = Path(__file__).with_name("report.css").read_text(encoding="utf-8")
    apart = (
        "<p class='about'>Results of different machines stand in figures of their own; no ratio joins them.</p>"
        if len(machines) > 1
        else ""
    )
    return (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        "<meta http-equiv='Content-Security-Policy' "
        "content=\"default-src 'none'; style-src 'unsafe-inline'; img-src data:\">"
        "<link rel='icon' href='data:,'>"
        f"<title>{_text(title)}</title><style>{style}</style></head><body><main>"
        f"<header><h1>{_text(title)}</h1><p class='about'>{len(found)} results, {when}</p>"
        f"<ul class='machines'>{names}</ul>{apart}</header>{''.join(parts)}</main></body></html>\n"
    )
