"""The prediction of `yalis plan --machine`: one row per split, the best of them replayed on the virtual clock."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from yalis.errors import count_of
from yalis.study.results import drawing
from yalis.study.results.card import Section, Table, TableColumn, fixed
from yalis.study.results.column import Column, with_spread
from yalis.study.results.form import Count
from yalis.study.results.kind import ResultKind
from yalis.study.results.result import Result, Row, model_name

#: As in a step's time (planner/step.py), in the order of the bars.
CATEGORIES = ("matmul", "attention", "other", "communication", "idle")
_SHOWN = 15  # splits in the table


class Plan(ResultKind):
    name = "plan"
    columns = (
        Column("nodes", int, required=True, positive=True),
        Column("gpus", int, required=True, positive=True),
        Column("scheme", str, required=True),  # tp, grid, pp, dp, hybrid or one GPU
        Column("split", str, required=True),  # such as "tp 4x2, pp 2" or "tp 8 ep"
        Column("rows", int, required=True, positive=True),
        Column("columns", int, required=True, positive=True),
        Column("pp", int, required=True, positive=True),
        Column("dp", int, required=True, positive=True),
        Column("expert_parallel", bool, since=7),  # whole experts on each row of a grid
        Column("library", str, required=True),  # of the all-reduce
        Column("best_of_scheme", bool, required=True),  # on this number of nodes
        # the fast estimate of the job; bounds where they were computed
        *with_spread(Column("seconds", float, "s", required=True, positive=True)),
        Column("ttft_ms", float, "ms", required=True),
        Column("decode_ms", float, "ms", required=True),  # in which every running sequence gets a token
        # the job on the virtual clock
        *with_spread(Column("replayed_s", float, "s", positive=True)),
        Column("tokens_per_s", float, "tokens/s"),
        Column("latency_s", float, "s"),  # of a request, mean
        Column("ttft_p90_ms", float, "ms"),
        Column("itl_p90_ms", float, "ms"),
        Column("steps", int),
        Column("preemptions", int),
        # seconds of one rank over the job, of the replay where there is one
        *(Column(f"{name}_s", float, "s", required=True) for name in CATEGORIES),
        Column("weight_bytes", int, "bytes", required=True),  # of the rank with the least memory left
        Column("activation_bytes", int, "bytes", required=True),
        Column("kv_blocks", int, required=True),
        Column("sequences", int, required=True),  # of the longest request, that a replica holds
    )
    parameters = {
        "engine": {"model": str, "max_num_seqs": Count, "max_batch_tokens": Count},
        "dtype": str,
        "machine": {"name": str, "gpu": {"name": str}, "gpus_per_node": Count},
        "workload": str,
        "objective": str,
        "slo": {"*": float},
        "nodes": [Count, ...],
        "splits": Count,  # that were compared
        "seq_len": Count,
        "why": [str],
        "run": str,  # the command that runs the best
        "assumed?": {"*": {"value": float, "low": float, "high": float}},  # about the experts of a mixture of experts
    }
    needs_devices = False
    section = Section(
        "Predictions",
        "What `yalis plan` predicts for a machine: nothing here was measured. Intervals are from the bounds of the "
        "machine's quantities.",
    )
    report_order = 80

    def title(self, result: Result) -> str:
        facts = result.parameters
        return f"{model_name(result)} on {facts['machine']['name']}, {facts['workload']}, best {facts['objective']}"

    def machines(self, result: Result) -> list[dict[str, Any]]:
        machine = result.parameters["machine"]
        name = f"{machine['name']}: {machine['gpus_per_node']} x {machine['gpu']['name']} a node"
        return [{"cpu": "predicted, not measured", "machine": None, "devices": [{"name": name}]}]

    def table(self, result: Result) -> Table:
        columns = [
            TableColumn("GPUs", lambda row: str(row["gpus"])),
            TableColumn("split", lambda row: row["split"], text=True),
            TableColumn("all-reduce", lambda row: row["library"], text=True),
            TableColumn("decode step", fixed("decode_ms", 2, " ms")),
            TableColumn("first token", fixed("ttft_ms", 0, " ms")),
            TableColumn("job", fixed("seconds", 2, " s")),
            TableColumn("replayed", fixed("replayed_s", 2, " s")),
            TableColumn("interval", _interval),
            TableColumn("latency", fixed("latency_s", 2, " s")),
            TableColumn("tokens/s", fixed("tokens_per_s", 1)),
            *(TableColumn(name, _share(name)) for name in CATEGORIES),
            TableColumn("weights", lambda row: f"{row['weight_bytes'] / 2**30:.1f} GiB"),
            TableColumn("sequences", lambda row: str(row["sequences"])),
        ]
        return Table(columns, shown_rows(result))

    def remarks(self, result: Result) -> list[str]:
        facts = result.parameters
        more = (
            f", of which the table shows {len(shown_rows(result))}" if len(shown_rows(result)) < facts["splits"] else ""
        )
        return [
            f"{facts['splits']} splits fit{more}. Percentages are shares of the time of one rank. Sequences of "
            f"{facts['seq_len']} tokens that a replica holds."
        ]

    def notes(self, result: Result) -> list[str]:
        facts = result.parameters
        best = result.rows[0]
        first = f"Best: {best['split']} on {count_of(best['gpus'], 'GPU')}"
        first += f" with {best['library']}" if best["gpus"] > best["dp"] else ""
        return [f"{first}; {facts['why'][0]}." if facts["why"] else f"{first}.", *result.notes]

    @drawing.styled
    def plot(self, result: Result) -> Any:
        """Draw the job's time against GPUs, a line per scheme, and where the time of the best goes."""
        figure, ((time, shares),) = drawing.new_figure(4.2, columns=2)
        best = [row for row in result.rows if row["best_of_scheme"]]
        counts = sorted({row["gpus"] for row in best})
        schemes = list(dict.fromkeys(row["scheme"] for row in sorted(best, key=lambda row: row["seconds"])))
        for index, scheme in enumerate(schemes):
            line = sorted((row for row in best if row["scheme"] == scheme), key=lambda row: row["gpus"])
            seconds = [row["seconds"] for row in line]
            spread = [[row["seconds"] - (row["seconds_low"] or row["seconds"]) for row in line],
                      [(row["seconds_high"] or row["seconds"]) - row["seconds"] for row in line]]  # fmt: skip
            style = drawing.line_style(index)
            time.errorbar([row["gpus"] for row in line], seconds, yerr=spread, capsize=2.5, elinewidth=1,
                          label=scheme, **style)  # fmt: skip
        time.set_xscale("log", base=2)
        time.set_xticks(counts, [str(count) for count in counts])
        time.minorticks_off()
        time.set_ylim(bottom=0)
        time.set_xlabel("GPUs")
        time.set_ylabel("seconds of the job, with interval")
        time.legend(title="best split of")
        fastest = [
            min((row for row in best if row["gpus"] == count), key=lambda row: row["seconds"]) for count in counts
        ]
        draw_breakdown(shares, [f"{row['gpus']}\n{row['split']}" for row in fastest], fastest)
        shares.set_xlabel("GPUs and fastest split")
        return figure

    def text(self, result: Result) -> Iterator[str]:
        yield from super().text(result)


def shown_rows(result: Result) -> Sequence[Row]:
    """Return the best rows, and all that were replayed."""
    return [row for index, row in enumerate(result.rows) if index < _SHOWN or row["replayed_s"] is not None]


def draw_breakdown(axis: Any, labels: Sequence[str], rows: Sequence[Row]) -> None:
    """Draw a stacked bar of seconds per category for each row."""
    bottoms = [0.0] * len(rows)
    for index, name in enumerate(CATEGORIES):
        heights = [row[f"{name}_s"] for row in rows]
        colour = drawing.LINE_COLOURS[index] if name != "idle" else "#c9ccd3"
        axis.bar(range(len(rows)), heights, 0.7, bottom=bottoms, label=name, color=colour, linewidth=0)
        bottoms = [low + height for low, height in zip(bottoms, heights, strict=True)]
    axis.set_xticks(range(len(rows)), labels)
    axis.set_ylim(0, 1.05 * max(bottoms))
    axis.set_ylabel("seconds of one rank")
    handles, names = axis.get_legend_handles_labels()
    axis.legend(handles[::-1], names[::-1])


def _interval(row: Row) -> str | None:
    name = "replayed_s" if row["replayed_s"] is not None else "seconds"
    low, high = row[f"{name}_low"], row[f"{name}_high"]
    return None if low is None else f"{low:.2f}..{high:.2f} s"


def _share(name: str) -> Any:
    def cell(row: Row) -> str:
        total = sum(row[f"{one}_s"] for one in CATEGORIES)
        return f"{max(0.0, row[f'{name}_s']) / total:.0%}"

    return cell
