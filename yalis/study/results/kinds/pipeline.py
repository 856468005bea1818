"""The pipeline benchmark: how long pipeline stages are idle, by number of micro-batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from yalis.errors import count_of
from yalis.study.results import drawing
from yalis.study.results.card import Section, Table, TableColumn, fixed, percent, spread_column
from yalis.study.results.column import Column, with_spread
from yalis.study.results.kind import Metric, ResultKind
from yalis.study.results.result import Result, model_name


class Pipeline(ResultKind):
    name = "pipeline"
    columns = (
        Column("stages", int, required=True, positive=True),
        Column("micro_batches", int, required=True, positive=True),
        *with_spread(Column("seconds", float, "s", positive=True, required_if_ok=True), since=3),  # of one pass
        Column("idle_share", float, required_if_ok=True),  # of the stages' time
        Column("ideal_idle_share", float, required_if_ok=True),  # (p - 1) / (m + p - 1)
        Column("busy_seconds", list, "s"),  # of each stage
        Column("speedup", float),  # over the first row
    )
    parameters = {"engine": {"model": str}}
    identity = ("stages", "micro_batches")
    metrics = (Metric("seconds"),)
    may_differ = frozenset({"micro_batches"})
    section = Section("Pipeline", "How long stages are idle while micro-batches pass through them.")
    report_order = 70

    def title(self, result: Result) -> str:
        return f"{model_name(result)}, {count_of(result.rows[0]['stages'], 'stage')}"

    def table(self, result: Result) -> Table:
        columns = [
            TableColumn("stages", lambda row: str(row["stages"])),
            TableColumn("micro-batches", lambda row: str(row["micro_batches"])),
            spread_column("time", "seconds", 3, " s"),
            TableColumn("idle", percent("idle_share")),
            TableColumn("ideal", percent("ideal_idle_share")),
            TableColumn("speed-up", fixed("speedup", 2, "x")),
        ]
        return Table(columns, result.rows)

    @drawing.styled
    def plot(self, result: Result) -> Any:
        figure, ((axis,),) = drawing.new_figure(3.2)
        counts = [row["micro_batches"] for row in result.rows]
        positions = range(len(counts))
        measured = [row["idle_share"] for row in result.rows]
        axis.plot(positions, measured, color=drawing.LINE_COLOURS[0], marker="o", label="measured")
        ideal = [row["ideal_idle_share"] for row in result.rows]
        axis.plot(positions, ideal, ":", label="(p - 1) / (m + p - 1)", **drawing.REFERENCE)
        axis.set_xticks(list(positions), list(map(str, counts)))
        axis.set_ylim(bottom=0)
        axis.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
        axis.set_xlabel("micro-batches")
        axis.set_ylabel("idle share of the stages' time")
        axis.legend()
        return figure

    def text(self, result: Result) -> Iterator[str]:
        facts = result.parameters
        prompts = f"{count_of(facts['prompts'], 'prompt')} of {facts['prompt_len']} tokens"
        yield f"{facts['engine']['model']} · {prompts}, prefill only"
        yield (f"{'stages':>7}{'micro-batches':>15}{'time':>12}{'p10..p90':>16}{'idle':>8}{'ideal':>8}{'speed-up':>10}")
        for row in result.rows:
            spread = f"{row['seconds_low'] * 1000:.0f}..{row['seconds_high'] * 1000:.0f}"
            yield (
                f"{row['stages']:>7}{row['micro_batches']:>15}{row['seconds'] * 1000:>9.0f} ms{spread:>16}"
                f"{row['idle_share']:>8.0%}{row['ideal_idle_share']:>8.0%}{row['speedup']:>9.2f}x"
            )
