"""Published statements beside the predictions of the planner."""

from __future__ import annotations

from yalis.study.results.card import Table, TableColumn
from yalis.study.results.column import Column, with_spread
from yalis.study.results.kind import ResultKind
from yalis.study.results.kinds.scale import STUDY, predicted_machines
from yalis.study.results.result import Result, Row


class Statements(ResultKind):
    name = "statements"
    columns = (
        Column("name", str, required=True),
        Column("statement", str, required=True),
        Column("predicted", str, required=True),  # what the number is
        *with_spread(Column("value", float)),  # null if it is not predicted
        Column("accepted_low", float),
        Column("accepted_high", float),  # null: no limit
        Column("agrees", bool),  # the prediction is in the accepted range
        Column("may_agree", bool),  # its interval overlaps with that range
        Column("fitted", str, required=True),  # the values that were fitted to it; empty if none were
    )
    parameters = {"machines": {"*": dict}}
    needs_devices = False
    section = STUDY
    report_order = 90
    machines = predicted_machines

    def title(self, result: Result) -> str:
        return "published statements and predictions"

    def table(self, result: Result) -> Table:
        columns = [
            TableColumn("", lambda row: row["name"], text=True),
            TableColumn("statement", lambda row: row["statement"], text=True),
            TableColumn("predicted", lambda row: row["predicted"], text=True),
            TableColumn("prediction", spell_value),
            TableColumn("interval", spell_interval),
            TableColumn("accepted", spell_accepted),
            TableColumn("agrees", spell_agreement, text=True),
            TableColumn("fitted", lambda row: "yes" if row["fitted"] else "no", text=True),
        ]
        return Table(columns, result.rows)

    def notes(self, result: Result) -> list[str]:
        known = [row for row in result.rows if row["value"] is not None and not row["fitted"]]
        agree = sum(row["agrees"] for row in known)
        return [
            f"{agree} of {len(known)} statements that nothing was fitted to agree. A statement that values were fitted "
            "to is no evidence.",
            *result.notes,
        ]


def spell_value(row: Row) -> str:
    return "" if row["value"] is None else _number(row["value"])


def spell_interval(row: Row) -> str:
    return "" if row["value"] is None else f"{_number(row['value_low'])}..{_number(row['value_high'])}"


def spell_accepted(row: Row) -> str:
    if row["accepted_low"] is None:
        return ""
    high = row["accepted_high"]
    return f"{row['accepted_low']:g}..{high:g}" if high is not None else f"{row['accepted_low']:g} or more"


def spell_agreement(row: Row) -> str:
    if row["agrees"] is None:
        return "not predicted"
    return "yes" if row["agrees"] else "interval only" if row["may_agree"] else "no"


def _number(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
