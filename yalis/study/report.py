"""One page of results: every plot with its table and the command that made it, readable without a network.

Results of one machine may stand in one figure; those of different machines never do, so no ratio joins them.
"""

from __future__ import annotations

import html
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from yalis import results
from yalis.errors import YalisError, YalisFailure
from yalis.results import Result
from yalis.study import figures
from yalis.study.allreduce import label
from yalis.study.plots import model_name
from yalis.study.scaling import crowding

Row = dict[str, Any]


@dataclass(frozen=True)
class Given:
    """A result and where it came from."""

    path: Path
    result: Result


@dataclass(frozen=True)
class Column:
    head: str
    cell: Callable[[Row], str | None]  # None: not known
    text: bool = False  # set to the left; numbers to the right


@dataclass(frozen=True)
class Table:
    columns: Sequence[Column]
    rows: Sequence[Row]


@dataclass(frozen=True)
class Card:
    """A plot with what belongs to it."""

    kind: str
    title: str
    given: Sequence[Given]  # all of one machine
    table: Table
    draw: Callable[[], Any] | None  # None: the table says it all
    notes: Sequence[str] = ()

    @property
    def drawn_notes(self) -> list[str]:
        """What must be said wherever the plot is shown."""
        return list(dict.fromkeys(note for given in self.given for note in given.result.notes))


@dataclass(frozen=True)
class Section:
    title: str
    about: str
    cards: list[Card] = field(default_factory=list)


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
    if studies := [file for file in files if file.name.startswith("scaling-")]:
        return [file for file in files if file not in studies[:-1]]  # told anew each time, so the last counts
    return [*files, *(file for folder in sorted(path.iterdir()) if folder.is_dir() for file in _files(folder))]


def write_report(found: Sequence[Given], page: Path, title: str) -> tuple[Path, list[Path]]:
    """Write the page, and its plots as PNG and SVG into a folder beside it; returns where."""
    _check_page(page)
    machines: list[dict[str, Any]] = []
    for given in found:
        if (machine := results.machine(given.result)) not in machines:
            machines.append(machine)
    sections = [section for section in _sections(found, machines) if section.cards]
    folder = page.with_name(f"{page.stem}-plots")
    plots: list[Path] = []
    counts: dict[str, int] = {}
    parts = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for section in sections:
            cards = []
            for card in section.cards:
                counts[card.kind] = counts.get(card.kind, 0) + 1
                name = card.kind if counts[card.kind] == 1 else f"{card.kind}-{counts[card.kind]}"
                drawing = ""
                if card.draw is not None:
                    figure = card.draw()
                    drawing = figures.inline(figure, name)
                    plots += figures.save(figure, folder / name, f"{section.title}: {card.title}", card.drawn_notes)
                cards.append(_card(card, name, drawing, machines))
            head = f"<h2>{_text(section.title)}</h2><p class='about'>{_text(section.about)}</p>"
            parts.append(f"<section>{head}{''.join(cards)}</section>")
        page.write_text(_page(title, found, machines, parts), encoding="utf-8")
    except OSError as error:
        raise YalisFailure(f"cannot write {error.filename or page}: {error.strerror}; give another --output") from error
    return page, plots


def _check_page(page: Path) -> None:
    if page.suffix != ".html":
        raise YalisError(f"--output is {page}, which is no page; give a name that ends in .html")
    figures.need_matplotlib()


# What goes where


def _sections(found: Sequence[Given], machines: Sequence[dict[str, Any]]) -> list[Section]:
    scaling = Section(
        "Strong scaling",
        "One job over more and more ranks. The dotted line is what it would be if ranks shared the work for nothing.",
    )
    profile = Section(
        "Where the time goes",
        "Each rank's own timeline. Communication includes waiting for other ranks; idle is the sum of the gaps in "
        "which nothing ran: on a CPU the host's own work, on a GPU waiting for the host.",
    )
    allreduce = Section(
        "All-reduce",
        "Time until every rank has the sum, by size of the message. Bands are the tenth to the ninetieth percentile.",
    )
    floor = Section(
        "Share of the floor",
        "The floor is the time that reading every byte once at the device's measured bandwidth, or multiplying at its "
        "measured rate, would take. 100% cannot be beaten.",
    )
    throughput = Section("Throughput", "Whole jobs: from the first arrival to the last token.")
    pipeline = Section("Pipeline", "How long stages stand idle while micro-batches pass.")
    by_kind: dict[str, list[Given]] = {}
    for given in found:
        by_kind.setdefault(given.result.kind, []).append(given)
    for given in by_kind.get("scaling", []):
        scaling.cards.append(_scaling_card(given))
    for group in _alike(by_kind.get("profile", []), _profile_key):
        profile.cards.append(_profile_card(group))
    for given in by_kind.get("allreduce", []):
        allreduce.cards.append(_allreduce_card(given))
    for given in by_kind.get("latency", []):
        floor.cards.append(_latency_card(given))
    for given in by_kind.get("kernels", []):
        floor.cards.append(_kernels_card(given))
    for given in by_kind.get("throughput", []):
        throughput.cards.append(_throughput_card(given))
    for given in by_kind.get("pipeline", []):
        pipeline.cards.append(_pipeline_card(given))
    return [scaling, profile, allreduce, floor, throughput, pipeline]


def _alike(found: Iterable[Given], key: Callable[[Result], str]) -> list[list[Given]]:
    """Results that may stand side by side: of one machine, and alike in what `key` tells."""
    groups: dict[str, list[Given]] = {}
    for given in found:
        alike = json.dumps([results.machine(given.result), key(given.result)], sort_keys=True)
        groups.setdefault(alike, []).append(given)
    return list(groups.values())


def _profile_key(result: Result) -> str:
    facts = result.parameters
    return json.dumps([facts["engine"]["model"], facts["dtype"], facts["workload"]], sort_keys=True)


def _scaling_card(given: Given) -> Card:
    result = given.result
    columns = [
        Column("ranks", lambda row: str(row["ranks"])),
        Column("split", lambda row: row["split"], text=True),
        Column("all-reduce", lambda row: row["allreduce"] or "none", text=True),
        Column("the job", _seconds("seconds")),
        Column("10%..90%", lambda row: _span(row, "seconds_low", "seconds_high", 3)),
        Column("tokens/s", _fixed("tokens_per_s", 1)),
        Column("first token", _fixed("first_token_ms", 1, " ms")),
        Column("next token", _fixed("token_ms", 1, " ms")),
        Column("speed-up", _fixed("speedup", 2, "x")),
        Column("efficiency", _percent("efficiency")),
        Column("", lambda row: "crowded" * bool(row["crowded"]) if row["status"] == "ok" else row["status"], text=True),
    ]
    if len(result.parameters["machines"]) > 1:
        columns.insert(0, Column("machine", lambda row: str(row["machine"] or "")))
    notes = list(result.notes)
    if any(row["crowded"] for row in result.rows):
        notes.insert(0, "Shaded: more ranks than cores or GPUs. There a figure shows overhead, not speed-up.")
    good = any(row["status"] == "ok" for row in result.rows)
    draw = partial(figures.draw_scaling, result) if good else None
    return Card("scaling", model_name(result), [given], Table(columns, result.rows), draw, notes)


def _profile_card(group: list[Given]) -> Card:
    from yalis.study.profile import PARTS

    columns = [
        Column("split", lambda row: row["split"], text=True),
        Column("phase", lambda row: row["phase"], text=True),
        Column("rank", lambda row: str(row["rank"]), text=True),
        Column("all, ms", _fixed("ms", 2)),
        *(Column("idle, host" if part == "idle" else part, partial(_part, part)) for part in PARTS),
        Column("accounted", _percent("accounted", 1)),
    ]
    group = sorted(group, key=lambda given: len(given.result.rows))
    rows: list[Row] = []
    notes: list[str] = []
    costs = []
    for given in group:
        facts = given.result.parameters
        for phase in dict.fromkeys(row["phase"] for row in given.result.rows):
            own = [row for row in given.result.rows if row["phase"] == phase]
            rows += [
                {**row, "split": facts["split"]} for row in [*own, *(_over_ranks(facts, phase) if own[1:] else [])]
            ]
        if facts["watching_costs"] is not None:
            costs.append(f"{1 + facts['watching_costs']:.2f}x on {facts['split']}")
        notes += [f"{facts['split']}: {note}" for note in given.result.notes]
    if costs:
        notes.append(f"Watching costs time: a watched decode step takes {', '.join(costs)} of an unwatched one.")
    work = group[0].result.parameters["workload"]
    told = f"{model_name(group[0].result)}, {work['batch']} x {work['prompt_len']} + {work['output_len']} tokens"
    found = [given.result for given in group]
    return Card("profile", told, group, Table(columns, rows), partial(figures.draw_profiles, found), notes)


def _over_ranks(facts: Row, phase: str) -> list[Row]:
    """What the ranks have in common, as rows below them."""
    told = {one["part"]: one for one in facts["over_ranks"] if one["phase"] == phase}
    rows = []
    for rank, key in (("max", "max_ms"), ("mean", "mean_ms"), ("max / mean", "imbalance")):
        row = {f"{part}_ms": one[key] for part, one in told.items() if part != "all"}
        rows.append({"phase": phase, "rank": rank, "ms": told["all"][key], "accounted": None, **row})
    return rows


def _allreduce_card(given: Given) -> Card:
    result = given.result
    columns = [
        Column("way", label, text=True),
        Column("size", lambda row: figures.size_name(row["bytes"])),
        Column("dtype", lambda row: row["dtype"], text=True),
        Column("mode", lambda row: row["mode"], text=True),
        Column("median", _fixed("median_us", 1, " us")),
        Column("10%..90%", lambda row: _span(row, "low_us", "high_us", 0)),
        Column("bus", _fixed("bus_gb_per_s", 3, " GB/s")),
        Column("speed-up", _fixed("speedup", 2, "x")),
        Column("", lambda row: row["status"] if row["status"] != "ok" else "", text=True),
    ]
    if len({row["delay_us"] for row in result.rows}) > 1:
        columns.insert(1, Column("delay", _fixed("delay_us", 0, " us")))
    facts = result.parameters
    notes = list(result.notes)
    if facts.get("lab"):
        notes.append(
            f"The {len(facts['nodes'])} hosts are network namespaces of one machine with {result.host['cores']} cores; "
            "delays are those of the lab. Compare ways with each other, not with a cluster."
        )
    title = f"{facts['ranks']} ranks ({facts['shape']})"
    delays = [row["delay_us"] for row in result.rows if row["delay_us"] is not None]
    if delays and len(set(delays)) == 1:
        title += f", {delays[0] / 1e3:g} ms between hosts"
    measured = any(row["median_us"] is not None for row in result.rows)
    draw = partial(figures.draw_allreduce, result) if measured else None
    return Card("allreduce", title, [given], Table(columns, result.rows), draw, notes)


def _latency_card(given: Given) -> Card:
    result = given.result
    columns = [
        Column("engine", _engine, text=True),
        Column("batch x in x out", _work),
        Column("first token", _fixed("first_token_ms", 1, " ms")),
        Column("decode step", _fixed("decode_ms", 2, " ms")),
        Column("10%..90%", lambda row: _span(row, "decode_ms_low", "decode_ms_high", 2)),
        Column("tokens/s", _fixed("tokens_per_s", 1)),
        Column("floor", _fixed("floor_ms", 2, " ms")),
        Column("of floor", _percent("share_of_floor")),
        Column("step over ours", _fixed("ratio", 2, "x")),
        Column("same tokens", _percent("same_tokens")),
        Column("", lambda row: row["status"] if row["status"] != "ok" else "", text=True),
    ]
    bars = [
        (f"decode {_work(row)}", row["engine"], row["share_of_floor"])
        for row in result.rows
        if row["share_of_floor"] is not None
    ]
    draw = partial(figures.draw_shares, bars) if bars else None
    title = f"{model_name(result)}: a decode step"
    return Card("latency", title, [given], Table(columns, result.rows), draw, result.notes)


def _kernels_card(given: Given) -> Card:
    result = given.result
    columns = [
        Column("kernel", lambda row: row["kernel"], text=True),
        Column("shape", lambda row: row["shape"], text=True),
        Column("rows", lambda row: str(row["rows"])),
        Column("ours", _fixed("us", 1, " us")),
        Column("torch", _fixed("torch_us", 1, " us")),
        Column("torch over ours", _fixed("ratio", 2, "x")),
        Column("GB/s", _fixed("gb_per_s", 1)),
        Column("of floor", _percent("share_of_floor")),
        Column("", lambda row: row["status"] if row["status"] != "ok" else "", text=True),
    ]
    bars = [
        (f"{row['kernel']} {row['shape']}", f"{row['rows']} rows", row["share_of_floor"])
        for row in sorted(result.rows, key=lambda row: (row["kernel"], row["shape"]))
        if row["share_of_floor"] is not None
    ]
    draw = partial(figures.draw_shares, bars) if bars else None
    title = f"Kernels of a decode step, {result.parameters['dtype']}"
    return Card("kernels", title, [given], Table(columns, result.rows), draw, result.notes)


def _throughput_card(given: Given) -> Card:
    result = given.result
    columns = [
        Column("engine", _engine, text=True),
        Column("requests", lambda row: str(row["requests"])),
        Column("the job", _seconds("seconds")),
        Column("10%..90%", lambda row: _span(row, "seconds_low", "seconds_high", 3)),
        Column("tokens/s", _fixed("tokens_per_s", 1)),
        Column("first token", _fixed("first_token_ms", 1, " ms")),
        Column("99%", _fixed("first_token_ms_p99", 1, " ms")),
        Column("next token", _fixed("token_ms", 1, " ms")),
        Column("of floor", _percent("share_of_floor")),
        Column("", lambda row: row["status"] if row["status"] != "ok" else "", text=True),
    ]
    bars = [
        ("the job", row["engine"], row["share_of_floor"]) for row in result.rows if row["share_of_floor"] is not None
    ]
    draw = partial(figures.draw_shares, bars) if bars else None
    return Card("throughput", model_name(result), [given], Table(columns, result.rows), draw, result.notes)


def _pipeline_card(given: Given) -> Card:
    result = given.result
    columns = [
        Column("stages", lambda row: str(row["stages"])),
        Column("micro-batches", lambda row: str(row["micro_batches"])),
        Column("a pass", lambda row: f"{row['seconds'] * 1e3:.0f} ms"),
        Column("idle", _percent("idle_share")),
        Column("ideal", _percent("ideal_idle_share")),
        Column("speed-up", _fixed("speedup", 2, "x")),
    ]
    draw = partial(figures.draw_pipeline, result)
    title = f"{model_name(result)}, {result.rows[0]['stages']} stages"
    return Card("pipeline", title, [given], Table(columns, result.rows), draw, result.notes)


# Cells


def _fixed(name: str, digits: int, unit: str = "") -> Callable[[Row], str | None]:
    return lambda row: None if row[name] is None else f"{row[name]:,.{digits}f}{unit}"


def _seconds(name: str) -> Callable[[Row], str | None]:
    return _fixed(name, 3, " s")


def _percent(name: str, digits: int = 0) -> Callable[[Row], str | None]:
    return lambda row: None if row[name] is None else f"{row[name]:.{digits}%}"


def _part(part: str, row: Row) -> str:
    share = f" · {row[part + '_ms'] / row['ms']:.0%}" if isinstance(row["rank"], int) else ""
    return f"{row[part + '_ms']:,.2f}{share}"


def _span(row: Row, low: str, high: str, digits: int) -> str | None:
    return None if row[low] is None else f"{row[low]:,.{digits}f}..{row[high]:,.{digits}f}"


def _engine(row: Row) -> str:
    return f"{row['engine']} {row['version']}".strip()


def _work(row: Row) -> str:
    return f"{row['batch']}x{row['prompt_len']}x{row['output_len']}"


# The page


def _text(text: object) -> str:
    return html.escape(str(text), quote=True)


def machine_name(machine: dict[str, Any], number: int) -> str:
    devices = ", ".join(dict.fromkeys(str(device.get("name", device.get("type"))) for device in machine["devices"]))
    cores = f", {machine['cores']} cores" if "cores" in machine else ""
    return f"Machine {number}: {devices} · {machine['cpu']}{cores}"


def _card(card: Card, name: str, drawing: str, machines: Sequence[dict[str, Any]]) -> str:
    number = 1 + machines.index(results.machine(card.given[0].result))
    badge = f"<span class='badge'>machine {number}</span>" if len(machines) > 1 else ""
    crowded = dict.fromkeys(filter(None, (crowding(given.result) for given in card.given)))
    notes = [*card.notes]
    if card.kind not in ("scaling", "profile"):
        notes += [f"{each}: this shows overhead, not speed-up." for each in crowded]
    shown = "".join(f"<li>{_text(note)}</li>" for note in notes)
    many = len(card.table.rows) > 12
    return (
        f"<article id='{name}'><h3>{_text(card.title)}{badge}</h3>"
        + (
            f"<figure role='img' aria-label='{_text(card.kind)}: {_text(card.title)}'>{drawing}</figure>"
            if drawing
            else ""
        )
        + (f"<ul class='notes'>{shown}</ul>" if shown else "")
        + f"<details{'' if many else ' open'}><summary>{len(card.table.rows)} rows</summary>"
        + f"{_table(card.table)}</details>"
        + "".join(_source(given) for given in card.given)
        + "</article>"
    )


def _table(table: Table) -> str:
    columns = [column for column in table.columns if any(column.cell(row) for row in table.rows)]
    heads = "".join(f"<th{_side(column)}>{_text(column.head)}</th>" for column in columns)
    body = "".join(
        "<tr>" + "".join(f"<td{_side(column)}>{_text(column.cell(row) or '')}</td>" for column in columns) + "</tr>"
        for row in table.rows
    )
    return f"<div class='scroll'><table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table></div>"


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


def _page(title: str, found: Sequence[Given], machines: Sequence[dict[str, Any]], parts: Sequence[str]) -> str:
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
