"""The slice benchmark: prefill and decode step of one rank of a split model, without communication."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from yalis.study.results import drawing
from yalis.study.results.card import (
    Section,
    Table,
    TableColumn,
    fixed,
    percent,
    spread_column,
    status_text,
)
from yalis.study.results.column import Column, with_spread
from yalis.study.results.form import Count
from yalis.study.results.kind import Metric, ResultKind
from yalis.study.results.result import Result, Row, model_name


class Slice(ResultKind):
    name = "slice"
    columns = (
        Column("status", str, required=True),  # "ok", or why there are no figures
        Column("tp", int, required=True, positive=True),  # ranks of the tensor-parallel group
        Column("columns", int, required=True, positive=True),  # of its grid
        Column("pp", int, required=True, positive=True),
        Column("rank", int, required=True),
        Column("batch", int, required=True, positive=True),
        Column("prompt_len", int, "tokens", required=True, positive=True),
        Column("output_len", int, "tokens", required=True, positive=True),
        *with_spread(Column("prefill_ms", float, "ms", positive=True, required_if_ok=True)),  # of the whole batch
        Column("prefill_floor_ms", float, "ms"),
        Column("prefill_share_of_floor", float),
        *with_spread(Column("decode_ms", float, "ms", positive=True, required_if_ok=True)),
        Column("floor_ms", float, "ms"),  # of a decode step
        Column("share_of_floor", float),
        Column("host_ms", float, "ms"),  # host time of a decode step; on a GPU it runs beside the computation
        Column("weight_bytes", int, "bytes", positive=True),
        Column("kv_token_bytes", int, "bytes", positive=True),
        Column("all_reduces", int),  # of the model in a decode step, that were left out
        Column("all_reduce_bytes", int, "bytes"),  # of all of them together
        Column("replays", int),  # steps of one run that were replayed, as CUDA graphs
    )
    parameters = {
        "engine": {"model": str, "max_batch_tokens": Count},
        "dtype": str,
        "tp": [[Count, ...], ...],
        "pp": Count,
        "rank": int,
        "read_bytes_per_s": float,
        "matmul_flops_per_s": float,
    }
    identity = ("tp", "columns", "pp", "rank", "batch", "prompt_len", "output_len")
    metrics = (Metric("decode_ms", spread_over_steps=True), Metric("prefill_ms"))
    may_differ = frozenset({"tp", "workload", "read_bytes_per_s", "read_by", "matmul_flops_per_s"})
    section = Section(
        "Slices",
        "The computation of one rank of a split model, measured alone on one device: every collective returns at once. "
        "The floor is the time to read the rank's weights and KV cache, or to multiply them, whichever is longer.",
    )
    report_order = 45

    def title(self, result: Result) -> str:
        facts = result.parameters
        splits = ", ".join(dict.fromkeys(_split(row) for row in result.rows))
        pipeline = f", pp {facts['pp']}" if facts["pp"] > 1 else ""
        return f"{model_name(result)}, rank {facts['rank']} of tp {splits}{pipeline}"

    def table(self, result: Result) -> Table:
        columns = [
            TableColumn("tp", _split),
            TableColumn("batch x in x out", _work),
            TableColumn("weights", _weights),
            spread_column("prefill", "prefill_ms", 1, " ms"),
            TableColumn("floor", fixed("prefill_floor_ms", 1, " ms")),
            TableColumn("of floor", percent("prefill_share_of_floor")),
            spread_column("decode step", "decode_ms", 3, " ms"),
            TableColumn("floor", fixed("floor_ms", 3, " ms")),
            TableColumn("of floor", percent("share_of_floor")),
            TableColumn("host", fixed("host_ms", 3, " ms")),
            TableColumn("all-reduces left out", _all_reduces),
            TableColumn("", status_text, text=True),
        ]
        return Table(columns, result.rows)

    def remarks(self, result: Result) -> list[str]:
        return [f"Prompts are prefilled in steps of at most {result.parameters['engine']['max_batch_tokens']} tokens."]

    def has_plot(self, result: Result) -> bool:
        return any(row["status"] == "ok" for row in result.rows)

    @drawing.styled
    def plot(self, result: Result) -> Any:
        from matplotlib.ticker import LogLocator, NullLocator

        figure, ((decode, prefill),) = drawing.new_figure(3.6, columns=2)
        works = list(dict.fromkeys(map(_work, result.rows)))
        splits = list(dict.fromkeys(map(_split, result.rows)))
        panels = (
            (decode, "decode step", "decode_ms", "floor_ms"),
            (prefill, "prefill", "prefill_ms", "prefill_floor_ms"),
        )
        for axis, name, column, floor in panels:
            for index, work in enumerate(works):
                rows = {_split(row): row for row in result.rows if _work(row) == work}
                positions = [splits.index(split) for split in rows]
                style = drawing.line_style(index)
                measured = [drawing.or_nan(row[column]) for row in rows.values()]
                axis.plot(positions, measured, label=work, **style)
                floors = [drawing.or_nan(row[floor]) for row in rows.values()]
                axis.plot(positions, floors, ":", color=style["color"])
            axis.set_title(name)
            axis.set_yscale("log")
            axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.yaxis.set_minor_locator(NullLocator())
            axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
            axis.set_xticks(range(len(splits)), splits)
            axis.set_xlabel("tensor-parallel ranks")
        decode.set_ylabel("ms; dotted: floor")
        decode.legend(title="batch x in x out")
        return figure

    def text(self, result: Result) -> Iterator[str]:
        facts = result.parameters
        read, matmul = facts["read_bytes_per_s"] / 1e9, facts["matmul_flops_per_s"] / 1e9
        yield f"{result.devices[0]['name']}, measured here: read {read:.1f} GB/s, matmul {matmul:.0f} GFLOP/s"
        yield from super().text(result)


def _split(row: Row) -> str:
    rows, columns = row["tp"] // row["columns"], row["columns"]
    return str(rows) if columns == 1 else f"{rows}x{columns}"


def _work(row: Row) -> str:
    return f"{row['batch']}x{row['prompt_len']}x{row['output_len']}"


def _weights(row: Row) -> str | None:
    size = row["weight_bytes"]
    if size is None:
        return None
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.2f} MB"


def _all_reduces(row: Row) -> str | None:
    """Format number and mean size, such as "161 x 256 KiB"."""
    count = row["all_reduces"]
    return f"{count} x {row['all_reduce_bytes'] / count / 1024:g} KiB" if count else None
