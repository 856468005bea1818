"""A figure of the published study, repeated by model. What a row's value means depends on the figure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from yalis.study.results import drawing
from yalis.study.results.card import Section, Table, TableColumn, short_number
from yalis.study.results.column import Column, with_spread
from yalis.study.results.kind import ResultKind
from yalis.study.results.kinds.plan import CATEGORIES, draw_breakdown
from yalis.study.results.result import Result, Row

STUDY = Section(
    "Published study by model",
    "Predictions for the machines of arXiv 2511.09557; nothing here was measured. docs/scale.md has the method, the "
    "parameters with their sources, and what was fitted.",
)
_MAIN_PARAMETERS = 10  # bars of a tornado


def predicted_machines(self: ResultKind, result: Result) -> list[dict[str, Any]]:
    """Return the machine of all results of the study: they are about several, and of none of them measured."""
    return [{"cpu": "predicted, not measured", "machine": None, "devices": [{"name": "machines of the study"}]}]


class Scale(ResultKind):
    name = "scale"
    columns = (
        Column("machine", str, required=True),
        Column("model", str),
        Column("series", str, required=True),  # scheme, phase, library, or main result
        Column("gpus", int, positive=True),
        Column("nodes", int, positive=True),
        Column("message_bytes", int, "bytes", positive=True),
        *with_spread(Column("value", float, required=True)),
        *(Column(f"{name}_s", float, "s") for name in CATEGORIES),
        Column("parameter", str),  # of the sensitivity: the value if this one is 30% lower or higher, relative
        Column("at_low", float),
        Column("at_high", float),
    )
    parameters = {"figure": str, "title": str, "unit": str, "machines": {"*": dict}}
    needs_devices = False
    section = STUDY
    report_order = 91
    machines = predicted_machines

    def title(self, result: Result) -> str:
        return str(result.parameters["title"])

    def table(self, result: Result) -> Table:
        columns = [
            TableColumn("machine", lambda row: row["machine"], text=True),
            TableColumn("model", lambda row: row["model"], text=True),
            TableColumn("series", lambda row: row["series"], text=True),
            TableColumn("GPUs", lambda row: _count(row["gpus"])),
            TableColumn("message", _size),
            TableColumn(result.parameters["unit"], lambda row: short_number(row["value"])),
            TableColumn("interval", _interval),
            TableColumn("parameter", lambda row: row["parameter"], text=True),
            TableColumn("30% lower", lambda row: None if row["at_low"] is None else f"{row['at_low'] - 1:+.1%}"),
            TableColumn("30% higher", lambda row: None if row["at_high"] is None else f"{row['at_high'] - 1:+.1%}"),
        ]  # fmt: skip
        return Table(columns, result.rows)

    @drawing.styled
    def plot(self, result: Result) -> Any:
        return _DRAWINGS[result.parameters["figure"]](result)


def _draw_scaling(result: Result) -> Any:
    rows = result.rows
    names, models = _distinct(rows, "machine"), _distinct(rows, "model")
    figure, axes = drawing.new_figure(3.1 * len(models), len(models), len(names))
    for line, model in enumerate(models):
        for column, machine in enumerate(names):
            axis = axes[line][column]
            panel = [row for row in rows if row["model"] == model and row["machine"] == machine]
            for index, series in enumerate(_distinct(panel, "series")):
                _draw_line(axis, [row for row in panel if row["series"] == series], "gpus", series, index)
            axis.set_title(f"{model}, {machine}")
            _log_axis(axis, sorted({row["gpus"] for row in panel}), str)
            axis.set_ylim(bottom=0)
    for axis in axes[-1]:
        axis.set_xlabel("GPUs")
    for axis in axes[:, 0]:
        axis.set_ylabel(result.parameters["unit"])
    _share_legend(figure, axes[0][0])
    return figure


def _draw_phases(result: Result) -> Any:
    rows = result.rows
    names, phases = _distinct(rows, "machine"), _distinct(rows, "series")
    figure, axes = drawing.new_figure(3.1 * len(phases), len(phases), len(names), sharey="row")
    for line, phase in enumerate(phases):
        for column, machine in enumerate(names):
            panel = [row for row in rows if row["series"] == phase and row["machine"] == machine]
            axis = axes[line][column]
            draw_breakdown(axis, [str(row["gpus"]) for row in panel], panel)
            axis.set_ylim(0, 1.05 * max(row["value"] for row in rows if row["series"] == phase))
            axis.set_title(f"{phase}, {machine}")
            axis.get_legend().remove()
            axis.set_ylabel("seconds" if not column else "")
            axis.set_xlabel("GPUs (tensor parallelism)" if line == len(phases) - 1 else "")
    _share_legend(figure, axes[0][0])
    return figure


def _draw_libraries(result: Result) -> Any:
    rows = result.rows
    names, counts = _distinct(rows, "machine"), sorted({row["nodes"] for row in rows})
    figure, axes = drawing.new_figure(2.9 * len(names), len(names), len(counts), sharey="row")
    libraries = _distinct(rows, "series")
    for line, machine in enumerate(names):
        for column, nodes in enumerate(counts):
            axis = axes[line][column]
            panel = [row for row in rows if row["machine"] == machine and row["nodes"] == nodes]
            if not panel:  # such as one node of one GPU
                axis.set_axis_off()
                continue
            for index, library in enumerate(libraries):
                series = [row for row in panel if row["series"] == library]
                if series:
                    _draw_line(axis, series, "message_bytes", library, index)
            axis.set_yscale("log")
            axis.set_title(f"{machine}, {nodes} node{'s' * (nodes > 1)}", fontsize=10)
            _size_axis(axis, panel)
        shown = next(axis for axis in axes[line] if axis.has_data())
        shown.set_ylabel(result.parameters["unit"])
        shown.tick_params(labelleft=True)
    _share_legend(figure, axes[0][-1])
    return figure


def _draw_speed_ups(result: Result) -> Any:
    rows = result.rows
    names, libraries = _distinct(rows, "machine"), _distinct(rows, "series")
    figure, axes = drawing.new_figure(3.1 * len(libraries), len(libraries), len(names), sharey=True)
    for line, library in enumerate(libraries):
        for column, machine in enumerate(names):
            axis = axes[line][column]
            panel = [row for row in rows if row["machine"] == machine and row["series"] == library]
            for index, nodes in enumerate(sorted({row["nodes"] for row in panel})):
                label = f"{nodes} nodes"
                _draw_line(axis, [row for row in panel if row["nodes"] == nodes], "message_bytes", label, index)
            axis.axhline(1, linestyle=":", **drawing.REFERENCE)
            axis.fill_between([128 << 10, 2 << 20], 1.9, 3.6, color=drawing.INK, alpha=0.1, linewidth=0)
            axis.set_title(f"{library}, {machine}", fontsize=10)
            _size_axis(axis, panel)
        axes[line][0].set_ylabel(result.parameters["unit"])
    _share_legend(figure, axes[0][0])
    return figure


def _draw_gains(result: Result) -> Any:
    rows = result.rows
    names, models = _distinct(rows, "machine"), _distinct(rows, "model")
    figure, axes = drawing.new_figure(3.4, 1, len(names), sharey=True)
    for column, machine in enumerate(names):
        axis, index = axes[0][column], 0
        for model in models:
            for library in _distinct(rows, "series"):
                line = [
                    row for row in rows
                    if (row["machine"], row["model"], row["series"]) == (machine, model, library)
                ]  # fmt: skip
                _draw_line(axis, line, "gpus", f"{model}, {library}", index)
                index += 1
        axis.axhline(1.72, linestyle="--", **drawing.REFERENCE)
        axis.axhline(1, linestyle=":", **drawing.REFERENCE)
        axis.set_title(machine)
        _log_axis(axis, sorted({row["gpus"] for row in rows if row["machine"] == machine}), str)
        axis.set_xlabel("GPUs (dashed: 1.72, published)")
    axes[0][0].set_ylabel(result.parameters["unit"])
    _share_legend(figure, axes[0][0])
    return figure


def _draw_tornado(result: Result) -> Any:
    rows = result.rows
    panels = _distinct(rows, "series")
    figure, axes = drawing.new_figure(2.7 * len(panels), len(panels), 1)
    for axis, series in zip(axes[:, 0], panels, strict=True):
        effects = sorted(
            (row for row in rows if row["series"] == series), key=lambda row: -abs(row["at_high"] - row["at_low"])
        )[:_MAIN_PARAMETERS]
        for position, row in enumerate(effects):
            for name, colour in (("at_low", drawing.LINE_COLOURS[0]), ("at_high", drawing.LINE_COLOURS[1])):
                axis.barh(position, 100 * (row[name] - 1), 0.7, color=colour, linewidth=0)
        axis.set_yticks(range(len(effects)), [row["parameter"].removeprefix("libraries.") for row in effects])
        axis.invert_yaxis()
        axis.axvline(0, linestyle="-", **drawing.REFERENCE)
        axis.set_title(f"{series}: {short_number(effects[0]['value'])}" if effects else series)
        axis.grid(axis="x")
        axis.grid(visible=False, axis="y")
    axes[-1][0].set_xlabel("change in % if the quantity is 30% lower (blue) or higher (orange)")
    return figure


_DRAWINGS: dict[str, Callable[[Result], Any]] = {
    "scaling": _draw_scaling,
    "breakdown": _draw_phases,
    "all-reduce": _draw_libraries,
    "speed-up": _draw_speed_ups,
    "gain": _draw_gains,
    "sensitivity": _draw_tornado,
}


def _draw_line(axis: Any, rows: Sequence[Row], x: str, label: str, index: int) -> None:
    rows = sorted(rows, key=lambda row: row[x])
    style = drawing.line_style(index)
    axis.plot([row[x] for row in rows], [row["value"] for row in rows], label=label, **style)
    low, high = ([row[f"value_{end}"] for row in rows] for end in ("low", "high"))
    axis.fill_between([row[x] for row in rows], low, high, color=style["color"], alpha=0.15, linewidth=0)


def _log_axis(axis: Any, ticks: Sequence[int], spell: Callable[[int], str]) -> None:
    axis.set_xscale("log", base=2)
    axis.set_xticks(ticks, [spell(tick) for tick in ticks])
    axis.minorticks_off()


def _size_axis(axis: Any, rows: Sequence[Row]) -> None:
    _log_axis(axis, sorted({row["message_bytes"] for row in rows})[::3], spell_size)


def _share_legend(figure: Any, axis: Any) -> None:
    handles, labels = axis.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(labels))


def _distinct(rows: Sequence[Row], name: str) -> list[Any]:
    return list(dict.fromkeys(row[name] for row in rows))


def _interval(row: Row) -> str | None:
    low, high = row["value_low"], row["value_high"]
    return None if low == high else f"{short_number(low)}..{short_number(high)}"


def _count(value: int | None) -> str | None:
    return None if value is None else str(value)


def _size(row: Row) -> str | None:
    return None if row["message_bytes"] is None else spell_size(row["message_bytes"])


def spell_size(size: int) -> str:
    """Return a size such as "256 KiB" or "2 MiB"."""
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"
