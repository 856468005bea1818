"""An acceptance run of `yalis accept`: one row per check."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from yalis.errors import YalisError, count_of
from yalis.study.accept.line import OUTCOMES, Line, summarize
from yalis.study.results.card import Section, Table, TableColumn, fixed
from yalis.study.results.column import Column
from yalis.study.results.form import Count
from yalis.study.results.kind import ResultKind
from yalis.study.results.result import Result


class Acceptance(ResultKind):
    name = "acceptance"
    columns = (
        Column("area", str, required=True),
        Column("check", str, required=True),
        Column("outcome", str, required=True),  # "passed", "failed" or "not possible here"
        Column("detail", str, required=True),
        Column("measured_us", float, "us", positive=True),
        Column("predicted_us", float, "us", positive=True),  # by the planner
    )
    parameters = {"ranks": Count, "shape": str, "quick": bool, "stopped": str}
    section = Section(
        "Acceptance", "What works on these ranks. A line that is not possible here gives the reason, and is no failure."
    )
    report_order = 5

    def check_rows(self, rows: list[Any], label: str) -> None:
        super().check_rows(rows, label)
        for number, row in enumerate(rows, 1):
            if row["outcome"] not in OUTCOMES:
                raise YalisError(
                    f"row {number} of {label} has the outcome {row['outcome']!r}; it is not a yalis result"
                )

    def title(self, result: Result) -> str:
        facts = result.parameters
        return f"{count_of(facts['ranks'], 'rank')} ({facts['shape']}){', quick' * facts['quick']}"

    def table(self, result: Result) -> Table:
        columns = [
            TableColumn("area", lambda row: row["area"], text=True),
            TableColumn("check", lambda row: row["check"], text=True),
            TableColumn("outcome", lambda row: row["outcome"], text=True),
            TableColumn("measured", fixed("measured_us", 1, " us")),
            TableColumn("predicted", fixed("predicted_us", 1, " us")),
            TableColumn("detail", lambda row: row["detail"], text=True),
        ]
        return Table(columns, result.rows)

    def notes(self, result: Result) -> list[str]:
        notes = [f"{summarize([row['outcome'] for row in result.rows])}.", *result.notes]
        if stopped := result.parameters["stopped"]:
            notes.append(f"Incomplete: {stopped}.")
        return notes

    def text(self, result: Result) -> Iterator[str]:
        yield self.title(result)
        yield from (str(Line(**row)) for row in result.rows)
        yield from self.notes(result)
