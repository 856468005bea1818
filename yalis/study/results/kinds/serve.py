"""The serving benchmark: latencies that a client sees, against the rate or the number of requests at a time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from yalis.errors import count_of
from yalis.study.results import drawing
from yalis.study.results.card import Section, Table, TableColumn, fixed, status_text
from yalis.study.results.column import Column
from yalis.study.results.form import Count
from yalis.study.results.kind import Metric, ResultKind
from yalis.study.results.result import Result, Row

#: Column and title of each latency.
LATENCIES = (
    ("first_token_ms", "time to first token"),
    ("token_ms", "inter-token latency"),
    ("total_ms", "end-to-end latency"),
)


def _latency_columns(name: str, required: bool) -> tuple[Column, ...]:
    middle = Column(name, float, "ms", required_if_ok=required)
    return (middle, *(Column(f"{name}_{which}", float, "ms") for which in ("mean", "p90", "p99")))


class Serve(ResultKind):
    name = "serve"
    columns = (
        Column("status", str, required=True),  # "ok", or why there are no figures
        Column("rate", float, "requests/s", positive=True),  # of Poisson arrivals; null in a closed loop
        Column("concurrency", int, positive=True),  # requests at a time; null with a rate
        Column("requests", int, required=True, positive=True),
        Column("completed", int, required=True),
        Column("errors", dict, required=True),  # number by HTTP status or kind of failure
        # from the first arrival to the end of the last answer
        Column("seconds", float, "s", positive=True, required_if_ok=True),
        Column("requests_per_s", float, "requests/s", positive=True, required_if_ok=True),
        Column("tokens_per_s", float, "tokens/s", positive=True, required_if_ok=True),  # generated
        Column("prompt_tokens", int, "tokens", required=True),  # of all completed requests together, as are these:
        Column("output_tokens", int, "tokens", required=True),
        Column("cached_tokens", int, "tokens", required=True),  # prompt tokens from the prefix cache
        Column("events", int, required=True),  # server-sent events with output
        Column("most_in_flight", int, required=True, positive=True),
        # medians over requests, or for token_ms over the times between successive events of an answer
        *_latency_columns("first_token_ms", True),
        *_latency_columns("token_ms", False),
        *_latency_columns("total_ms", True),
        Column("client_cpu", float, required=True),  # share of a core that the client used
    )
    parameters = {
        "model": str,
        "server": str,
        "local": bool,
        "client_ceiling_tokens_per_s": float,
        "requests": (Count,),
    }
    identity = ("rate", "concurrency", "requests", "prompt_tokens", "output_tokens")
    metrics = (
        Metric("tokens_per_s", higher_is_better=True),
        Metric("first_token_ms"),
        Metric("token_ms"),
        Metric("total_ms"),
    )
    may_differ = frozenset({"rate", "concurrency", "timeout", "server", "client_ceiling_tokens_per_s"})
    needs_devices = False  # the server's are unknown
    section = Section("Serving", "A running server, measured by a client over HTTP: open loop by rate, or closed loop.")
    report_order = 65

    def title(self, result: Result) -> str:
        return f"{Path(result.parameters['model']).name}, {_describe_requests(result)}"

    def table(self, result: Result) -> Table:
        columns = [
            TableColumn("rate", fixed("rate", 2, " /s")),
            TableColumn("concurrency", lambda row: None if row["concurrency"] is None else str(row["concurrency"])),
            TableColumn("done", lambda row: f"{row['completed']} of {row['requests']}"),
            TableColumn("requests/s", fixed("requests_per_s", 2)),
            TableColumn("tokens/s", fixed("tokens_per_s", 1)),
            TableColumn("TTFT", fixed("first_token_ms", 1, " ms")),
            TableColumn("p99", fixed("first_token_ms_p99", 1, " ms")),
            TableColumn("ITL", fixed("token_ms", 2, " ms")),
            TableColumn("p99", fixed("token_ms_p99", 2, " ms")),
            TableColumn("end to end", fixed("total_ms", 1, " ms")),
            TableColumn("p99", fixed("total_ms_p99", 1, " ms")),
            TableColumn("errors", _errors, text=True),
            TableColumn("", status_text, text=True),
        ]
        return Table(columns, result.rows)

    def notes(self, result: Result) -> list[str]:
        ceiling = result.parameters["client_ceiling_tokens_per_s"]
        most = max(row["client_cpu"] for row in result.rows)
        client = f"The client used at most {most:.0%} of a core; its ceiling is {ceiling:,.0f} tokens/s."
        return [*map(_sentence, result.notes), client, *_remarks(result)]

    def has_plot(self, result: Result) -> bool:
        return any(row["status"] == "ok" for row in result.rows)

    @drawing.styled
    def plot(self, result: Result) -> Any:
        figure, (axes,) = drawing.new_figure(3.4, columns=4)
        rows = [row for row in result.rows if row["status"] == "ok"]
        by_rate = rows[0]["rate"] is not None
        offered = [row["rate" if by_rate else "concurrency"] for row in rows]
        for index, (column, title) in enumerate(LATENCIES):
            for number, (suffix, label) in enumerate((("", "median"), ("_p90", "p90"), ("_p99", "p99"))):
                values = [drawing.or_nan(row[column + suffix]) for row in rows]
                axes[index].plot(offered, values, label=label, **drawing.line_style(number))
            axes[index].set_title(title)
        axes[0].set_ylabel("ms")
        axes[0].legend()
        axes[3].plot(offered, [row["tokens_per_s"] for row in rows], **drawing.line_style(3))
        axes[3].set_title("output tokens/s")
        for axis in axes:
            axis.set_xlabel("requests per second" if by_rate else "requests at a time")
            axis.set_ylim(bottom=0)
        return figure

    def text(self, result: Result) -> Iterator[str]:
        yield self.title(result)
        by_rate = result.rows[0]["rate"] is not None
        heads = ("rate" if by_rate else "concurrency", "done", "requests/s", "tokens/s")
        yield "".join(f"{head:>12}" for head in heads)
        for row in result.rows:
            offered = f"{row['rate']:g}" if by_rate else str(row["concurrency"])
            done = f"{row['completed']}/{row['requests']}"
            if row["status"] != "ok":
                yield f"{offered:>12}{done:>12}  {row['status']}"
                continue
            yield f"{offered:>12}{done:>12}{row['requests_per_s']:>12.2f}{row['tokens_per_s']:>12.1f}"
        for column, title in LATENCIES:
            yield f"{f'{title}, ms':<24}" + "".join(f"{head:>12}" for head in ("mean", "median", "p90", "p99"))
            for row in result.rows:
                if row[column] is not None:
                    offered = f"rate {row['rate']:g}" if by_rate else f"concurrency {row['concurrency']}"
                    names = (f"{column}_mean", column, f"{column}_p90", f"{column}_p99")
                    yield f"  {offered:<22}" + "".join(f"{row[name]:>12.2f}" for name in names)
        yield from self.notes(result)


def _describe_requests(result: Result) -> str:
    row = result.rows[0]
    server = f" on {result.parameters['server']}" if result.parameters["server"] else ""
    return f"{count_of(row['requests'], 'request')} per point{server}"


def _errors(row: Row) -> str | None:
    return ", ".join(f"{count} x {status}" for status, count in row["errors"].items()) or None


def _sentence(note: str) -> str:
    return f"{note[0].upper()}{note[1:].rstrip('.')}."


def _remarks(result: Result) -> Iterator[str]:
    if cached := sum(row["cached_tokens"] for row in result.rows):
        yield f"{count_of(cached, 'prompt token')} came from the prefix cache; another --seed makes new prompts."
    events, tokens = (sum(row[name] for row in result.rows) for name in ("events", "output_tokens"))
    if events and tokens > 1.05 * events:
        yield f"An event carries {tokens / events:.1f} tokens on average; inter-token latency is between events."
