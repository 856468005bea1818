"""Replays: recorded throughput runs beside their prediction on the planner's virtual clock."""

from __future__ import annotations

from collections.abc import Callable

from yalis.study.results.card import Section, Table, TableColumn, fixed
from yalis.study.results.column import Column
from yalis.study.results.kind import ResultKind
from yalis.study.results.result import Result, Row


class Replay(ResultKind):
    name = "replay"
    columns = (
        Column("source", str, required=True),  # file of the throughput result, without suffix
        Column("model", str, required=True),
        Column("requests", int, required=True, positive=True),
        Column("prompt_tokens", int, "tokens", required=True),
        Column("output_tokens", int, "tokens", required=True),
        Column("measured_s", float, "s", required=True, positive=True),
        Column("predicted_s", float, "s", required=True, positive=True),
        Column("error", float, required=True),  # of the time: predicted over measured, less 1
        Column("measured_steps", int),
        Column("predicted_steps", int, required=True, positive=True),
        Column("measured_first_token_ms", float, "ms"),  # medians over the requests
        Column("predicted_first_token_ms", float, "ms"),
        Column("measured_token_ms", float, "ms"),
        Column("predicted_token_ms", float, "ms"),
        Column("measured_preemptions", int),
        Column("predicted_preemptions", int),
        Column("peak_kv_blocks", int),  # predicted
        Column("kv_blocks", int),
        # predicted seconds of a device by category, which add up to predicted_s
        Column("matmul_s", float, "s"),
        Column("attention_s", float, "s"),
        Column("communication_s", float, "s"),
        Column("other_s", float, "s"),
        Column("idle_s", float, "s"),
    )
    parameters = {"machine": str, "calibration": [str], "fitted": {"*": float}}
    section = Section(
        "Replayed runs",
        "Recorded throughput runs beside the same requests on the planner's virtual clock: the scheduler is the "
        "engine's, step times are predicted.",
    )
    report_order = 47

    def title(self, result: Result) -> str:
        return f"throughput runs on {result.parameters['machine']} and their replay"

    def table(self, result: Result) -> Table:
        columns = [
            TableColumn("model", lambda row: row["model"], text=True),
            TableColumn("requests", lambda row: str(row["requests"])),
            TableColumn("measured", fixed("measured_s", 3, " s")),
            TableColumn("predicted", fixed("predicted_s", 3, " s")),
            TableColumn("error", lambda row: f"{row['error']:+.1%}"),
            TableColumn("steps", lambda row: str(row["measured_steps"])),
            TableColumn("predicted steps", lambda row: str(row["predicted_steps"])),
            TableColumn("TTFT", _both("first_token_ms")),
            TableColumn("TPOT", _both("token_ms")),
            TableColumn("idle", lambda row: f"{row['idle_s'] / row['predicted_s']:.0%}"),
        ]
        return Table(columns, result.rows)

    def notes(self, result: Result) -> list[str]:
        facts = result.parameters
        if not facts["calibration"]:
            return list(result.notes)
        return [*result.notes, f"Step times are those of a table fitted to {', '.join(facts['calibration'])}."]


def _both(name: str) -> Callable[[Row], str | None]:
    """Return a cell of a measured and a predicted median."""

    def cell(row: Row) -> str | None:
        measured, predicted = row[f"measured_{name}"], row[f"predicted_{name}"]
        return None if measured is None or predicted is None else f"{measured:.1f} / {predicted:.1f} ms"

    return cell
