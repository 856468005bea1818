"""The profile of a workload: the time of prefill and decode by category, on every rank."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from yalis.study.results import drawing
from yalis.study.results.card import Card, Section, Table, TableColumn, percent, short_number
from yalis.study.results.column import Column
from yalis.study.results.form import Count
from yalis.study.results.kind import ResultKind
from yalis.study.results.result import Result, Row, StoredResult, machine_of, model_name

#: The categories of a phase's time in the order they are shown and stacked, and their colours.
CATEGORY_COLOURS = {
    "matmul": "#4c78a8",
    "attention": "#54a29e",
    "communication": "#e0693e",
    "other": "#b08bbb",
    "idle": "#a9afb9",
}
CATEGORIES = tuple(CATEGORY_COLOURS)
# Engine settings that `split` or a note already states, or that do not affect the time.
_STATED_BY_SPLIT = {
    "tp", "pp", "dp", "expert_parallel", "allreduce", "ranks_per_gpu", "join_timeout", "step_timeout",
    "insecure_rendezvous",
}  # fmt: skip


def summarize_ranks(rows: list[Row]) -> list[dict[str, Any]]:
    """Return maximum, mean and imbalance (max / mean) over the ranks, for each phase and category and for "all"."""
    summary = []
    for phase in dict.fromkeys(row["phase"] for row in rows):
        for category in ("", *CATEGORIES):
            times = [row[f"{category}_ms" if category else "ms"] for row in rows if row["phase"] == phase]
            mean = sum(times) / len(times)
            summary.append(
                {
                    "phase": phase,
                    "part": category or "all",
                    "max_ms": max(times),
                    "mean_ms": mean,
                    "imbalance": max(times) / mean if mean else 1.0,
                }
            )
    return summary


class Profile(ResultKind):
    name = "profile"
    columns = (
        Column("phase", str, required=True),  # "prefill": all prompts; "decode": one token for every sequence
        Column("rank", int, required=True),
        Column("steps", int, required=True),  # that were profiled
        Column("ms", float, "ms", positive=True, required_if_ok=True),  # of the phase: the sum of the categories
        Column("matmul_ms", float, "ms", required_if_ok=True),
        Column("attention_ms", float, "ms", required_if_ok=True),
        Column("communication_ms", float, "ms", required_if_ok=True),  # includes waiting for other ranks
        Column("other_ms", float, "ms", required_if_ok=True),
        Column("idle_ms", float, "ms", required_if_ok=True),  # gaps: no kernel runs, or the host works between calls
        Column("accounted", float, required_if_ok=True),  # share of the wall time that the categories add up to
        # Pairs of a token and an expert that the rank multiplied in all profiled steps; with expert parallelism only.
        Column("expert_pairs", int, positive=True, since=7),
    )
    parameters = {
        "engine": {"model": str, "ranks_per_gpu": Count},
        "dtype": str,
        "workload": {"batch": Count, "prompt_len": Count, "output_len": Count},
        "split": str,
        "profiling_overhead": (float,),
    }
    renamed_parameters = {
        "watching_costs": "profiling_overhead",
        "unwatched_decode_ms": "unprofiled_decode_ms",
    }
    section = Section(
        "Time breakdown",
        "The timeline of each rank. Communication includes waiting for other ranks. Idle is the sum of the gaps in "
        "which no kernel ran: host work on a CPU, waiting for the host on a GPU.",
    )
    report_order = 20

    def title(self, result: Result) -> str:
        work = result.parameters["workload"]
        return f"{model_name(result)}, {work['batch']} x {work['prompt_len']} + {work['output_len']} tokens"

    def table(self, result: Result) -> Table:
        return _make_table([result])

    def notes(self, result: Result) -> list[str]:
        return [*result.notes, *_overhead_note([result])]

    def plot(self, result: Result) -> Any:
        return draw_profiles([result])

    def cards(self, sources: Sequence[StoredResult]) -> list[Card]:
        """Return one card for all profiles of the same machine, model, dtype and workload."""
        groups: dict[str, list[StoredResult]] = {}
        for source in sources:
            facts = source.result.parameters
            key = [machine_of(source.result), facts["engine"]["model"], facts["dtype"], facts["workload"]]
            groups.setdefault(json.dumps(key, sort_keys=True), []).append(source)
        return [self._joint_card(_label_differences(group)) for group in groups.values()]

    def _joint_card(self, group: Sequence[StoredResult]) -> Card:
        group = sorted(group, key=lambda source: len(source.result.rows))
        found = [source.result for source in group]
        notes = [f"{result.parameters['split']}: {note}" for result in found for note in result.notes]
        notes += _overhead_note(found)
        draw = partial(draw_profiles, found)
        return Card(self.name, self.title(found[0]), group, _make_table(found), draw, notes)

    def text(self, result: Result, max_kernels: int = 8) -> Iterator[str]:
        """Yield the lines that the terminal shows, with the `max_kernels` longest kernels and calls of each phase."""
        facts = result.parameters
        work = facts["workload"]
        workload = f"{work['batch']}x{work['prompt_len']}x{work['output_len']}"
        yield " · ".join(
            [facts["engine"]["model"], facts["dtype"], result.devices[0]["name"], facts["split"], workload]
        )
        for phase in dict.fromkeys(row["phase"] for row in result.rows):
            rows = [row for row in result.rows if row["phase"] == phase]
            yield from _phase_lines(phase, rows)
            for kernel in facts["names"][phase][0][:max_kernels]:
                yield f"  {kernel['share']:>5.1%} {kernel['category']:<14}{kernel['name'][:90]}"
        yield ""
        low, high = (pick(row["accounted"] for row in result.rows) for pick in (min, max))
        yield f"the categories add up to {low:.1%}..{high:.1%} of the wall time"
        if facts["profiling_overhead"] is not None:
            yield f"a profiled decode step takes {1 + facts['profiling_overhead']:.2f}x an unprofiled one"
        yield from result.notes


@drawing.styled
def draw_profiles(found: Sequence[Result]) -> Any:
    """Draw prefill and decode as stacked bars, one per rank of each result. The results are of one machine."""
    phases = list(dict.fromkeys(row["phase"] for result in found for row in result.rows))
    bars = sum(len([row for row in result.rows if row["phase"] == phases[0]]) for result in found)
    figure, axes = drawing.new_figure(1.5 + 0.36 * bars + 0.22 * len(found), 1, len(phases), sharey=True)
    for axis, phase in zip(axes[0], phases, strict=True):
        position, ticks, names = 0.0, [], []
        max_ms = max(row["ms"] for result in found for row in result.rows if row["phase"] == phase)
        for result in found:
            rows = [row for row in result.rows if row["phase"] == phase]
            for row in rows:
                _draw_bar(axis, position, row, max_ms)
                ticks.append(position)
                split = result.parameters["split"]
                names.append(f"{split}, rank {row['rank']}" if len(rows) > 1 else split)
                position += 1
            position += 0.45
        axis.set_yticks(ticks, names)
        axis.set_ylim(position - 0.9, -0.6)
        axis.set_xlim(0, 1.17 * max_ms)
        axis.locator_params(axis="x", nbins=5)
        axis.grid(axis="x")
        axis.grid(visible=False, axis="y")
        axis.tick_params(axis="y", length=0)
        axis.spines["left"].set_visible(False)
        axis.set_xlabel("milliseconds")
        axis.set_title("Prefill, all prompts" if phase == "prefill" else "Decode, one token for every sequence")
    handles = axes[0][0].get_legend_handles_labels()[0][: len(CATEGORIES)]
    labels = [_head(category) for category in CATEGORIES]
    figure.legend(handles, labels, loc="outside upper center", ncols=len(labels), handlelength=1, handleheight=1)
    return figure


def _draw_bar(axis: Any, position: float, row: Row, max_ms: float) -> None:
    left = 0.0
    for category, colour in CATEGORY_COLOURS.items():
        ms, idle = row[f"{category}_ms"], category == "idle"
        axis.barh(
            position, ms, left=left, height=0.74, color=colour, linewidth=0, alpha=0.45 if idle else 1, label=category
        )
        if ms > 0.09 * max_ms:
            colour, share = drawing.INK if idle else "white", f"{ms / row['ms']:.0%}"
            axis.text(left + ms / 2, position, share, ha="center", va="center", color=colour, fontsize=8.5)
        left += ms
    axis.text(left + 0.015 * max_ms, position, _format_ms(row["ms"]), va="center", fontsize=8.5)


def _format_ms(ms: float) -> str:
    return f"{ms:.0f} ms" if ms >= 100 else f"{ms:.1f} ms" if ms >= 10 else f"{ms:.2f} ms"


def _head(category: str) -> str:
    return "idle, host" if category == "idle" else category


def _make_table(found: Sequence[Result]) -> Table:
    columns = [
        TableColumn("split", lambda row: row["split"], text=True),
        TableColumn("phase", lambda row: row["phase"], text=True),
        TableColumn("rank", lambda row: str(row["rank"]), text=True),
        TableColumn("total, ms", lambda row: short_number(row["ms"])),
        *(TableColumn(_head(category), partial(_cell, category)) for category in CATEGORIES),
        TableColumn("accounted", percent("accounted", 1)),
    ]
    if any(row["expert_pairs"] for result in found for row in result.rows):
        columns.append(TableColumn("expert load", lambda row: _share_text(row["expert_load"])))
    rows: list[Row] = []
    for result in found:
        for phase in dict.fromkeys(row["phase"] for row in result.rows):
            ranks = [row for row in result.rows if row["phase"] == phase]
            ranks = [{**row, "expert_load": load} for row, load in zip(ranks, expert_loads(ranks), strict=True)]
            summary = _summary_rows(ranks, phase) if len(ranks) > 1 else []
            rows += [{**row, "split": result.parameters["split"]} for row in [*ranks, *summary]]
    return Table(columns, rows)


def expert_loads(rows: Sequence[Row]) -> list[float | None]:
    """Return the expert pairs of each rank of a phase over the mean of all; None where they were not counted."""
    counted = [row["expert_pairs"] for row in rows if row["expert_pairs"]]
    mean = sum(counted) / len(counted) if counted else 1.0
    return [row["expert_pairs"] / mean if row["expert_pairs"] else None for row in rows]


def _share_text(load: float | None) -> str:
    return "" if load is None else f"{load:.2f}"


def _cell(category: str, row: Row) -> str:
    share = f" · {row[category + '_ms'] / row['ms']:.0%}" if isinstance(row["rank"], int) else ""
    return f"{short_number(row[category + '_ms'])}{share}"


def _summary_rows(ranks: list[Row], phase: str) -> list[Row]:
    """Return table rows with maximum, mean and imbalance over the ranks."""
    by_category = {one["part"]: one for one in summarize_ranks(ranks)}
    rows = []
    for label, key in (("max", "max_ms"), ("mean", "mean_ms"), ("max / mean", "imbalance")):
        row = {f"{category}_ms": by_category[category][key] for category in CATEGORIES}
        rows.append({"phase": phase, "rank": label, "ms": by_category["all"][key], "accounted": None, **row})
    loads = [row["expert_load"] for row in ranks if row["expert_load"] is not None]
    rows[0]["expert_load"], rows[2]["expert_load"] = (max(loads), max(loads)) if loads else (None, None)
    rows[1]["expert_load"] = 1.0 if loads else None
    return rows


def _overhead_note(found: Sequence[Result]) -> list[str]:
    overheads = [
        f"{1 + facts['profiling_overhead']:.2f} times ({facts['split']})"
        for facts in (result.parameters for result in found)
        if facts["profiling_overhead"] is not None
    ]
    if not overheads:
        return []
    return [f"Profiling overhead: a profiled decode step takes {', '.join(overheads)} as long as an unprofiled one."]


def _phase_lines(phase: str, rows: list[Row]) -> Iterator[str]:
    work = "all prompts" if phase == "prefill" else "one token for every sequence"
    yield f"\n{phase}, {work}, in ms; {rows[0]['steps']} profiled steps"
    heads = ("total", *CATEGORIES[:-1], "idle/host")
    yield f"{'rank':<10}" + "".join(f"{head:>15}" for head in heads)
    for row in rows:
        cells = [f"{row[name + '_ms']:.2f} {row[name + '_ms'] / row['ms']:>4.0%}" for name in CATEGORIES]
        yield f"{row['rank']:<10}{row['ms']:>15.2f}" + "".join(f"{cell:>15}" for cell in cells)
    if len(rows) > 1:
        summary = summarize_ranks(rows)
        for label, key in (("max", "max_ms"), ("mean", "mean_ms"), ("max/mean", "imbalance")):
            yield f"{label:<10}" + "".join(f"{one[key]:>15.2f}" for one in summary)
    loads = expert_loads(rows)
    if any(load is not None for load in loads):
        shares = ", ".join(f"{load:.2f}" for load in loads if load is not None)
        yield f"expert load of each rank, over the mean: {shares}"


def _label_differences(group: Sequence[StoredResult]) -> list[StoredResult]:
    """Return the profiles with the engine settings that differ appended to `split`: "tp1, eager, threads 2"."""
    engines = [source.result.parameters["engine"] for source in group]
    names = [name for name in dict.fromkeys(name for one in engines for name in one) if name not in _STATED_BY_SPLIT]
    names = [name for name in names if any(one.get(name) != engines[0].get(name) for one in engines)]
    labels = []
    for source, engine in zip(group, engines, strict=True):
        settings = [_describe_setting(name, engine.get(name)) for name in names]
        labels.append(", ".join(filter(None, [source.result.parameters["split"], *settings])))
    labelled = []
    for source, label in zip(group, labels, strict=True):
        file = f", {source.path.stem}" if labels.count(label) > 1 else ""
        facts = {**source.result.parameters, "split": label + file}
        labelled.append(replace(source, result=replace(source.result, parameters=facts)))
    return labelled


def _describe_setting(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return name.replace("_", " ") if value else ""
    return f"{name.replace('_', ' ')} {'auto' if value is None else value}"
