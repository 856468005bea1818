"""The throughput benchmark: a whole job of requests, from the first arrival to the last token."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from yalis.errors import count_of
from yalis.study.results import drawing
from yalis.study.results.card import (
    Section,
    Table,
    TableColumn,
    engine_name,
    fixed,
    percent,
    short_number,
    spread_column,
    status_text,
)
from yalis.study.results.column import Column, with_spread
from yalis.study.results.form import Count
from yalis.study.results.kind import Metric, ResultKind
from yalis.study.results.result import Result, Row, describe_oversubscription, describe_split, model_name


class Throughput(ResultKind):
    name = "throughput"
    columns = (
        Column("engine", str, required=True),
        Column("version", str, required=True),
        Column("status", str, required=True),  # "ok", or why there are no figures
        Column("requests", int, required=True, positive=True),
        Column("prompt_tokens", int, "tokens", required=True),  # of all requests together
        Column("output_tokens", int, "tokens", required=True),
        Column("rate", float, "requests/s"),  # arrival rate; null: all requests arrive at once
        # from the first arrival to the last token; median of the repeats
        *with_spread(Column("seconds", float, "s", positive=True, required_if_ok=True), spread_required_if_ok=True),
        *with_spread(Column("tokens_per_s", float, "tokens/s", positive=True, required_if_ok=True)),  # generated
        Column("requests_per_s", float, "requests/s", positive=True),
        # after the arrival; median over the requests of all repeats
        Column("first_token_ms", float, "ms", positive=True, required_if_ok=True),
        Column("first_token_ms_p90", float, "ms"),
        Column("first_token_ms_p99", float, "ms"),
        Column("token_ms", float, "ms", positive=True),  # time per output token of a request; median over requests
        Column("token_ms_p90", float, "ms"),
        Column("token_ms_p99", float, "ms"),
        Column("cached_tokens", int, "tokens"),  # prompt tokens found in the prefix cache; last repeat
        Column("preemptions", int),  # in all repeats
        Column("steps", int, positive=True, since=6),  # of all replicas together; last repeat
        Column("schedule_s", float, "s", since=6),  # host time of scheduling; last repeat
        Column("launch_s", float, "s", since=6),  # host time of packing and launching; on a CPU, of running
        Column("floor_s", float, "s"),
        Column("share_of_floor", float),
        Column("ratio", float),  # this engine's seconds over ours
        Column("same_tokens", float),  # share of outputs with the same tokens as ours
    )
    parameters = {"engine": {"model": str, "ranks_per_gpu": Count}, "dtype": str, "answers": [str, ...]}
    identity = ("engine", "requests", "prompt_tokens", "rate")
    metrics = (
        Metric("tokens_per_s", higher_is_better=True),
        Metric("seconds"),
        Metric("first_token_ms"),
        Metric("token_ms"),
    )
    may_differ = frozenset({"peer", "answers", "scheduler", "read_bytes_per_s", "read_by", "matmul_flops_per_s"})
    added_parameters = frozenset({"sizes", "temperature", "top_k", "top_p"})
    section = Section("Throughput", "Whole jobs, from the first arrival to the last token.")
    report_order = 60

    def title(self, result: Result) -> str:
        parts = [f"{model_name(result)}{describe_split(result)}", _describe_workload(result.rows[0])]
        return ", ".join(parts + _describe_sampling(result.parameters))

    def table(self, result: Result) -> Table:
        columns = [
            TableColumn("engine", engine_name, text=True),
            TableColumn("requests", lambda row: str(row["requests"])),
            spread_column("total", "seconds", 3, " s"),
            TableColumn("tokens/s", fixed("tokens_per_s", 1)),
            TableColumn("TTFT", fixed("first_token_ms", 1, " ms")),
            TableColumn("p99 TTFT", fixed("first_token_ms_p99", 1, " ms")),
            TableColumn("TPOT", fixed("token_ms", 1, " ms")),
            TableColumn("of floor", percent("share_of_floor")),
            TableColumn("", status_text, text=True),
        ]
        return Table(columns, result.rows)

    def notes(self, result: Result) -> list[str]:
        shared = describe_oversubscription(result)
        return [*result.notes, *([f"{shared}: this shows overhead, not speed-up."] if shared else [])]

    def has_plot(self, result: Result) -> bool:
        return any(row["share_of_floor"] is not None for row in result.rows)

    def plot(self, result: Result) -> Any:
        rows = [row for row in result.rows if row["share_of_floor"] is not None]
        return drawing.draw_shares(
            [
                drawing.ShareBar("total", row["engine"], row["share_of_floor"], f"{short_number(row['seconds'])} s")
                for row in rows
            ]
        )

    def text(self, result: Result) -> Iterator[str]:
        facts, device = result.parameters, result.devices[0]
        ranks = 1 if result.topology is None else result.topology["ranks"]
        about = [facts["engine"]["model"], facts["dtype"], device["name"]] + ([f"{ranks} ranks"] if ranks > 1 else [])
        yield " · ".join(about + _describe_sampling(facts))
        yield _describe_workload(result.rows[0])
        heads = (("total", 12), ("p10..p90", 18), ("tokens/s", 11), ("requests/s", 12), ("of floor", 10))
        yield f"{'engine':<20}" + "".join(f"{head:>{width}}" for head, width in heads)
        for row in result.rows:
            if row["status"] != "ok":
                yield f"{engine_name(row):<20}  {row['status']}"
                continue
            span = f"{row['seconds_low']:.3f}..{row['seconds_high']:.3f}"
            share = "" if row["share_of_floor"] is None else f"{row['share_of_floor']:.0%}"
            speeds = f"{row['tokens_per_s']:>11.1f}{row['requests_per_s']:>12.2f}"
            yield f"{engine_name(row):<20}{row['seconds']:>10.3f} s{span:>18}{speeds}{share:>10}"
        floor = result.rows[0]["floor_s"]
        if floor is not None:
            yield f"floor {floor:.3f} s: the bytes or operations of this job, at the rates measured in this run"
        yield from _percentile_lines(result)
        yield from _remark_lines(result)
        yield from result.notes


def _describe_sampling(parameters: dict[str, Any]) -> list[str]:
    """Return a phrase such as "temperature 0.8, top_p 0.95"; none for greedy sampling."""
    defaults = {"temperature": 0.0, "top_k": 0, "top_p": 1.0}
    used = [f"{name} {parameters[name]:g}" for name, value in defaults.items() if parameters.get(name, value) != value]
    return [", ".join(used)] if used else []


def _describe_workload(row: Row) -> str:
    """Return a phrase such as "16 requests all at once, 1024 + 2048 tokens"; the tokens are those of all requests."""
    arrival = "all at once" if row["rate"] is None else f"arriving at {row['rate']:g} per second"
    return f"{count_of(row['requests'], 'request')} {arrival}, {row['prompt_tokens']} + {row['output_tokens']} tokens"


def _percentile_lines(result: Result) -> Iterator[str]:
    width = 24 if len(result.rows) == 1 else 36
    yield f"{'latency in ms':<{width}}{'median':>12}{'p90':>12}{'p99':>12}"
    for row in result.rows:
        for name, title in (("first_token_ms", "time to first token"), ("token_ms", "time per output token")):
            if row[name] is not None:
                label = title if len(result.rows) == 1 else f"{title}, {row['engine']}"
                values = (row[name], row[f"{name}_p90"], row[f"{name}_p99"])
                yield f"{label:<{width}}" + "".join(f"{value:>12.1f}" for value in values)


def _remark_lines(result: Result) -> Iterator[str]:
    for row in result.rows:
        if row["engine"] != "yalis" and row["status"] == "ok":
            same = row["same_tokens"]
            tokens = "not compared" if same is None else f"equal in {same:.0%} of the answers"
            yield f"{row['engine']}: {row['ratio']:.2f}x the time of yalis; tokens {tokens}"
        if row["preemptions"]:
            yield (
                f"{count_of(row['preemptions'], 'preemption')}: requests lost their KV blocks and were recomputed; "
                "give a larger --kv-memory"
            )
        if row["cached_tokens"]:
            found = "1 prompt token was" if row["cached_tokens"] == 1 else f"{row['cached_tokens']} prompt tokens were"
            yield f"{found} found in the prefix cache"
