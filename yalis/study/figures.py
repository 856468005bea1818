"""Results as figures, all in one style: for a page in light or dark, and for files of their own.

matplotlib is needed only here.
"""

from __future__ import annotations

import io
import re
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from yalis.errors import YalisError
from yalis.results import Result
from yalis.study.allreduce import baseline_of, fastest, label, model, name_of

#: A part of a phase and its colour; idle is what is left blank, almost.
PART_COLOURS = {
    "matmul": "#4c78a8",
    "attention": "#54a29e",
    "communication": "#e0693e",
    "other": "#b08bbb",
    "idle": "#a9afb9",
}
_LINES = ("#4c78a8", "#e0693e", "#4f9a52", "#8f6bb0", "#c99a1d", "#54a29e", "#b5495b", "#7d6b5d")
_MARKERS = "osD^vPX*"
# Text, axes and ticks. On a page this becomes the colour of its text.
_INK = "#1f2431"
_STYLE: dict[str, Any] = {
    "text.color": _INK, "axes.labelcolor": _INK, "axes.edgecolor": _INK, "xtick.color": _INK, "ytick.color": _INK,
    "font.size": 10, "axes.titlesize": 11, "axes.titleweight": "bold", "axes.titlelocation": "left",
    "axes.labelsize": 9.5, "xtick.labelsize": 9, "ytick.labelsize": 9, "legend.fontsize": 9,
    "axes.spines.top": False, "axes.spines.right": False, "axes.linewidth": 0.8, "axes.axisbelow": True,
    "axes.grid": True, "axes.grid.axis": "y", "grid.color": _INK, "grid.alpha": 0.12, "grid.linewidth": 0.8,
    "legend.frameon": False, "lines.linewidth": 1.8, "lines.markersize": 5, "figure.facecolor": "none",
    "axes.facecolor": "none", "svg.fonttype": "none", "svg.hashsalt": "yalis",
}  # fmt: skip
_WIDTH = 9.6  # inches; a page shows it at full width
_LINE = 120  # characters of a note below it


def styled(draw: Callable[[], Any]) -> Any:
    """A figure drawn in the style of all."""
    import matplotlib

    with matplotlib.rc_context(_STYLE):
        return draw()


def need_matplotlib() -> None:
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise YalisError("drawing needs matplotlib, which is not installed; type pip install matplotlib") from None


def save(figure: Any, file: Path, title: str, notes: Sequence[str] = ()) -> list[Path]:
    """As PNG and SVG on white, with a title above and notes below: files are shown where no page says more."""
    import matplotlib

    if figure.legends:  # above it: a legend and a title of the figure would want the same place
        figure.legends[0].set_title(title, prop={"size": 12, "weight": "bold"})
        figure.legends[0].get_title().set_color(_INK)
    else:
        figure.suptitle(title, fontsize=12, fontweight="bold", color=_INK)
    lines = [line for note in notes for line in textwrap.wrap(note, _LINE)]
    figure.supxlabel("\n".join(lines), fontsize=8.5, color=_INK)
    stem = file.with_suffix("") if file.suffix in (".png", ".svg") else file
    written = [stem.with_name(stem.name + suffix) for suffix in (".png", ".svg")]
    with matplotlib.rc_context({**_STYLE, "svg.fonttype": "path"}):
        for path in written:
            # No date: the same results give the same file.
            about = {"Date": None} if path.suffix == ".svg" else {}
            figure.savefig(path, dpi=150, facecolor="white", metadata=about)
    return written


def inline(figure: Any, name: str) -> str:
    """As an element of a page: text in its colour and font, ids that no other figure has."""
    import matplotlib

    text = io.StringIO()
    with matplotlib.rc_context(_STYLE):
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None})
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :].replace(_INK, "currentColor")
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\b(id="|url\(#|href="#)', rf"\1{name}-", svg)
    svg = re.sub(r"font: ([^;\"]*?)'?DejaVu Sans'?[^;\"]*", r"font: \1 inherit", svg)
    svg = re.sub(r"font:\s*((?:\w+ )*)([\d.]+px) [^;\"]*", _font, svg)
    return re.sub(r'(<svg[^>]*?) height="[^"]*"( [^>]*?)? width="[^"]*"', r"\1\2", svg, count=1)


def _font(found: re.Match[str]) -> str:
    weight = f"font-weight: {found[1].strip()}; " if found[1].strip() else ""
    return f"{weight}font-size: {found[2]}"


def _figure(height: float, rows: int = 1, columns: int = 1, **settings: Any) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDTH, height), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, **settings)


def draw_scaling(result: Result) -> Any:
    """Time and parallel efficiency against ranks: a panel for each all-reduce, a line for each scheme.

    Every machine has its own rows of panels, with axes of their own.
    """
    return styled(lambda: _draw_scaling(result))


def _draw_scaling(result: Result) -> Any:
    from matplotlib.ticker import NullLocator

    good = [row for row in result.rows if row["status"] == "ok"]
    several = len(result.parameters["machines"]) > 1
    groups: dict[int, list[str]] = {machine: [] for machine in sorted({row["machine"] for row in good})}
    for row in good:
        if row["ranks"] > 1 and row["allreduce"] not in groups[row["machine"]]:
            groups[row["machine"]].append(row["allreduce"])
    columns = max(1, *map(len, groups.values()))
    figure, axes = _figure(6.2 * len(groups), 2 * len(groups), columns, sharex=True, sharey="row")
    schemes = [name for name in dict.fromkeys(row["scheme"] for row in good) if name != "one rank"]
    counts = sorted({row["ranks"] for row in good})
    handles: dict[str, Any] = {}
    panels = [
        (axes[2 * place : 2 * place + 2, column], machine, backend)
        for place, (machine, backends) in enumerate(groups.items())
        for column, backend in enumerate(backends or [""])
    ]
    for axis in set(axes.flat) - {axis for pair, *_ in panels for axis in pair}:
        axis.set_visible(False)
    for (time, efficiency), machine, backend in panels:
        here = [row for row in good if row["machine"] == machine and row["allreduce"] in (backend, "")]
        base = min(here, key=lambda row: (row["ranks"], row["seconds"]))
        own = sorted({row["ranks"] for row in here})
        (handles["ideal"],) = time.plot(
            own, [base["seconds"] * base["ranks"] / count for count in own], ":", color=_INK, alpha=0.6, lw=1.2
        )
        efficiency.axhline(1, linestyle=":", color=_INK, alpha=0.6, lw=1.2)
        for place, scheme in enumerate(schemes):
            line = [row for row in here if row["scheme"] in (scheme, "one rank")]
            if len(line) == len([row for row in line if row["scheme"] == "one rank"]):
                continue
            ranks, seconds = [row["ranks"] for row in line], [row["seconds"] for row in line]
            spread = [
                [row["seconds"] - row["seconds_low"] for row in line],
                [row["seconds_high"] - row["seconds"] for row in line],
            ]
            look = {"color": _LINES[place % len(_LINES)], "marker": _MARKERS[place % len(_MARKERS)]}
            handles[scheme] = time.errorbar(ranks, seconds, yerr=spread, capsize=2.5, elinewidth=1, **look)
            efficiency.plot(ranks, [_number(row["efficiency"]) for row in line], **look)
        named = backend if columns > 3 else backend and f"all-reduce: {backend}"  # where there is room
        time.set_title("\n".join(filter(None, [f"machine {machine}" if several else "", named])))
        crowded = [row["ranks"] for row in here if row["crowded"]]
        for axis in (time, efficiency):
            axis.set_xscale("log", base=2)
            axis.set_xticks(counts)
            axis.xaxis.set_major_formatter("{x:g}")
            axis.xaxis.set_minor_locator(NullLocator())
            axis.set_xlim(counts[0] / 1.25, counts[-1] * 1.25)
            if crowded:
                axis.axvspan(min(crowded) / 1.4, counts[-1] * 1.25, color=_INK, alpha=0.07, linewidth=0)
        if crowded:
            efficiency.text(
                counts[-1] * 1.22, 0.86, "crowded", ha="right", va="top", fontsize=8.5, style="italic",
                transform=efficiency.get_xaxis_transform(),
            )  # fmt: skip
        efficiency.tick_params(labelbottom=True)  # also above the panels of another machine
        efficiency.set_xlabel("ranks")
    for time, efficiency in zip(axes[::2, 0], axes[1::2, 0], strict=True):
        time.set_ylabel("seconds of the job\nmedian, 10%..90%")
        efficiency.set_ylabel("parallel efficiency")
        for axis in (time, efficiency):  # once all panels of the row are drawn
            axis.set_ylim(bottom=0)
    figure.legend(list(handles.values()), list(handles), loc="outside upper center", ncols=len(handles))
    return figure


def draw_profiles(found: Sequence[Result]) -> Any:
    """Prefill and decode as stacked bars, one for each rank of each result. The results are of one machine."""
    return styled(lambda: _draw_profiles(found))


def _draw_profiles(found: Sequence[Result]) -> Any:
    phases = list(dict.fromkeys(row["phase"] for result in found for row in result.rows))
    bars = sum(len([row for row in result.rows if row["phase"] == phases[0]]) for result in found)
    figure, axes = _figure(1.5 + 0.36 * bars + 0.22 * len(found), 1, len(phases), sharey=True)
    for axis, phase in zip(axes[0], phases, strict=True):
        place, ticks, names = 0.0, [], []
        longest = max(row["ms"] for result in found for row in result.rows if row["phase"] == phase)
        for result in found:
            rows = [row for row in result.rows if row["phase"] == phase]
            for row in rows:
                left = 0.0
                for part, colour in PART_COLOURS.items():
                    ms = row[f"{part}_ms"]
                    axis.barh(
                        place, ms, left=left, height=0.74, color=colour, linewidth=0,
                        alpha=0.45 if part == "idle" else 1, label=part,
                    )  # fmt: skip
                    if ms > 0.09 * longest:
                        ink = _INK if part == "idle" else "white"
                        share = f"{ms / row['ms']:.0%}"
                        axis.text(left + ms / 2, place, share, ha="center", va="center", color=ink, fontsize=8.5)
                    left += ms
                axis.text(left + 0.015 * longest, place, _ms(row["ms"]), va="center", fontsize=8.5)
                ticks.append(place)
                split = result.parameters["split"]
                names.append(f"{split}, rank {row['rank']}" if len(rows) > 1 else split)
                place += 1
            place += 0.45
        axis.set_yticks(ticks, names)
        axis.set_ylim(place - 0.9, -0.6)
        axis.set_xlim(0, 1.17 * longest)
        axis.locator_params(axis="x", nbins=5)
        axis.grid(axis="x")
        axis.grid(visible=False, axis="y")
        axis.tick_params(axis="y", length=0)
        axis.spines["left"].set_visible(False)
        axis.set_xlabel("milliseconds")
        axis.set_title("Prefill, all prompts" if phase == "prefill" else "Decode, a token for every sequence")
    handles = axes[0][0].get_legend_handles_labels()[0][: len(PART_COLOURS)]
    told = ["idle, host" if part == "idle" else part for part in PART_COLOURS]
    figure.legend(handles, told, loc="outside upper center", ncols=len(told), handlelength=1, handleheight=1)
    return figure


def draw_allreduce(result: Result) -> Any:
    """Latency against size, and below it the speed-up over the baseline; a column for each delay."""
    return styled(lambda: _draw_allreduce(result))


def _draw_allreduce(result: Result) -> Any:
    from matplotlib.ticker import FuncFormatter, LogFormatter, NullLocator

    tuned = bool(result.parameters.get("tune"))
    shown = fastest(result.rows) if tuned else result.rows
    delays = list(dict.fromkeys(row["delay_us"] for row in shown))
    figure, axes = _figure(6.6, 2, len(delays), sharex=True, sharey="row")
    sizes = sorted({row["bytes"] for row in result.rows})
    several = {name: len({row[name] for row in result.rows}) > 1 for name in ("dtype", "mode")}
    handles: dict[str, Any] = {}
    looks: dict[str, dict[str, str]] = {}
    for column, delay in enumerate(delays):
        latency, speedup = axes[0][column], axes[1][column]
        lines: dict[str, list[dict[str, Any]]] = {}
        for row in sorted(shown, key=lambda row: int(row["bytes"])):
            if row["delay_us"] == delay and row["median_us"] is not None:
                told = [
                    name_of(result, row["backend"] if tuned else label(row)),
                    *(str(row[name]) for name, differs in several.items() if differs),
                ]
                lines.setdefault(", ".join(told), []).append(row)
        for name, rows in lines.items():
            place = len(looks)
            look = looks.setdefault(
                name, {"color": _LINES[place % len(_LINES)], "marker": _MARKERS[place // len(_LINES) % len(_MARKERS)]}
            )
            at = [row["bytes"] for row in rows]
            (handles[name],) = latency.plot(at, [row["median_us"] for row in rows], **look)
            latency.fill_between(
                at, *([row[end] for row in rows] for end in ("low_us", "high_us")), color=look["color"], alpha=0.13,
                linewidth=0,
            )  # fmt: skip
            speedup.plot(at, [_number(row["speedup"]) for row in rows], **look)
        expected = [model(result, delay, size) for size in sizes]
        for name, style in zip(expected[0], ("--", ":", "-."), strict=False):
            (handles[f"cost model, {name}"],) = latency.plot(
                sizes, [one[name] for one in expected], style, color=_INK, alpha=0.6, lw=1.2
            )
        for axis in (latency, speedup):
            axis.set_xscale("log", base=2)
            axis.set_xticks(sizes)
            axis.xaxis.set_minor_locator(NullLocator())
            axis.xaxis.set_major_formatter(FuncFormatter(lambda size, _: size_name(size)))
        latency.set_yscale("log")
        latency.yaxis.set_minor_formatter(LogFormatter(minor_thresholds=(1.5, 0.6)))
        speedup.axhline(1, linestyle=":", color=_INK, alpha=0.6, lw=1.2)
        latency.set_title("" if len(delays) == 1 else f"{delay / 1e3:g} ms between hosts, one way")
        speedup.set_xlabel("size of the message")
    axes[0][0].set_ylabel("microseconds\nmedian, 10%..90%")
    against = name_of(result, baseline_of(result.rows, result.parameters["baseline"]))
    axes[1][0].set_ylabel(f"speed-up over\n{against}")
    gains = [row["speedup"] for row in shown if row["speedup"]]
    if gains and max(gains) > 30 * min(gains):
        axes[1][0].set_yscale("log")
        axes[1][0].yaxis.set_major_formatter("{x:g}")
    else:
        axes[1][0].set_ylim(bottom=0)
    figure.legend(list(handles.values()), list(handles), loc="outside upper center", ncols=min(4, len(handles)))
    return figure


def draw_shares(bars: Sequence[tuple[str, str, float]], about: str = "") -> Any:
    """How near measurements come to the device's floor: (what, engine, share) each. `about`: how to read a "what"."""
    return styled(lambda: _draw_shares(bars, about))


def _draw_shares(bars: Sequence[tuple[str, str, float]], about: str) -> Any:
    from matplotlib.patches import Patch

    figure, ((axis,),) = _figure(1.3 + 0.34 * len(bars))
    engines = list(dict.fromkeys(engine for _, engine, _ in bars))
    places, at, last = [], 0.0, bars[0][0]
    for what, engine, share in bars:
        at += 0.45 if what != last else 0
        axis.barh(at, share, height=0.74, color=_LINES[engines.index(engine) % len(_LINES)], linewidth=0)
        axis.text(share + 0.008, at, f"{share:.0%}", va="center", fontsize=8.5)
        places.append(at)
        at, last = at + 1, what
    axis.set_yticks(places, [what for what, _, _ in bars])
    axis.invert_yaxis()
    axis.axvline(1, linestyle=":", color=_INK, alpha=0.6, lw=1.2)
    axis.set_xlim(0, max(1.02, 1.08 * max(share for _, _, share in bars)))
    axis.xaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    axis.grid(axis="x")
    axis.grid(visible=False, axis="y")
    axis.tick_params(axis="y", length=0)
    axis.spines["left"].set_visible(False)
    floor = "share of the floor: the time that memory and arithmetic allow, over the time it took"
    axis.set_xlabel("\n".join(filter(None, [floor, about])))
    if len(engines) > 1:
        patches = [Patch(color=_LINES[place % len(_LINES)]) for place in range(len(engines))]
        figure.legend(patches, engines, loc="outside upper center", ncols=len(engines), handlelength=1, handleheight=1)
    return figure


def draw_kernels(points: Sequence[tuple[str, int, float]]) -> Any:
    """How near kernels come to the device's floor: (kernel, rows of input, share) each."""
    return styled(lambda: _draw_kernels(points))


def _draw_kernels(points: Sequence[tuple[str, int, float]]) -> Any:
    names = list(dict.fromkeys(name for name, _, _ in points))
    figure, ((axis,),) = _figure(1.3 + 0.3 * len(names))
    sizes = sorted({rows for _, rows, _ in points})
    for place, rows in enumerate(sizes):
        own = [(share, names.index(name)) for name, size, share in points if size == rows]
        look = {"color": _LINES[place % len(_LINES)], "marker": _MARKERS[place % len(_MARKERS)]}
        axis.plot(
            *zip(*own, strict=True),
            linestyle="none",
            label=f"{rows} row{'s' * (rows > 1)}",
            alpha=0.85,
            markersize=6.5,
            **look,
        )
    axis.set_yticks(range(len(names)), names)
    axis.set_ylim(len(names) - 0.4, -0.6)
    axis.axvline(1, linestyle=":", color=_INK, alpha=0.6, lw=1.2)
    axis.set_xlim(0, max(1.02, 1.05 * max(share for _, _, share in points)))
    axis.xaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    axis.grid(axis="both")
    axis.set_xlabel("share of the floor")
    figure.legend(*axis.get_legend_handles_labels(), loc="outside upper center", ncols=min(8, len(sizes)))
    return figure


def draw_pipeline(result: Result) -> Any:
    """How long stages stand idle, by number of micro-batches."""
    return styled(lambda: _draw_pipeline(result))


def _draw_pipeline(result: Result) -> Any:
    figure, ((axis,),) = _figure(3.2)
    cuts = [row["micro_batches"] for row in result.rows]
    at = range(len(cuts))
    axis.plot(at, [row["idle_share"] for row in result.rows], color=_LINES[0], marker="o", label="measured")
    ideal = [row["ideal_idle_share"] for row in result.rows]
    axis.plot(at, ideal, ":", color=_INK, alpha=0.6, lw=1.2, label="(p - 1) / (m + p - 1)")
    axis.set_xticks(list(at), list(map(str, cuts)))
    axis.set_ylim(bottom=0)
    axis.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    axis.set_xlabel("micro-batches")
    axis.set_ylabel("idle share of the stages' time")
    axis.legend()
    return figure


def size_name(size: float) -> str:
    for unit, factor in (("MB", 2**20), ("KB", 2**10)):
        if size >= factor:
            return f"{size / factor:g} {unit}"
    return f"{size:g} B"


def _ms(ms: float) -> str:
    return f"{ms:.0f} ms" if ms >= 100 else f"{ms:.1f} ms" if ms >= 10 else f"{ms:.2f} ms"


def _number(value: float | None) -> float:
    return float("nan") if value is None else value
