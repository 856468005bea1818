"""Accuracy of a performance model: measured times of results beside the times that it predicts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import mean
from typing import Any

from yalis.study.results import drawing
from yalis.study.results.card import Section, Table, TableColumn, fixed
from yalis.study.results.column import Column
from yalis.study.results.kind import ResultKind
from yalis.study.results.result import Result, Row


class Accuracy(ResultKind):
    name = "accuracy"
    columns = (
        Column("source", str, required=True),  # file of the measured result, without suffix
        Column("engine", str, required=True),
        Column("model", str, required=True),
        Column("tp", int, required=True, positive=True),
        Column("columns", int, required=True, positive=True),
        Column("pp", int, required=True, positive=True),
        Column("batch", int, required=True, positive=True),
        Column("prompt_len", int, "tokens", required=True, positive=True),
        Column("output_len", int, "tokens", required=True, positive=True),
        Column("phase", str, required=True),  # "first token" or "decode step"
        Column("measured_ms", float, "ms", required=True, positive=True),
        Column("predicted_ms", float, "ms", required=True, positive=True),
        Column("error", float, required=True),  # predicted over measured, less 1
        Column("calibration", str, required=True),  # "yes": the model was fitted to this row
    )
    parameters = {"predictor": str, "machine": str}
    section = Section(
        "Accuracy of predictions",
        "Measured times beside those of a performance model. Rows that the model was fitted to are no evidence for it "
        "and are counted apart.",
    )
    report_order = 46

    def title(self, result: Result) -> str:
        engines = " and ".join(dict.fromkeys(row["engine"] for row in result.rows))
        return f"{result.parameters['predictor']}, measured times of {engines} on {result.parameters['machine']}"

    def table(self, result: Result) -> Table:
        columns = [
            TableColumn("model", lambda row: row["model"], text=True),
            TableColumn("tp", lambda row: str(row["tp"])),
            TableColumn("batch x in x out", _work),
            TableColumn("time", lambda row: row["phase"], text=True),
            TableColumn("measured", fixed("measured_ms", 3, " ms")),
            TableColumn("predicted", fixed("predicted_ms", 3, " ms")),
            TableColumn("error", lambda row: f"{row['error']:+.1%}"),
            TableColumn("fitted to", lambda row: "yes" if row["calibration"] == "yes" else "", text=True),
            TableColumn("result", lambda row: row["source"], text=True),
        ]
        return Table(columns, result.rows)

    def remarks(self, result: Result) -> list[str]:
        return [f"{line}." for line in _summaries(result.rows)]

    def has_plot(self, result: Result) -> bool:
        return True

    @drawing.styled
    def plot(self, result: Result) -> Any:
        models = [
            model for model in dict.fromkeys(row["model"] for row in result.rows) if _is_split(result.rows, model)
        ]
        rows = 1 + 2 * bool(models)
        figure, axes = drawing.new_figure(3.3 * rows, rows=rows, columns=max(2, len(models)))
        for axis, phase in zip(axes[0], ("decode step", "first token"), strict=False):
            _draw_errors(axis, phase, [row for row in result.rows if row["phase"] == phase])
        for line, phase in enumerate(("decode step", "first token"), start=1):
            if not models:
                break
            for axis, model in zip(axes[line], models, strict=False):
                found = [row for row in result.rows if row["model"] == model and row["phase"] == phase]
                _draw_slices(axis, f"{model}, {phase}", found)
                if line == 1:
                    axis.legend(title="batch x in x out")
        for axis in axes.flat:
            if not axis.has_data():
                axis.set_axis_off()
        return figure

    def text(self, result: Result) -> Iterator[str]:
        yield from super().text(result)
        yield from _summaries(result.rows)


def _summaries(rows: Sequence[Row]) -> Iterator[str]:
    """Yield a line for each set of rows: mean and largest error."""
    for phase in ("decode step", "first token", None):
        for calibration in ("no", "yes"):
            errors = [
                abs(row["error"]) for row in rows if phase in (row["phase"], None) and row["calibration"] == calibration
            ]
            if errors:
                kind = "not fitted" if calibration == "no" else "fitted to"
                close = sum(error <= 0.05 for error in errors) / len(errors)
                yield (
                    f"{phase or 'all'}, {kind}: {len(errors)} times, mean error {mean(errors):.1%}, "
                    f"largest {max(errors):.1%}, {close:.0%} within 5%"
                )


def _is_split(rows: Sequence[Row], model: str) -> bool:
    return len({row["tp"] for row in rows if row["model"] == model}) > 1


def _draw_errors(axis: Any, phase: str, rows: Sequence[Row]) -> None:
    """Draw the error of each row over its measured time."""
    for index, (calibration, label) in enumerate((("no", "not fitted"), ("yes", "fitted to"))):
        chosen = [row for row in rows if row["calibration"] == calibration]
        if chosen:
            style = drawing.line_style(index)
            x, y = [row["measured_ms"] for row in chosen], [row["error"] for row in chosen]
            axis.plot(x, y, linestyle="none", label=label, alpha=0.8, **style)
    if not rows:
        return
    axis.axhline(0, **drawing.REFERENCE)
    axis.axhspan(-0.05, 0.05, color=drawing.INK, alpha=0.07, linewidth=0)
    axis.set_xscale("log")
    _label_decades(axis.xaxis)
    axis.yaxis.set_major_formatter(lambda value, _: f"{round(100 * value, 1):+g}%")
    axis.set_title(f"{phase}: error (band: 5%)")
    axis.set_xlabel("measured, ms")
    axis.legend()


def _label_decades(axis: Any) -> None:
    """Label 1, 2, 5, 10 and so on of a logarithmic axis."""
    from matplotlib.ticker import LogLocator, NullLocator

    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(lambda value, _: f"{value:g}")


def _draw_slices(axis: Any, title: str, rows: Sequence[Row]) -> None:
    """Draw measured times as marks and predictions as lines, over tensor-parallel ranks."""
    splits = sorted({row["tp"] for row in rows})
    for index, work in enumerate(dict.fromkeys(map(_work, rows))):
        chosen = sorted((row for row in rows if _work(row) == work), key=lambda row: row["tp"])
        style = drawing.line_style(index)
        x = [splits.index(row["tp"]) for row in chosen]
        axis.plot(x, [row["predicted_ms"] for row in chosen], color=style["color"])
        axis.plot(x, [row["measured_ms"] for row in chosen], linestyle="none", label=work, **style)
    axis.set_title(title)
    axis.set_yscale("log")
    _label_decades(axis.yaxis)
    axis.set_xticks(range(len(splits)), [str(split) for split in splits])
    axis.set_xlabel("tensor-parallel ranks")
    axis.set_ylabel("ms; marks: measured, lines: predicted")


def _work(row: Row) -> str:
    return f"{row['batch']}x{row['prompt_len']}x{row['output_len']}"
