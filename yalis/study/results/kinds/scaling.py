"""The strong-scaling study: one job over several rank counts, splits of the model and all-reduce backends.

Each row is a setting, measured by a throughput benchmark whose result file is named in the column `file`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from yalis.errors import YalisError
from yalis.study.results import drawing
from yalis.study.results.card import Section, Table, TableColumn, fixed, percent, spread_column
from yalis.study.results.column import Column, with_spread
from yalis.study.results.kind import Metric, ResultKind
from yalis.study.results.result import Result, Row, StoredResult, age_key, machine_of, model_name

ONE_RANK = "one rank"  # the scheme of settings with one rank
#: Parameters that define the job: the fields of a ThroughputPlan.
_JOB_PARAMETERS = ("workloads", "dataset", "requests", "vary", "rate", "warmup", "repeats", "peer", "seed")


class Scaling(ResultKind):
    name = "scaling"
    columns = (
        Column("ranks", int, required=True, positive=True),
        Column("scheme", str, required=True),  # one rank, tp, grid, pp, hybrid or dp
        Column("split", str, required=True),  # such as "tp2x2-pp2"
        Column("allreduce", str, required=True),  # empty with one rank
        Column("status", str, required=True),  # "ok", or what went wrong
        Column("machine", int, positive=True, required_if_ok=True),  # index into parameters.machines, from 1
        Column("hosts", int, positive=True),
        # of the whole job, as in throughput
        *with_spread(Column("seconds", float, "s", positive=True, required_if_ok=True), spread_required_if_ok=True),
        Column("tokens_per_s", float, "tokens/s", positive=True),
        Column("first_token_ms", float, "ms", positive=True),
        Column("token_ms", float, "ms", positive=True),
        Column("speedup", float),  # over the baseline of its machine
        Column("efficiency", float),  # speed-up over the ratio of rank counts
        Column("same_tokens", float),  # share of outputs with the same tokens as the baseline's
        # how ranks share cores or GPUs, where a speed-up means nothing; else empty
        Column("oversubscribed", str, required=True, renamed_from="crowded"),
        Column("file", str, required=True),  # result file of the setting, relative to this one; may be empty
    )
    parameters = {"engine": {"model": str}, "machines": [dict], "baselines": {"*": str}}
    needs_devices = False  # a study in which every setting failed has none
    identity = ("ranks", "split", "allreduce")
    metrics = (Metric("seconds"),)
    may_differ = frozenset({"ranks", "schemes", "allreduces", "minutes", "node_ranks", "peer", "machines", "baselines"})
    section = Section(
        "Strong scaling",
        "One job over more and more ranks. The dotted line is ideal scaling from the fewest ranks.",
    )
    report_order = 10

    def check_comparable(self, before: Result, after: Result) -> None:
        machines = [result.parameters["machines"] for result in (before, after)]
        if machines[0] != machines[1] or len(machines[0]) != 1:
            raise YalisError("the two studies were not measured on one kind of machine, so they cannot be compared")

    def title(self, result: Result) -> str:
        return model_name(result)

    def table(self, result: Result) -> Table:
        columns = [
            TableColumn("ranks", lambda row: str(row["ranks"])),
            TableColumn("split", lambda row: row["split"], text=True),
            TableColumn("all-reduce", lambda row: row["allreduce"] or "none", text=True),
            spread_column("total", "seconds", 3, " s"),
            TableColumn("tokens/s", fixed("tokens_per_s", 1)),
            TableColumn("TTFT", fixed("first_token_ms", 1, " ms")),
            TableColumn("TPOT", fixed("token_ms", 1, " ms")),
            TableColumn("speed-up", fixed("speedup", 2, "x")),
            TableColumn("efficiency", percent("efficiency")),
            TableColumn("", _remark, text=True),
        ]
        if len(result.parameters["machines"]) > 1:
            columns.insert(0, TableColumn("machine", lambda row: str(row["machine"] or "")))
        return Table(columns, sorted(result.rows, key=lambda row: row["machine"] or 0))  # a failed setting has none

    def notes(self, result: Result) -> list[str]:
        shaded = "Shaded: more ranks than cores or GPUs. These points show overhead, not speed-up."
        return [shaded] * any(row["oversubscribed"] for row in result.rows) + result.notes

    def has_plot(self, result: Result) -> bool:
        return any(row["status"] == "ok" for row in result.rows)

    @drawing.styled
    def plot(self, result: Result) -> Any:
        """Draw time and parallel efficiency against ranks: a panel per all-reduce backend, a line per scheme.

        Every machine has its own rows of panels with their own axes."""
        good = [row for row in result.rows if row["status"] == "ok"]
        several = len(result.parameters["machines"]) > 1
        backends: dict[int, list[str]] = {machine: [] for machine in sorted({row["machine"] for row in good})}
        for row in good:
            if row["ranks"] > 1 and row["allreduce"] not in backends[row["machine"]]:
                backends[row["machine"]].append(row["allreduce"])
        columns = max(1, *map(len, backends.values()))
        figure, axes = drawing.new_figure(6.2 * len(backends), 2 * len(backends), columns, sharex=True, sharey="row")
        schemes = [name for name in dict.fromkeys(row["scheme"] for row in good) if name != ONE_RANK]
        counts = sorted({row["ranks"] for row in good})
        panels = [
            (axes[2 * index : 2 * index + 2, column], machine, backend)
            for index, (machine, names) in enumerate(backends.items())
            for column, backend in enumerate(names or [""])
        ]
        for axis in set(axes.flat) - {axis for pair, *_ in panels for axis in pair}:
            axis.set_visible(False)
        handles: dict[str, Any] = {}
        for (time, efficiency), machine, backend in panels:
            rows = [row for row in good if row["machine"] == machine and row["allreduce"] in (backend, "")]
            handles.update(_draw_panel(time, efficiency, rows, schemes))
            label = backend if columns > 3 else backend and f"all-reduce: {backend}"  # shorter in narrow panels
            time.set_title("\n".join(filter(None, [f"machine {machine}" if several else "", label])))
            _format_panel(time, efficiency, counts, [row["ranks"] for row in rows if row["oversubscribed"]])
        for time, efficiency in zip(axes[::2, 0], axes[1::2, 0], strict=True):
            time.set_ylabel("seconds of the job\nmedian, p10..p90")
            efficiency.set_ylabel("parallel efficiency")
            for axis in (time, efficiency):  # after all panels of the row are drawn
                axis.set_ylim(bottom=0)
        figure.legend(list(handles.values()), list(handles), loc="outside upper center", ncols=len(handles))
        return figure

    def text(self, result: Result) -> Iterator[str]:
        facts = result.parameters
        about = [facts["engine"]["model"], facts.get("dtype", ""), *(device["name"] for device in result.devices)]
        yield " · ".join(filter(None, about))
        heads = (("total", 11), ("p10..p90", 18), ("tokens/s", 10), ("TTFT", 11), ("TPOT", 11))
        start = f"{'ranks':>5}  {'split':<12}{'all-reduce':<14}"
        yield start + "".join(f"{head:>{width}}" for head, width in heads) + f"{'speed-up':>10}{'efficiency':>12}"
        several = len(facts["machines"]) > 1
        for row in result.rows:
            yield _text_line(row) + (f"  machine {row['machine']}" if several and row["machine"] else "")
        yield from result.notes
        for machine, folder in facts["baselines"].items():
            yield f"speed-ups are relative to {folder}" + (f" on machine {machine}" if several else "")

    def superseded(self, sources: Sequence[StoredResult]) -> set[Path]:
        """Return older summaries of the same study, and the results of the settings that the newest one includes."""
        newest: dict[str, StoredResult] = {}
        for source in sorted(sources, key=age_key):
            newest[_study_key(source)] = source
        summaries = {source.path for source in newest.values()}
        settings = {
            source.path.parent / row["file"] for source in newest.values() for row in source.result.rows if row["file"]
        }
        return {source.path for source in sources} - summaries | settings

    def machines(self, result: Result) -> list[dict[str, Any]]:
        listed: list[dict[str, Any]] = result.parameters["machines"]
        return listed if len(listed) > 1 else [machine_of(result)]

    def renumber_machines(self, result: Result, machines: Sequence[dict[str, Any]]) -> Result:
        listed = self.machines(result)
        if len(listed) == 1:
            return result
        rows = [
            {**row, "machine": row["machine"] and 1 + machines.index(listed[row["machine"] - 1])} for row in result.rows
        ]
        return replace(result, rows=rows)


def _draw_panel(time: Any, efficiency: Any, rows: list[Row], schemes: Sequence[str]) -> dict[str, Any]:
    """Draw one all-reduce backend of one machine. Returns the legend handles by label."""
    base = min(rows, key=lambda row: (row["ranks"], row["seconds"]))
    counts = sorted({row["ranks"] for row in rows})
    ideal = [base["seconds"] * base["ranks"] / count for count in counts]
    handles = {"ideal": time.plot(counts, ideal, ":", **drawing.REFERENCE)[0]}
    efficiency.axhline(1, linestyle=":", **drawing.REFERENCE)
    for index, scheme in enumerate(schemes):
        if not any(row["scheme"] == scheme for row in rows):
            continue
        line = [row for row in rows if row["scheme"] in (scheme, ONE_RANK)]
        ranks, seconds = [row["ranks"] for row in line], [row["seconds"] for row in line]
        spread = [
            [row["seconds"] - row["seconds_low"] for row in line],
            [row["seconds_high"] - row["seconds"] for row in line],
        ]
        style = drawing.line_style(index)
        handles[scheme] = time.errorbar(ranks, seconds, yerr=spread, capsize=2.5, elinewidth=1, **style)
        efficiency.plot(ranks, [drawing.or_nan(row["efficiency"]) for row in line], **style)
    return handles


def _format_panel(time: Any, efficiency: Any, counts: Sequence[int], oversubscribed: Sequence[int]) -> None:
    """Set the axes, and shade the rank counts that are oversubscribed."""
    from matplotlib.ticker import NullLocator

    for axis in (time, efficiency):
        axis.set_xscale("log", base=2)
        axis.set_xticks(counts)
        axis.xaxis.set_major_formatter("{x:g}")
        axis.xaxis.set_minor_locator(NullLocator())
        axis.set_xlim(counts[0] / 1.25, counts[-1] * 1.25)
        if oversubscribed:
            start = min(oversubscribed) / 1.4
            axis.axvspan(start, counts[-1] * 1.25, color=drawing.INK, alpha=0.07, linewidth=0)
    if oversubscribed:
        efficiency.text(
            counts[-1] * 1.22, 0.86, "oversubscribed", ha="right", va="top", fontsize=8.5, style="italic",
            transform=efficiency.get_xaxis_transform(),
        )  # fmt: skip
    efficiency.tick_params(labelbottom=True)  # also above the panels of another machine
    efficiency.set_xlabel("ranks")


def _remark(row: Row) -> str:
    if row["status"] != "ok":
        return str(row["status"])
    return "oversubscribed" if row["oversubscribed"] else ""


def _text_line(row: Row) -> str:
    start = f"{row['ranks']:>5}  {row['split']:<12}{row['allreduce'] or '-':<14}"
    if row["status"] != "ok":
        return f"{start}  {row['status']}"
    span = f"{row['seconds_low']:.3f}..{row['seconds_high']:.3f}"
    token = "" if row["token_ms"] is None else f"{row['token_ms']:.1f} ms"
    times = f"{row['seconds']:>9.3f} s{span:>18}{row['tokens_per_s']:>10.1f}{row['first_token_ms']:>8.1f} ms{token:>11}"
    remark = " (oversubscribed)" if row["oversubscribed"] else ""
    return f"{start}{times}{row['speedup']:>9.2f}x{row['efficiency']:>12.0%}{remark}"


def _study_key(source: StoredResult) -> str:
    """Return a key that is equal for summaries of one study: same folder, job and engine."""
    facts = {name: source.result.parameters.get(name) for name in ("engine", *_JOB_PARAMETERS)}
    return json.dumps([str(source.path.parent), facts], sort_keys=True)
