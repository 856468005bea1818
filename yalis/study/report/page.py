"""Render the report as one HTML page without scripts and external resources."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from yalis.errors import count_of
from yalis.launch.launchers import launch_command
from yalis.study.results import Result, StoredResult, kind_of, machine_name
from yalis.study.results.card import Card, Section, Table, TableColumn

# A longer table is collapsed.
_MAX_OPEN_ROWS = 12


def render_section(section: Section, cards: Sequence[str]) -> str:
    head = f"<h2>{_escape(section.title)}</h2><p class='about'>{_escape(section.about)}</p>"
    return f"<section>{head}{''.join(cards)}</section>"


def _escape(text: object) -> str:
    return html.escape(str(text), quote=True)


def _machines_of(card: Card) -> list[dict[str, Any]]:
    result = card.sources[0].result
    return kind_of(result).machines(result)


def name_machines(card: Card, machines: Sequence[dict[str, Any]]) -> list[str]:
    """Return the names of the card's machines, with their number on the page if there are several."""
    used = _machines_of(card)
    return [f"Machine {1 + machines.index(one)}: " * (len(used) > 1) + machine_name(one) for one in used]


def list_plots(page: str) -> list[str]:
    """Return the names of the plots on a page that `make_page` made."""
    articles = re.findall(r"<article id='([\w.-]+)'>(.*?)</article>", page, re.DOTALL)
    return [name for name, content in articles if "<figure role='img'" in content]


def render_card(card: Card, name: str, svg: str, machines: Sequence[dict[str, Any]]) -> str:
    numbers = [str(1 + machines.index(machine)) for machine in _machines_of(card)]
    label = f"machine{'s' * (len(numbers) > 1)} {', '.join(numbers)}"
    badge = f"<span class='badge'>{label}</span>" if len(machines) > 1 else ""
    description = f"{_escape(card.kind)}: {_escape(card.title)}"
    collapsed = len(card.table.rows) > _MAX_OPEN_ROWS
    parts = [
        f"<h3>{_escape(card.title)}{badge}</h3>",
        f"<figure role='img' aria-label='{description}'>{svg}</figure>" if svg else "",
        _render_list(card.notes),
        f"<details{'' if collapsed else ' open'}><summary>{count_of(len(card.table.rows), 'row')}</summary>",
        f"{_render_table(card.table)}{_render_list(card.remarks)}</details>",
        *map(_render_source, card.sources),
    ]
    return f"<article id='{name}'>{''.join(parts)}</article>"


def _render_list(notes: Sequence[str]) -> str:
    return f"<ul class='notes'>{''.join(f'<li>{_escape(note)}</li>' for note in notes)}</ul>" if notes else ""


def _render_table(table: Table) -> str:
    columns = table.used_columns
    heads = "".join(f"<th{_css_class(column)}>{_render_head(column, table)}</th>" for column in columns)
    body = "".join(
        "<tr>" + "".join(f"<td{_css_class(column)}>{_render_cell(column, row)}</td>" for column in columns) + "</tr>"
        for row in table.rows
    )
    return f"<div class='scroll'><table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table></div>"


def _render_head(column: TableColumn, table: Table) -> str:
    spread = column.spread is not None and any(column.spread(row) for row in table.rows)
    return _escape(column.head) + "<small>p10..p90</small>" * spread


def _render_cell(column: TableColumn, row: dict[str, Any]) -> str:
    spread = column.spread(row) if column.spread is not None else None
    return _escape(column.cell(row) or "") + (f"<small>{_escape(spread)}</small>" if spread else "")


def _css_class(column: TableColumn) -> str:
    return " class='text'" if column.text else ""


def _render_source(source: StoredResult) -> str:
    result = source.result
    versions = [
        f"{name} {version}" for name, version in result.versions.items() if version and name in ("yalis", "torch")
    ]
    revision = (
        f"revision {result.revision[:10]}{'-dirty' * result.revision.endswith('-dirty')}" if result.revision else ""
    )
    origin = " · ".join(filter(None, [source.path.name, result.created[:10], *versions, revision]))
    return f"<div class='source'><pre><code>{_escape(_full_command(result))}</code></pre><p>{_escape(origin)}</p></div>"


def _full_command(result: Result) -> str:
    """Return the command with the launcher that started the ranks, if any. A lab starts its own ranks."""
    if result.topology is None or result.parameters.get("lab"):
        return result.command
    ranks, hosts = result.topology["ranks"], result.topology["ranks_per_host"]
    return " ".join([*launch_command(result.topology.get("launcher", ""), ranks, hosts), result.command])


def make_page(
    title: str, found: Sequence[StoredResult], machines: Sequence[dict[str, Any]], sections: Sequence[str]
) -> str:
    """Return the HTML of the page, with the rendered sections."""
    days = sorted({source.result.created[:10] for source in found})
    when = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    names = [f"Machine {number}: {machine_name(machine)}" for number, machine in enumerate(machines, 1)]
    items = "".join(f"<li>{_escape(name)}</li>" for name in names)
    style = Path(__file__).with_name("report.css").read_text(encoding="utf-8")
    separate = (
        "<p class='about'>Results of different machines have separate plots and are never divided by each other.</p>"
        if len(machines) > 1
        else ""
    )
    return (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        "<meta http-equiv='Content-Security-Policy' "
        "content=\"default-src 'none'; style-src 'unsafe-inline'; img-src data:\">"
        "<link rel='icon' href='data:,'>"
        f"<title>{_escape(title)}</title><style>{style}</style></head><body><main>"
        f"<header><h1>{_escape(title)}</h1><p class='about'>{count_of(len(found), 'result')}, {when}</p>"
        f"<ul class='machines'>{items}</ul>{separate}</header>{''.join(sections)}</main></body></html>\n"
    )
