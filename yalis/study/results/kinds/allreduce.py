"""The all-reduce benchmark: sizes x dtypes x backends, and what can be derived from its rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from yalis.errors import YalisError, count_of
from yalis.study.allreduce.cost_model import CostModel
from yalis.study.results import drawing
from yalis.study.results.card import Section, Table, TableColumn, fixed, spread_text, status_text
from yalis.study.results.column import Column
from yalis.study.results.form import Count
from yalis.study.results.kind import Metric, ResultKind
from yalis.study.results.result import Result, Row, ranks_per_gpu

#: gloo's own all-reduce at every size, as torch.distributed offers it. The backend "torch" is faster for small sizes.
PLAIN_GLOO = "gloo"
#: Compared with nvrar: other algorithms on its symmetric memory, and NVSHMEM's own all-reduce.
NVRAR_PEERS = ("ring", "oneshot", "nvshmem")
#: NCCL's all-reduce of buffers that are registered with all ranks (symmetric memory).
NCCL_REGISTERED = "nccl-registered"
#: What our backends are compared with.
_RIVALS = {"hierarchical": (PLAIN_GLOO, "mpi"), "nvrar": (*NVRAR_PEERS, "torch", NCCL_REGISTERED)}
_LINK = {"latency": float, "seconds_per_byte": float, "*": float}


def label(row: Row) -> str:
    """Return backend and options, such as "hierarchical inter=halving chunk=65536" or "mpi ring"."""
    options = row["options"]
    if set(options) == {"algorithm"}:
        return f"{row['backend']} {options['algorithm']}"
    return " ".join([row["backend"], *(f"{name}={value}" for name, value in options.items())])


def size_name(size: float) -> str:
    """Return a size such as "64 KB"."""
    for unit, factor in (("MB", 2**20), ("KB", 2**10)):
        if size >= factor:
            return f"{size / factor:g} {unit}"
    return f"{size:g} B"


def short_size(size: int) -> str:
    """Return a size such as "64K", as --sizes accepts it."""
    for unit, factor in (("M", 1 << 20), ("K", 1 << 10)):
        if size % factor == 0:
            return f"{size // factor}{unit}"
    return str(size)


def baseline_of(rows: Sequence[Row], named: str) -> str:
    """Return the backend that speed-ups are over: `named` if given, else gloo if it was measured, else torch."""
    return named or (PLAIN_GLOO if any(row["backend"] == PLAIN_GLOO for row in rows) else "torch")


def add_speedups(rows: list[Row], baseline: str) -> list[Row]:
    """Fill each row's speed-up over the baseline in the same setting, or over the eager one if it has no graph mode."""
    name = baseline_of(rows, baseline)
    found = {_setting(row): row["median_us"] for row in reversed(rows) if row["backend"] == name}
    for row in rows:
        against = found.get(_setting(row)) or found.get((*_setting(row)[:-1], "eager"))
        if against and row["median_us"]:
            row["speedup"] = against / row["median_us"]
    return rows


def _setting(row: Row) -> tuple[Any, ...]:
    return row["delay_us"], row["dtype"], row["bytes"], row["mode"]


def _backend_setting(row: Row) -> tuple[Any, ...]:
    return *_setting(row), row["backend"]


def fully_measured(rows: Sequence[Row]) -> list[Row]:
    """Return the rows with the most repeats of their backend and setting. `--tune` drops slow options earlier."""
    max_repeats: dict[tuple[Any, ...], int] = {}
    for row in rows:
        key = _backend_setting(row)
        max_repeats[key] = max(max_repeats.get(key, 0), row["repeats"] or 0)
    return [
        row
        for row in rows
        if row["median_us"] is not None and (row["repeats"] or 0) == max_repeats[_backend_setting(row)]
    ]


def fastest(rows: Sequence[Row]) -> list[Row]:
    """Return the fastest row of each backend in each setting."""
    best: dict[tuple[Any, ...], Row] = {}
    for row in fully_measured(rows):
        key = _backend_setting(row)
        if key not in best or row["median_us"] < best[key]["median_us"]:
            best[key] = row
    return list(best.values())


@dataclass(frozen=True)
class Ratio:
    """How much faster one of our backends is than a rival in the same setting, each with its best options."""

    ours: Row
    rival: Row
    times_faster: float


def ratios(rows: Sequence[Row]) -> list[Ratio]:
    """Compare our backends with each rival that was measured in the same setting."""
    best = {_backend_setting(row): row for row in fastest(rows)}
    return [
        Ratio(row, against, against["median_us"] / row["median_us"])
        for ours, rivals in _RIVALS.items()
        for rival in rivals
        for key, row in best.items()
        if key[-1] == ours and (against := best.get((*key[:-1], rival)))
    ]


def added_by_delay(rows: Sequence[Row]) -> list[tuple[Row, float]]:
    """Return the microseconds the link delay added to each row whose setting was also measured without a delay.

    Without a delay the time is CPU time per message on the hosts, which is not a property of the network."""
    undelayed = {
        (label(row), *_setting(row)[1:]): row["median_us"]
        for row in rows
        if row["delay_us"] == 0 and row["median_us"] is not None
    }
    return [
        (row, row["median_us"] - undelayed[key])
        for row in rows
        if row["delay_us"] and row["median_us"] is not None and (key := (label(row), *_setting(row)[1:])) in undelayed
    ]


class AllReduce(ResultKind):
    name = "allreduce"
    columns = (
        Column("backend", str, required=True),
        Column("options", dict, required=True),  # of the backend; empty: its defaults
        Column("dtype", str, required=True),
        Column("bytes", int, "bytes", required=True, positive=True),
        Column("mode", str, required=True),  # "eager", or "graph": replayed from a CUDA graph
        Column("delay_us", float, "us"),  # one-way, between the hosts of a lab; null elsewhere
        Column("status", str, required=True),  # "ok", or what was wrong
        Column("checked", int, required=True),  # operations whose result was compared with a float64 sum
        Column("repeats", int, since=4),  # measured operations, or replays of a graph of many
        Column(
            "median_us", float, "us", positive=True, required_if_ok=True, low="low_us", high="high_us",
            spread_required=True,
        ),
        Column("low_us", float, "us"),
        Column("high_us", float, "us"),
        Column("bus_gb_per_s", float, "GB/s"),  # bytes * 2 (n - 1) / n over the median, as nccl-tests defines busbw
        Column("speedup", float),  # over the baseline at the same size
    )  # fmt: skip
    parameters = {
        "ranks": Count,
        "shape": str,
        "nodes": [[int, ...], ...],
        "links": [{"delay_us": (float,), "inside?": _LINK, "between?": _LINK, "fixed?": float}],
        "baseline": str,
        "ranks_per_gpu?": Count,
        "lab?": dict,
        "transport?": (str,),
        "table_key?": dict,
    }
    identity = ("backend", "options", "dtype", "bytes", "mode", "delay_us")
    metrics = (Metric("median_us"),)
    may_differ = frozenset(
        {
            "ranks",
            "links",
            "backends",
            "sizes",
            "baseline",
            "tune",
            "join_timeout",
            "start",
            "mpi",
            "transport",
            "table_key",
        }
    )
    section = Section(
        "All-reduce",
        "Time until every rank has the sum, by message size. Bands are the 10th to the 90th percentile.",
    )
    report_order = 30

    def upgrade_row(self, row: Any, version: int) -> Any:
        row = super().upgrade_row(row, version)
        if isinstance(row, dict) and isinstance(options := row.get("options"), dict):  # `inter` was called `between`
            row["options"] = {"inter" if name == "between" else name: value for name, value in options.items()}
        return row

    def check_rows(self, rows: list[Any], label: str) -> None:
        super().check_rows(rows, label)
        if len({row["delay_us"] is None for row in rows}) > 1:
            raise YalisError(f"{label} has a 'delay_us' in some rows and none in others; it is not a yalis result")

    def title(self, result: Result) -> str:
        facts = result.parameters
        title = f"{count_of(facts['ranks'], 'rank')} ({facts['shape']})" + (", tuned" if facts.get("tune") else "")
        delays = {row["delay_us"] for row in result.rows}
        if len(delays) == 1 and (delay := delays.pop()) is not None:
            title += f", {delay / 1e3:g} ms between hosts"
        return title

    def table(self, result: Result) -> Table:
        columns = [
            TableColumn("backend", label, text=True),
            TableColumn("size", lambda row: size_name(row["bytes"])),
            TableColumn("dtype", lambda row: row["dtype"], text=True),
            TableColumn("mode", lambda row: row["mode"], text=True),
            TableColumn("repeats", lambda row: None if row["repeats"] is None else str(row["repeats"])),
            TableColumn("median", fixed("median_us", 1, " us")),
            TableColumn("p10..p90", spread_text("low_us", "high_us", 0)),
            TableColumn("busbw", fixed("bus_gb_per_s", 3, " GB/s")),
            TableColumn("speed-up", fixed("speedup", 2, "x")),
            TableColumn("", status_text, text=True),
        ]
        if len({row["delay_us"] for row in result.rows}) > 1:
            columns.insert(1, TableColumn("delay", fixed("delay_us", 0, " us")))
        return Table(columns, fastest(result.rows) if result.parameters.get("tune") else result.rows)

    def notes(self, result: Result) -> list[str]:
        facts, notes = result.parameters, list(result.notes)
        if facts.get("transport"):
            notes.append(f"Transport between GPUs: {facts['transport']}.")
        if facts.get("lab"):
            notes.append(
                f"The {len(facts['nodes'])} hosts are network namespaces of one machine with {result.host['cores']} "
                "cores, and the delays are emulated. Compare backends with each other, not with a cluster."
            )
        elif result.devices[0]["type"] == "cpu" and facts["ranks"] > result.host["cores"]:
            cores = count_of(result.host["cores"], "core")
            notes.append(f"{facts['ranks']} ranks on {cores}: this shows overhead, not speed-up.")
        elif (shared := ranks_per_gpu(result, facts.get("ranks_per_gpu", 1))) > 1:
            notes.append(f"{shared} ranks share a GPU: this is not the speed of a network.")
        if facts.get("tune"):
            notes.append(
                f"The fastest options of each backend, out of {len(result.rows)} rows; the JSON file has them all."
            )
        return notes

    def has_plot(self, result: Result) -> bool:
        return any(row["median_us"] is not None for row in result.rows)

    @drawing.styled
    def plot(self, result: Result) -> Any:
        """Draw latency against size, and below it the speed-up over the baseline; one column of panels per delay."""
        shown = self.table(result).rows
        delays = list(dict.fromkeys(row["delay_us"] for row in shown))
        figure, axes = drawing.new_figure(6.6, 2, len(delays), sharex=True, sharey="row")
        handles: dict[str, Any] = {}
        styles: dict[str, Any] = {}
        sizes = sorted({row["bytes"] for row in result.rows})
        for column, delay in enumerate(delays):
            latency, speedup = axes[0][column], axes[1][column]
            lines = _lines(result, [row for row in shown if row["delay_us"] == delay])
            handles.update(_draw_lines(latency, speedup, lines, styles))
            if model := CostModel.of(result, delay):
                expected = [model.expected_us(size) for size in sizes]
                for name, style in zip(expected[0], ("--", ":", "-."), strict=False):
                    times = [one[name] for one in expected]
                    (handles[f"cost model, {name}"],) = latency.plot(sizes, times, style, **drawing.REFERENCE)
            _format_axes(latency, speedup, sizes)
            latency.set_title("" if len(delays) == 1 else f"{delay / 1e3:g} ms between hosts, one way")
        axes[0][0].set_ylabel("microseconds\nmedian, p10..p90")
        baseline = _backend_name(result, baseline_of(result.rows, result.parameters["baseline"]))
        axes[1][0].set_ylabel(f"speed-up over\n{baseline}")
        speedups = [row["speedup"] for row in shown if row["speedup"]]
        if speedups and max(speedups) > 30 * min(speedups):
            axes[1][0].set_yscale("log")
            axes[1][0].yaxis.set_major_formatter("{x:g}")
        else:
            axes[1][0].set_ylim(bottom=0)
        figure.legend(list(handles.values()), list(handles), loc="outside upper center", ncols=min(4, len(handles)))
        return figure

    def text(self, result: Result) -> Iterator[str]:
        facts = result.parameters
        lab = " · a lab of hosts" if facts.get("lab") else ""
        yield f"{count_of(facts['ranks'], 'rank')}, {facts['shape']} · {result.devices[0]['name']}{lab}"
        wide = max(len(label(row)) for row in result.rows) + 2
        heads = (
            ("size", 6), ("dtype", 10), ("mode", 7), ("repeats", 9), ("median", 11), ("p10..p90", 23), ("busbw", 8),
            ("speed-up", 10),
        )  # fmt: skip
        for delay in dict.fromkeys(row["delay_us"] for row in result.rows):
            if delay is not None:
                yield f"\n{_delay(delay)} between hosts, one way"
            yield f"{'backend':<{wide}}" + "".join(f"{head:>{width}}" for head, width in heads)
            for row in result.rows:
                if row["delay_us"] == delay:
                    yield f"{label(row):<{wide}}{_text_cells(row)}"
        for title, cells in _summaries(result).items():
            yield f"\n{title}\n  {' · '.join(cells)}"
        if facts.get("transport"):
            yield f"\ntransport between GPUs: {facts['transport']}"
        for note in result.notes:
            yield f"\n{note}"


def _lines(result: Result, rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Return the measured rows of each line of the plot by its label, in ascending order of size."""
    several = [name for name in ("dtype", "mode") if len({row[name] for row in result.rows}) > 1]
    tuned = bool(result.parameters.get("tune"))
    lines: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda row: int(row["bytes"])):
        if row["median_us"] is not None:
            backend = _backend_name(result, row["backend"] if tuned else label(row))
            lines.setdefault(", ".join([backend, *(str(row[name]) for name in several)]), []).append(row)
    return lines


def _draw_lines(latency: Any, speedup: Any, lines: dict[str, list[Row]], styles: dict[str, Any]) -> dict[str, Any]:
    """Draw the lines and return their legend handles. `styles` keeps the style of a line in all panels."""
    colours, markers = drawing.LINE_COLOURS, drawing.MARKERS
    handles = {}
    for name, rows in lines.items():
        index = len(styles)
        new_style = {"color": colours[index % len(colours)], "marker": markers[index // len(colours) % len(markers)]}
        style = styles.setdefault(name, new_style)
        sizes = [row["bytes"] for row in rows]
        (handles[name],) = latency.plot(sizes, [row["median_us"] for row in rows], **style)
        low, high = ([row[end] for row in rows] for end in ("low_us", "high_us"))
        latency.fill_between(sizes, low, high, color=style["color"], alpha=0.13, linewidth=0)
        speedup.plot(sizes, [drawing.or_nan(row["speedup"]) for row in rows], **style)
    return handles


def _format_axes(latency: Any, speedup: Any, sizes: Sequence[int]) -> None:
    from matplotlib.ticker import FuncFormatter, LogFormatter, NullLocator

    for axis in (latency, speedup):
        axis.set_xscale("log", base=2)
        axis.set_xticks(sizes)
        axis.xaxis.set_minor_locator(NullLocator())
        axis.xaxis.set_major_formatter(FuncFormatter(lambda size, _: size_name(size)))
    latency.set_yscale("log")
    latency.yaxis.set_minor_formatter(LogFormatter(minor_thresholds=(1.5, 0.6)))
    speedup.axhline(1, linestyle=":", **drawing.REFERENCE)
    speedup.set_xlabel("message size")


def _backend_name(result: Result, backend: str) -> str:
    """Return the backend, with its transport where that is not the expected one."""
    shared = backend == "torch" and result.parameters.get("ranks_per_gpu", 1) > 1
    return f"{backend} (NCCL over sockets)" if shared and result.devices[0]["type"] == "cuda" else backend


def _summaries(result: Result) -> dict[str, list[str]]:
    """Return lists with one cell per size, by title: our speed-up over rivals, and the time the delay added."""
    found: dict[str, list[str]] = {}
    for ratio in ratios(result.rows):
        row, rival = ratio.ours, ratio.rival
        options = f" ({label(rival)})" if rival["options"] else ""
        title = f"speed-up of {row['backend']} over {rival['backend']}{_describe_setting(row)}"
        found.setdefault(title, []).append(f"{short_size(row['bytes'])} {ratio.times_faster:.2f}x{options}")
    for row, extra_us in added_by_delay(result.rows):
        cells = found.setdefault(f"time added by the delay to {label(row)}{_describe_setting(row)}", [])
        cells.append(f"{short_size(row['bytes'])} {_time(extra_us)}")
    return found


def _describe_setting(row: Row) -> str:
    delay = "" if row["delay_us"] is None else f", {_delay(row['delay_us'])}"
    return f": {row['dtype']}, {row['mode']}{delay}"


def _text_cells(row: Row) -> str:
    start = f"{short_size(row['bytes']):>6}{row['dtype']:>10}{row['mode']:>7}"
    if row["status"] != "ok":
        return f"{start}  {row['status']}"
    span = f"{_time(row['low_us'])}..{_time(row['high_us'])}"
    speedup = f"{row['speedup']:.2f}x" if row["speedup"] is not None else ""
    return f"{start}{row['repeats']:>9}{_time(row['median_us']):>11}{span:>23}{row['bus_gb_per_s']:>8.3f}{speedup:>10}"


def _delay(microseconds: float) -> str:
    return f"{microseconds / 1e3:g} ms"


def _time(microseconds: float) -> str:
    return f"{microseconds:.1f} us" if microseconds < 1e3 else f"{microseconds / 1e3:.2f} ms"
