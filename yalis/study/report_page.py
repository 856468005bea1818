"""The HTML of a report: one page without scripts, with nothing to fetch."""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from yalis.study.report_cards import Card, Column, Given, Section, Table, machines_of

# A longer table is shown when it is asked for.
_MOST_OPEN_ROWS = 12


def show_section(section: Section, cards: Sequence[str]) -> str:
    head = f"<h2>{_text(section.title)}</h2><p class='about'>{_text(section.about)}</p>"
    return f"<section>{head}{''.join(cards)}</section>"


def _text(text: object) -> str:
    return html.escape(str(text), quote=True)


def machine_name(machine: dict[str, Any], number: int) -> str:
    told = [str(device.get("name", device.get("type"))) for device in machine.get("devices", [])]
    devices = ", ".join(dict.fromkeys(told))
    cores = f", {machine['cores']} cores" if "cores" in machine else ""
    return f"Machine {number}: {devices} · {machine.get('cpu')}{cores}"


def show_card(card: Card, name: str, drawing: str, machines: Sequence[dict[str, Any]]) -> str:
    numbers = [str(1 + machines.index(machine)) for machine in machines_of(card.given[0].result)]
    which = f"machine{'s' * (len(numbers) > 1)} {', '.join(numbers)}"
    badge = f"<span class='badge'>{which}</span>" if len(machines) > 1 else ""
    notes = "".join(f"<li>{_text(note)}</li>" for note in card.notes)
    about = f"{_text(card.kind)}: {_text(card.title)}"
    closed = len(card.table.rows) > _MOST_OPEN_ROWS
    parts = [
        f"<h3>{_text(card.title)}{badge}</h3>",
        f"<figure role='img' aria-label='{about}'>{drawing}</figure>" if drawing else "",
        f"<ul class='notes'>{notes}</ul>" if notes else "",
        f"<details{'' if closed else ' open'}><summary>{len(card.table.rows)} rows</summary>",
        f"{_table(card.table)}</details>",
        *map(_source, card.given),
    ]
    return f"<article id='{name}'>{''.join(parts)}</article>"


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
    return f"<div class='source'><pre><code>{_text(result.command)}</code></pre><p>{_text(told)}</p></div>"


def make_page(title: str, found: Sequence[Given], machines: Sequence[dict[str, Any]], parts: Sequence[str]) -> str:
    days = sorted({given.result.created[:10] for given in found})
    when = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    names = "".join(f"<li>{_text(machine_name(machine, number))}</li>" for number, machine in enumerate(machines, 1))
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
