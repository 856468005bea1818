"""Results as drawings. matplotlib is needed only here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from yalis.errors import YalisError, YalisFailure
from yalis.results import Result
from yalis.study.allreduce import Row, baseline_of, label, model


def check_plot(file: Path) -> None:
    """Refuse, before anything is measured, what could not be drawn."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise YalisError("drawing needs matplotlib, which is not installed; type pip install matplotlib") from None
    if not file.name or file.is_dir():
        raise YalisError(f"--plot is {str(file)!r}, which is no file; give one, such as --plot latency")
    if not file.parent.is_dir():
        raise YalisError(f"--plot is {file}, but there is no folder {file.parent}; make it, or give another")


def draw_allreduce(result: Result, file: Path) -> list[Path]:
    """Latency against size, and below it the speed-up over the baseline; a column for each delay. As PNG and SVG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import FuncFormatter

    delays = list(dict.fromkeys(row["delay_us"] for row in result.rows))
    figure, axes = pyplot.subplots(
        2, len(delays), figsize=(3 + 5 * len(delays), 8), squeeze=False, sharex=True, sharey="row", layout="constrained"
    )
    for column, delay in enumerate(delays):
        latency, speedup = axes[0][column], axes[1][column]
        for name, rows in _lines([row for row in result.rows if row["delay_us"] == delay]).items():
            sizes = [row["bytes"] for row in rows]
            (line,) = latency.plot(sizes, [row["median_us"] for row in rows], marker="o", markersize=3, label=name)
            low, high = ([row[end] for row in rows] for end in ("low_us", "high_us"))
            latency.fill_between(sizes, low, high, color=line.get_color(), alpha=0.15, linewidth=0)
            ratios = [float("nan") if row["speedup"] is None else row["speedup"] for row in rows]
            speedup.plot(sizes, ratios, marker="o", markersize=3, color=line.get_color())
        sizes = sorted({row["bytes"] for row in result.rows})
        expected = [model(result, delay, size) for size in sizes]
        for name, style in (("hierarchical", "--"), ("ring", ":")):
            if expected[0]:
                times = [one[name] for one in expected]
                latency.plot(sizes, times, style, color="grey", linewidth=1, label=f"cost model, {name}")
        for axis in (latency, speedup):
            axis.set_xscale("log", base=2)
            axis.grid(alpha=0.3)
        latency.set_yscale("log")
        latency.set_title("" if delay is None else f"{delay / 1e3:g} ms between hosts, one way")
        speedup.axhline(1, color="grey", linewidth=0.8)
        speedup.set_xlabel("bytes of the message")
        speedup.xaxis.set_major_formatter(FuncFormatter(lambda size, _: _short(size)))
    axes[0][0].set_ylabel("microseconds, median and 10%..90%")
    axes[1][0].set_ylabel(f"speed-up over {baseline_of(result.rows, result.parameters['baseline'])}")
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside right upper", fontsize="small")
    figure.suptitle(f"all-reduce, {result.parameters['ranks']} ranks ({result.parameters['shape']})")
    return _save(figure, file)


def draw_scaling(result: Result, file: Path) -> list[Path]:
    """Time of the job and parallel efficiency against ranks, a line for each scheme and all-reduce. As PNG and SVG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import LogLocator, NullLocator

    figure, (time, efficiency) = pyplot.subplots(1, 2, figsize=(13, 5), layout="constrained")
    good = [row for row in result.rows if row["status"] == "ok"]
    schemes = list(dict.fromkeys(row["scheme"] for row in good))
    backends = list(dict.fromkeys(row["allreduce"] for row in good if row["allreduce"]))
    for machine in dict.fromkeys(row["machine"] for row in good):
        here = [row for row in good if row["machine"] == machine]
        first = [row for row in here if row["scheme"] == "one rank"]
        for scheme, backend in dict.fromkeys((row["scheme"], row["allreduce"]) for row in here):
            # One rank is where every way to split begins.
            line = [*first, *(row for row in here if (row["scheme"], row["allreduce"]) == (scheme, backend))]
            if scheme == "one rank" and len(here) > len(first):
                continue
            told = ", ".join(filter(None, [scheme, backend]))
            style = {
                "color": f"C{schemes.index(scheme)}",
                "linestyle": ("-", "--", ":", "-.")[backends.index(backend) % 4] if backend else "-",
                "marker": "osD^v"[backends.index(backend) % 5] if backend else "o",
                "label": told if len(result.parameters["machines"]) == 1 else f"{told}, machine {machine}",
            }
            ranks, seconds = [row["ranks"] for row in line], [row["seconds"] for row in line]
            below = [row["seconds"] - row["seconds_low"] for row in line]
            above = [row["seconds_high"] - row["seconds"] for row in line]
            time.errorbar(ranks, seconds, yerr=[below, above], capsize=3, markersize=4, **style)
            efficiency.plot(ranks, [row["efficiency"] for row in line], markersize=4, **style)
        base = min(here, key=lambda row: (row["ranks"], row["seconds"]))
        counts = sorted({row["ranks"] for row in here})
        ideal = [base["seconds"] * base["ranks"] / count for count in counts]
        time.plot(counts, ideal, color="grey", linewidth=0.8, label="ideal")
    crowded = [row["ranks"] for row in good if row["crowded"]]
    for axis in (time, efficiency):
        axis.set_xscale("log", base=2)
        axis.set_xticks(sorted({row["ranks"] for row in good}))
        axis.xaxis.set_major_formatter("{x:g}")
        axis.xaxis.set_minor_locator(NullLocator())
        axis.set_xlabel("ranks")
        axis.grid(alpha=0.3)
        if crowded:
            axis.axvspan(min(crowded) / 1.2, max(crowded) * 1.2, color="grey", alpha=0.15, linewidth=0)
    time.set_yscale("log")
    time.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5, 7)))
    time.yaxis.set_major_formatter("{x:g}")
    time.yaxis.set_minor_locator(NullLocator())
    time.set_ylabel("seconds of the job, median and 10%..90%")
    efficiency.set_ylim(bottom=0)
    efficiency.axhline(1, color="grey", linewidth=0.8)
    efficiency.set_ylabel("parallel efficiency")
    figure.legend(*time.get_legend_handles_labels(), loc="outside right upper", fontsize="small")
    figure.suptitle(f"{Path(result.parameters['engine']['model']).name}: strong scaling")
    if result.notes:
        figure.supxlabel("\n".join(result.notes), fontsize="small")
    return _save(figure, file)


def _save(figure: Any, file: Path) -> list[Path]:
    """As PNG and SVG; the figure is then closed."""
    from matplotlib import pyplot

    stem = file.with_suffix("") if file.suffix in (".png", ".svg") else file
    written = [stem.with_name(stem.name + suffix) for suffix in (".png", ".svg")]
    try:
        for path in written:
            figure.savefig(path, dpi=150)
    except OSError as error:
        raise YalisFailure(f"cannot write {path}: {error.strerror}; give another --plot") from error
    finally:
        pyplot.close(figure)
    return written


def _lines(rows: list[Row]) -> dict[str, list[Row]]:
    """The measured rows of each way of doing it, named by what tells them apart."""
    several = {name: len({row[name] for row in rows}) > 1 for name in ("dtype", "mode")}
    lines: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda row: int(row["bytes"])):
        if row["median_us"] is not None:
            told = [label(row), *(str(row[name]) for name, differs in several.items() if differs)]
            lines.setdefault(", ".join(told), []).append(row)
    return lines


def _short(size: Any) -> str:
    return f"{size / 2**20:g}M" if size >= 2**20 else f"{size / 2**10:g}K"
