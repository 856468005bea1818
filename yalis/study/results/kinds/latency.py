"""The latency benchmark: time to first token and time of a decode step, by batch, prompt and output length."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from yalis.errors import count_of
from yalis.study.results import drawing
from yalis.study.results.card import (
    SHARE_OF_FLOOR,
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
from yalis.study.results.result import Result, Row, describe_split, model_name, ranks_per_gpu


class Latency(ResultKind):
    name = "latency"
    columns = (
        Column("engine", str, required=True),
        Column("version", str, required=True),
        Column("status", str, required=True),  # "ok", or why there are no figures
        Column("batch", int, required=True, positive=True),
        Column("prompt_len", int, "tokens", required=True, positive=True),
        Column("output_len", int, "tokens", required=True, positive=True),
        *with_spread(Column("first_token_ms", float, "ms", positive=True), since=3),
        Column("prefill_tokens_per_s", float, "tokens/s", positive=True),
        *with_spread(Column("decode_ms", float, "ms", positive=True, required_if_ok=True)),
        *with_spread(Column("seconds", float, "s", positive=True, since=3)),  # whole batch; median of the repeats
        Column("tokens_per_s", float, "tokens/s", positive=True, required_if_ok=True),
        Column("host_ms", float, "ms", since=2),  # host time of a decode step that no GPU work hides
        Column("prefill_floor_ms", float, "ms"),
        Column("floor_ms", float, "ms"),  # of a decode step
        Column("share_of_floor", float),
        Column("ratio", float),  # this engine's decode step over ours
        Column("same_tokens", float),  # share of sequences with the same tokens as ours
    )
    parameters = {
        "engine": {"model": str, "tp?": [Count, ...], "allreduce?": str, "ranks_per_gpu?": Count},
        "graph_bytes?": int,
    }
    identity = ("engine", "batch", "prompt_len", "output_len")
    metrics = (Metric("decode_ms", spread_over_steps=True), Metric("first_token_ms"), Metric("seconds"))
    may_differ = frozenset(
        {"peer", "batch", "workload", "load_seconds", "graph_bytes"}
        | {"read_bytes_per_s", "read_by", "matmul_flops_per_s"}
    )
    section = SHARE_OF_FLOOR
    report_order = 40

    def title(self, result: Result) -> str:
        works = list(dict.fromkeys(_work(row) for row in result.rows))
        title = f"{model_name(result)}{describe_split(result)}, {works[0]}"
        if works[1:]:
            title += f" to {works[-1]}"
        if peers := result.parameters.get("peer"):
            title += f", with {' and '.join(peers)}"
        return title

    def table(self, result: Result) -> Table:
        columns = [
            TableColumn("engine", engine_name, text=True),
            TableColumn("batch x in x out", _work),
            spread_column("TTFT", "first_token_ms", 1, " ms"),
            spread_column("decode step", "decode_ms", 2, " ms"),
            spread_column("total", "seconds", 3, " s"),
            TableColumn("tokens/s", fixed("tokens_per_s", 1)),
            TableColumn("host", fixed("host_ms", 2, " ms")),
            TableColumn("floor", fixed("floor_ms", 2, " ms")),
            TableColumn("of floor", percent("share_of_floor")),
            TableColumn("vs yalis", lambda row: None if row["engine"] == "yalis" else fixed("ratio", 2, "x")(row)),
            TableColumn("same tokens", percent("same_tokens")),
            TableColumn("", status_text, text=True),
        ]
        rows = result.rows
        if _shared_gpu(result) > 1:  # older versions stored a floor for these rows too
            rows = [{**row, "floor_ms": None, "share_of_floor": None} for row in rows]
        return Table(columns, rows)

    def notes(self, result: Result) -> list[str]:
        notes = list(result.notes)
        if (ranks := _shared_gpu(result)) > 1:
            notes.append(f"{ranks} ranks share a GPU: this shows overhead, not speed-up, and has no floor.")
        return notes

    def remarks(self, result: Result) -> list[str]:
        return [f"{line}." for line in _graph_memory(result)]

    def has_plot(self, result: Result) -> bool:
        return bool(self._bars(result))

    def plot(self, result: Result) -> Any:
        return drawing.draw_shares(self._bars(result), "decode steps by batch x prompt x output")

    def _bars(self, result: Result) -> list[drawing.ShareBar]:
        return [
            drawing.ShareBar(
                f"decode {_work(row)}", row["engine"], row["share_of_floor"], f"{short_number(row['decode_ms'])} ms"
            )
            for row in self.table(result).rows
            if row["share_of_floor"] is not None
        ]

    def text(self, result: Result) -> Iterator[str]:
        facts, device = result.parameters, result.devices[0]
        threads = f", {count_of(device['threads'], 'thread')}" if "threads" in device else ""
        ranks = 1 if result.topology is None else result.topology["ranks"]
        about = f"{facts['engine']['model']} · {facts['dtype']} · {device['name']}{threads}"
        yield about + (f" · {ranks} ranks" if ranks > 1 else "")
        read, matmul = facts["read_bytes_per_s"] / 1e9, facts["matmul_flops_per_s"] / 1e9
        method = f" ({facts['read_by']})" if "read_by" in facts else ""
        yield f"measured here: read {read:.1f} GB/s{method}, matmul {matmul:.0f} GFLOP/s"
        yield from _graph_memory(result)
        heads = (
            ("TTFT", 13), ("decode step", 13), ("p10..p90", 16), ("total", 11), ("tokens/s", 10), ("floor", 10),
            ("of floor", 10), ("host", 10),
        )  # fmt: skip
        yield f"{'engine':<20}{'batch x in x out':<17}" + "".join(f"{head:>{width}}" for head, width in heads)
        yield from map(_text_line, result.rows)
        for row in result.rows:
            if row["engine"] != "yalis" and row["status"] == "ok":
                yield _describe_peer(row)
        yield from result.notes


def _graph_memory(result: Result) -> Iterator[str]:
    """Yield a line about the memory of CUDA graphs, if there are any."""
    if graph_bytes := result.parameters.get("graph_bytes"):
        from yalis.parallel.memory import spell_bytes  # imports torch, which reading results does not need

        yield f"CUDA graphs use {spell_bytes(graph_bytes)} of GPU memory"


def _text_line(row: Row) -> str:
    start = f"{engine_name(row):<20}{_work(row):<17}"
    if row["status"] != "ok":
        return f"{start}  {row['status']}"
    spread = f"{row['decode_ms_low']:.2f}..{row['decode_ms_high']:.2f}"
    floor = f"{'none':>10}{'':>10}"
    if row["floor_ms"] is not None:
        floor = f"{row['floor_ms']:>7.2f} ms{row['share_of_floor']:>10.0%}"
    host = "" if row["host_ms"] is None else f"{row['host_ms']:>7.2f} ms"
    return (
        f"{start}{row['first_token_ms']:>10.1f} ms{row['decode_ms']:>10.2f} ms{spread:>16}"
        f"{row['seconds']:>9.3f} s{row['tokens_per_s']:>10.1f}{floor}{host}"
    )


def _describe_peer(row: Row) -> str:
    text = f"batch {row['batch']}: decode step of {row['engine']}: {row['ratio']:.2f}x the time of yalis"
    if row["same_tokens"] is None:
        return f"{text}; tokens not compared because the weights are random"
    if row["same_tokens"] == 1:
        return f"{text}; same tokens"
    return f"{text}; same tokens in {row['same_tokens']:.0%} of the sequences"


def _shared_gpu(result: Result) -> int:
    return ranks_per_gpu(result, result.parameters["engine"].get("ranks_per_gpu", 1))


def _work(row: Row) -> str:
    return f"{row['batch']}x{row['prompt_len']}x{row['output_len']}"
