"""The kernel benchmark: the operations of a decode step and prefill attention, against torch and the floor."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from yalis.study.results import drawing
from yalis.study.results.card import (
    SHARE_OF_FLOOR,
    Table,
    TableColumn,
    fixed,
    percent,
    rate,
    short_number,
    status_text,
)
from yalis.study.results.column import Column, with_spread
from yalis.study.results.kind import Metric, ResultKind
from yalis.study.results.result import Result, Row

#: Operations by their names before schema version 5.
_RENAMED_OPERATIONS = {
    "feed": "use last tokens",
    "take": "gather rows",
    "argmax, settle": "pick greedy",
    "prompt attention": "prefill attention",
    "step, dependent launches": "step, PDL",
}


class Kernels(ResultKind):
    name = "kernels"
    columns = (
        Column("kernel", str, required=True),
        Column("shape", str, required=True),
        Column("rows", int, required=True, positive=True),
        Column("status", str, required=True),  # "ok", or what was wrong
        Column("error", float),  # relative to the reference
        *with_spread(Column("us", float, "us", positive=True, required_if_ok=True), since=3),  # ours
        Column("torch_us", float, "us", positive=True),
        Column("ratio", float),  # torch's time over ours
        Column("gb_per_s", float, "GB/s"),  # bytes it must move, over our time
        Column("gflop_per_s", float, "GFLOP/s"),
        Column("floor_us", float, "us"),
        Column("share_of_floor", float),
    )
    parameters = {"dtype": str}
    identity = ("kernel", "shape", "rows")
    metrics = (Metric("us"),)
    may_differ = frozenset({"rows", "read_bytes_per_s", "read_by", "matmul_flops_per_s"})
    added_parameters = frozenset({"prompts", "prompt_len"})  # prefill attention was not measured before
    section = SHARE_OF_FLOOR
    report_order = 50

    def upgrade_row(self, row: Any, version: int) -> Any:
        row = super().upgrade_row(row, version)
        if isinstance(row, dict) and isinstance(name := row.get("kernel"), str):
            row["kernel"] = _RENAMED_OPERATIONS.get(name, name)
        return row

    def title(self, result: Result) -> str:
        return f"Kernels of a decode step, {result.parameters['dtype']}"

    def table(self, result: Result) -> Table:
        columns = [
            TableColumn("kernel", lambda row: row["kernel"], text=True),
            TableColumn("shape", lambda row: row["shape"], text=True),
            TableColumn("rows", lambda row: str(row["rows"])),
            TableColumn("yalis", lambda row: _micros(row["us"]), spread=_spread),
            TableColumn("torch", lambda row: _micros(row["torch_us"])),
            TableColumn("torch / yalis", fixed("ratio", 2, "x")),
            TableColumn("bandwidth", rate("gb_per_s", "B/s")),
            TableColumn("compute", rate("gflop_per_s", "FLOP/s")),
            TableColumn("of floor", percent("share_of_floor")),
            TableColumn("", status_text, text=True),
        ]
        return Table(columns, result.rows)

    def has_plot(self, result: Result) -> bool:
        return any(row["share_of_floor"] is not None for row in result.rows)

    @drawing.styled
    def plot(self, result: Result) -> Any:
        """Draw the share of the floor of each kernel, with one marker per number of rows."""
        points = [
            (f"{row['kernel']} {row['shape']}", row["rows"], row["share_of_floor"])
            for row in result.rows
            if row["share_of_floor"] is not None
        ]
        names = list(dict.fromkeys(name for name, _, _ in points))
        figure, ((axis,),) = drawing.new_figure(1.3 + 0.3 * len(names))
        sizes = sorted({rows for _, rows, _ in points})
        for index, rows in enumerate(sizes):
            of_size = [(share, names.index(name)) for name, size, share in points if size == rows]
            label = f"{rows} row{'s' * (rows > 1)}"
            style = drawing.line_style(index)
            axis.plot(*zip(*of_size, strict=True), linestyle="none", label=label, alpha=0.85, markersize=6.5, **style)
        axis.set_yticks(range(len(names)), names)
        axis.set_ylim(len(names) - 0.4, -0.6)
        axis.axvline(1, linestyle=":", **drawing.REFERENCE)
        axis.set_xlim(0, max(1.02, 1.05 * max(share for _, _, share in points)))
        axis.xaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
        axis.grid(axis="both")
        axis.set_xlabel("share of the floor")
        figure.legend(*axis.get_legend_handles_labels(), loc="outside upper center", ncols=min(8, len(sizes)))
        return figure

    def text(self, result: Result) -> Iterator[str]:
        facts = result.parameters
        read, matmul = facts["read_bytes_per_s"], facts["matmul_flops_per_s"]
        yield f"{result.devices[0]['name']} · {facts['dtype']}"
        yield f"measured here: read {_rate(read, 'B/s')} ({facts['read_by']}), matmul {_rate(matmul, 'FLOP/s')}"
        heads = (("yalis", 12), ("p10..p90", 18), ("torch", 12), ("ratio", 8), ("speed", 15), ("of floor", 10))
        yield f"{'kernel':<26}{'shape':<24}{'rows':>5}" + "".join(f"{head:>{width}}" for head, width in heads)
        for row in result.rows:
            name = f"{row['kernel']:<26}{row['shape']:<24}{row['rows']:>5}"
            if row["status"] != "ok":
                yield f"{name}  {row['status']}"
                continue
            spread = f"{row['us_low']:.1f}..{row['us_high']:.1f}"
            bandwidth, compute = 1e9 * row["gb_per_s"], 1e9 * row["gflop_per_s"]
            memory_bound = bandwidth / read >= compute / matmul
            speed = _rate(bandwidth, "B/s") if memory_bound else _rate(compute, "FLOP/s")
            yield (
                f"{name}{row['us']:>9.1f} us{spread:>18}{row['torch_us']:>9.1f} us{row['ratio']:>7.2f}x"
                f"{speed:>15}{row['share_of_floor']:>10.0%}"
            )


def _micros(value: float | None) -> str | None:
    return None if value is None else f"{short_number(value)} us"


def _spread(row: Row) -> str | None:
    low, high = row["us_low"], row["us_high"]
    return None if low is None or low == high else f"{short_number(low)}..{short_number(high)}"


def _rate(value: float, unit: str) -> str:
    if value >= 1e12:
        return f"{value / 1e12:.2f} T{unit}"
    return f"{value / 1e9:.1f} G{unit}" if value >= 1e9 else f"{value / 1e6:.1f} M{unit}"
