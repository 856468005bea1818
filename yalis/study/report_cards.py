"""What a report shows of each kind of result: a plot, its table, and what must be said beside them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from yalis import results
from yalis.parallel.memory import spell_bytes
from yalis.results import Result
from yalis.study import figures
from yalis.study.allreduce import fastest, label
from yalis.study.plots import model_name
from yalis.study.profile import PARTS, over_ranks
from yalis.study.topology import describe_oversubscription

Row = dict[str, Any]

# Settings of an engine that a profile's split or notes tell, or that say nothing about its time.
_TOLD_BY_SPLIT = {"tp", "pp", "dp", "allreduce", "ranks_per_gpu", "join_timeout"}


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
    spread: Callable[[Row], str | None] | None = None  # from the tenth to the ninetieth percentile, below it


@dataclass(frozen=True)
class Table:
    columns: Sequence[Column]
    rows: Sequence[Row]


@dataclass(frozen=True)
class Card:
    """A plot with what belongs to it."""

    kind: str
    title: str
    given: Sequence[Given]  # all of one machine, unless it is a study of several
    table: Table
    draw: Callable[[], Any] | None  # None: the table says it all
    notes: Sequence[str] = ()  # what must be said wherever the plot is shown
    remarks: Sequence[str] = ()  # what belongs to the table alone


@dataclass(frozen=True)
class Section:
    title: str
    about: str
    cards: Sequence[Card]


#: Title, what it is about, and the kinds of results it shows.
_SECTIONS = (
    (
        "Strong scaling",
        "One job over more and more ranks. The dotted line is what it would be if ranks shared the work for nothing.",
        ("scaling",),
    ),
    (
        "Where the time goes",
        "Each rank's own timeline. Communication includes waiting for other ranks; idle is the sum of the gaps in "
        "which nothing ran: on a CPU the host's own work, on a GPU waiting for the host.",
        ("profile",),
    ),
    (
        "All-reduce",
        "Time until every rank has the sum, by size of the message. Bands are the tenth to the ninetieth percentile.",
        ("allreduce",),
    ),
    (
        "Share of the floor",
        "The floor is the time that reading every byte once at the device's measured bandwidth, or multiplying at its "
        "measured rate, would take.",
        ("latency", "kernels"),
    ),
    ("Throughput", "Whole jobs: from the first arrival to the last token.", ("throughput",)),
    ("Pipeline", "How long stages stand idle while micro-batches pass.", ("pipeline",)),
)


def machines_of(result: Result) -> list[dict[str, Any]]:
    """The machines of a result: one, or those of a study."""
    told: list[dict[str, Any]] = result.parameters["machines"] if result.kind == "scaling" else []
    return told if len(told) > 1 else [results.machine(result)]


def make_sections(found: Sequence[Given]) -> list[Section]:
    """Those that have something to show."""
    sections = []
    for title, about, kinds in _SECTIONS:
        cards: list[Card] = []
        for kind in kinds:
            own = [given for given in found if given.result.kind == kind]
            cards += [_profile_card(group) for group in _alike(own)] if kind == "profile" else map(_CARDS[kind], own)
        if cards:
            sections.append(Section(title, about, cards))
    return sections


def _alike(profiles: Sequence[Given]) -> list[list[Given]]:
    """Those that may stand side by side: of one machine, model, dtype and workload; labelled by what they differ in."""
    groups: dict[str, list[Given]] = {}
    for given in profiles:
        facts = given.result.parameters
        told = [results.machine(given.result), facts["engine"]["model"], facts["dtype"], facts["workload"]]
        groups.setdefault(json.dumps(told, sort_keys=True), []).append(given)
    return [_label_apart(group) for group in groups.values()]


def _label_apart(group: Sequence[Given]) -> list[Given]:
    """Profiles whose split also says what else of their engines differs: "tp1, eager, threads 2"."""
    engines = [given.result.parameters["engine"] for given in group]
    names = [name for name in dict.fromkeys(name for one in engines for name in one) if name not in _TOLD_BY_SPLIT]
    names = [name for name in names if any(one.get(name) != engines[0].get(name) for one in engines)]
    labels = []
    for given, engine in zip(group, engines, strict=True):
        told = [_option(name, engine.get(name)) for name in names]
        labels.append(", ".join(filter(None, [given.result.parameters["split"], *told])))
    labelled = []
    for given, split in zip(group, labels, strict=True):
        which = f", {given.path.stem}" if labels.count(split) > 1 else ""
        facts = {**given.result.parameters, "split": split + which}
        labelled.append(replace(given, result=replace(given.result, parameters=facts)))
    return labelled


def _option(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return name.replace("_", " ") if value else ""
    return f"{name.replace('_', ' ')} {'auto' if value is None else value}"


def _scaling_card(given: Given) -> Card:
    result = given.result
    columns = [
        Column("ranks", lambda row: str(row["ranks"])),
        Column("split", lambda row: row["split"], text=True),
        Column("all-reduce", lambda row: row["allreduce"] or "none", text=True),
        _spread("the job", "seconds", 3, " s"),
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
    rows = sorted(result.rows, key=lambda row: row["machine"] or 0)  # a setting that failed has none
    return Card("scaling", model_name(result), [given], Table(columns, rows), draw, notes)


def _profile_card(group: list[Given]) -> Card:
    columns = [
        Column("split", lambda row: row["split"], text=True),
        Column("phase", lambda row: row["phase"], text=True),
        Column("rank", lambda row: str(row["rank"]), text=True),
        Column("all, ms", lambda row: _short(row["ms"])),
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
            rows += [{**row, "split": facts["split"]} for row in [*own, *(_over_ranks(own, phase) if own[1:] else [])]]
        if facts["watching_costs"] is not None:
            costs.append(f"{1 + facts['watching_costs']:.2f} times ({facts['split']})")
        notes += [f"{facts['split']}: {note}" for note in given.result.notes]
    if costs:
        notes.append(
            f"Watching costs time: a watched decode step takes {', '.join(costs)} as long as an unwatched one."
        )
    work = group[0].result.parameters["workload"]
    told = f"{model_name(group[0].result)}, {work['batch']} x {work['prompt_len']} + {work['output_len']} tokens"
    found = [given.result for given in group]
    return Card("profile", told, group, Table(columns, rows), partial(figures.draw_profiles, found), notes)


def _over_ranks(own: list[Row], phase: str) -> list[Row]:
    """What the ranks have in common, as rows below them."""
    told = {one["part"]: one for one in over_ranks(own)}
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
        Column("times", lambda row: None if row["repeats"] is None else str(row["repeats"])),
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
    elif result.devices[0]["type"] == "cpu" and facts["ranks"] > result.host["cores"]:
        notes.append(f"{facts['ranks']} ranks on {result.host['cores']} cores: this shows overhead, not speed-up.")
    elif (shared := _on_a_gpu(result, facts)) > 1:
        notes.append(f"{shared} ranks share a GPU: this is no network's speed.")
    title = f"{facts['ranks']} ranks ({facts['shape']})" + (", tuned" if facts.get("tune") else "")
    delays = [row["delay_us"] for row in result.rows if row["delay_us"] is not None]
    if delays and len(set(delays)) == 1:
        title += f", {delays[0] / 1e3:g} ms between hosts"
    measured = any(row["median_us"] is not None for row in result.rows)
    draw = partial(figures.draw_allreduce, result) if measured else None
    rows = result.rows
    if facts.get("tune"):
        rows = fastest(rows)
        notes.append(f"The fastest of each way, of {len(result.rows)} settings that were tried; the JSON has them all.")
    return Card("allreduce", title, [given], Table(columns, rows), draw, notes)


def _latency_card(given: Given) -> Card:
    result = given.result
    columns = [
        Column("engine", _engine, text=True),
        Column("batch x in x out", _work),
        _spread("first token", "first_token_ms", 1, " ms"),
        _spread("decode step", "decode_ms", 2, " ms"),
        _spread("the job", "seconds", 3, " s"),
        Column("tokens/s", _fixed("tokens_per_s", 1)),
        Column("host", _fixed("host_ms", 2, " ms")),
        Column("floor", _fixed("floor_ms", 2, " ms")),
        Column("of floor", _percent("share_of_floor")),
        Column("over ours", lambda row: None if row["engine"] == "yalis" else _fixed("ratio", 2, "x")(row)),
        Column("same tokens", _percent("same_tokens")),
        Column("", lambda row: row["status"] if row["status"] != "ok" else "", text=True),
    ]
    notes, rows = list(result.notes), result.rows
    engine = result.parameters["engine"]
    if (shared := _on_a_gpu(result, engine)) > 1:
        notes.append(f"{shared} ranks share a GPU: this shows overhead, not speed-up, and has no floor.")
        rows = [{**row, "floor_ms": None, "share_of_floor": None} for row in rows]  # an older yalis told one
    bars = [
        (f"decode {_work(row)}", row["engine"], row["share_of_floor"])
        for row in rows
        if row["share_of_floor"] is not None
    ]
    draw = partial(figures.draw_shares, bars, "decode steps by batch x prompt x output") if bars else None
    remarks = []
    if graph_bytes := result.parameters.get("graph_bytes"):
        remarks.append(f"CUDA graphs take {spell_bytes(graph_bytes)} of a GPU's memory.")
    works = list(dict.fromkeys(_work(row) for row in rows))
    title = f"{model_name(result)}{_split(engine)}, {works[0]}" + (f" to {works[-1]}" if works[1:] else "")
    if beside := result.parameters.get("peer"):
        title += f", beside {' and '.join(beside)}"
    return Card("latency", title, [given], Table(columns, rows), draw, notes, remarks)


def _on_a_gpu(result: Result, settings: dict[str, Any]) -> int:
    """Ranks that share a GPU: so many may, and no more than a host has. An older yalis told no hosts."""
    most: int = settings.get("ranks_per_gpu", 1)
    return min(most, max(result.topology["ranks_per_host"])) if result.topology else most


def _split(engine: dict[str, Any]) -> str:
    """ ", tp 2x2, nvrar" where a model was split."""
    grid = engine.get("tp", [1])
    if max(grid) == 1:
        return ""
    return f", tp {'x'.join(str(count) for count in grid if count > 1)}, {engine.get('allreduce', 'auto')}"


def _kernels_card(given: Given) -> Card:
    result = given.result
    columns = [
        Column("kernel", lambda row: row["kernel"], text=True),
        Column("shape", lambda row: row["shape"], text=True),
        Column("rows", lambda row: str(row["rows"])),
        Column("ours", _micros("us"), spread=_micros_span),
        Column("torch", _micros("torch_us")),
        Column("over ours", _fixed("ratio", 2, "x")),
        Column("moves", _rate("gb_per_s", "B/s")),
        Column("computes", _rate("gflop_per_s", "FLOP/s")),
        Column("of floor", _percent("share_of_floor")),
        Column("", lambda row: row["status"] if row["status"] != "ok" else "", text=True),
    ]
    points = [
        (f"{row['kernel']} {row['shape']}", row["rows"], row["share_of_floor"])
        for row in result.rows
        if row["share_of_floor"] is not None
    ]
    draw = partial(figures.draw_kernels, points) if points else None
    title = f"Kernels of a decode step, {result.parameters['dtype']}"
    return Card("kernels", title, [given], Table(columns, result.rows), draw, result.notes)


def _throughput_card(given: Given) -> Card:
    result = given.result
    columns = [
        Column("engine", _engine, text=True),
        Column("requests", lambda row: str(row["requests"])),
        _spread("the job", "seconds", 3, " s"),
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
    crowded = describe_oversubscription(result)
    notes = [*result.notes, *([f"{crowded}: this shows overhead, not speed-up."] if crowded else [])]
    return Card("throughput", model_name(result), [given], Table(columns, result.rows), draw, notes)


def _pipeline_card(given: Given) -> Card:
    result = given.result
    columns = [
        Column("stages", lambda row: str(row["stages"])),
        Column("micro-batches", lambda row: str(row["micro_batches"])),
        _spread("a pass", "seconds", 3, " s"),
        Column("idle", _percent("idle_share")),
        Column("ideal", _percent("ideal_idle_share")),
        Column("speed-up", _fixed("speedup", 2, "x")),
    ]
    draw = partial(figures.draw_pipeline, result)
    title = f"{model_name(result)}, {result.rows[0]['stages']} stages"
    return Card("pipeline", title, [given], Table(columns, result.rows), draw, result.notes)


_CARDS: dict[str, Callable[[Given], Card]] = {
    "scaling": _scaling_card,
    "allreduce": _allreduce_card,
    "latency": _latency_card,
    "kernels": _kernels_card,
    "throughput": _throughput_card,
    "pipeline": _pipeline_card,
}


# Cells


def _fixed(name: str, digits: int, unit: str = "") -> Callable[[Row], str | None]:
    return lambda row: None if row[name] is None else f"{row[name]:,.{digits}f}{unit}"


def _spread(head: str, name: str, digits: int, unit: str) -> Column:
    """A median, with its spread below: several of them side by side would make a table too wide."""
    return Column(
        head, _fixed(name, digits, unit), spread=lambda row: _span(row, f"{name}_low", f"{name}_high", digits)
    )


def _rate(name: str, unit: str) -> Callable[[Row], str | None]:
    """ "4.21 TB/s" of a column of thousands of millions."""

    def cell(row: Row) -> str | None:
        value = row[name]
        if not value:
            return None
        scale, letter = (1e3, "T") if value >= 1e3 else (1, "G") if value >= 1 else (1e-3, "M")
        return f"{_short(value / scale)} {letter}{unit}"

    return cell


def _micros(name: str) -> Callable[[Row], str | None]:
    return lambda row: None if row[name] is None else f"{_short(row[name])} us"


def _micros_span(row: Row) -> str | None:
    low, high = row["us_low"], row["us_high"]
    return None if low is None or low == high else f"{_short(low)}..{_short(high)}"


def _percent(name: str, digits: int = 0) -> Callable[[Row], str | None]:
    return lambda row: None if row[name] is None else f"{row[name]:.{digits}%}"


def _part(part: str, row: Row) -> str:
    share = f" · {row[part + '_ms'] / row['ms']:.0%}" if isinstance(row["rank"], int) else ""
    return f"{_short(row[part + '_ms'])}{share}"


def _short(value: float) -> str:
    """With the digits that tell something."""
    return f"{value:,.{0 if value >= 1000 else 1 if value >= 100 else 2}f}"


def _span(row: Row, low: str, high: str, digits: int) -> str | None:
    """Nothing where both are the same: that is a single repeat."""
    return None if row[low] is None or row[low] == row[high] else f"{row[low]:,.{digits}f}..{row[high]:,.{digits}f}"


def _engine(row: Row) -> str:
    return f"{row['engine']} {row['version']}".strip()


def _work(row: Row) -> str:
    return f"{row['batch']}x{row['prompt_len']}x{row['output_len']}"
