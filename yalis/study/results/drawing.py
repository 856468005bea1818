"""The common style of all plots, and how figures become files or elements of a report page.

matplotlib is imported only when something is drawn.
"""

from __future__ import annotations

import functools
import io
import re
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from yalis.errors import YalisError

Drawing = TypeVar("Drawing", bound=Callable[..., Any])

LINE_COLOURS = ("#4c78a8", "#e0693e", "#4f9a52", "#8f6bb0", "#c99a1d", "#54a29e", "#b5495b", "#7d6b5d")
MARKERS = "osD^vPX*"
#: Text, axes and ticks. A report page replaces it by the colour of its text.
INK = "#1f2431"
#: A reference line, such as ideal scaling.
REFERENCE: dict[str, Any] = {"color": INK, "alpha": 0.6, "lw": 1.2}
_STYLE: dict[str, Any] = {
    "text.color": INK, "axes.labelcolor": INK, "axes.edgecolor": INK, "xtick.color": INK, "ytick.color": INK,
    "font.size": 10, "axes.titlesize": 11, "axes.titleweight": "bold", "axes.titlelocation": "left",
    "axes.labelsize": 9.5, "xtick.labelsize": 9, "ytick.labelsize": 9, "legend.fontsize": 9,
    "axes.spines.top": False, "axes.spines.right": False, "axes.linewidth": 0.8, "axes.axisbelow": True,
    "axes.grid": True, "axes.grid.axis": "y", "grid.color": INK, "grid.alpha": 0.12, "grid.linewidth": 0.8,
    "legend.frameon": False, "lines.linewidth": 1.8, "lines.markersize": 5, "figure.facecolor": "none",
    "axes.facecolor": "none", "svg.fonttype": "none", "svg.hashsalt": "yalis",
}  # fmt: skip
_WIDTH = 9.6  # inches; a report page shows a figure at full width
_MAX_NOTE_CHARS = 120  # of a line below the figure


def styled(draw: Drawing) -> Drawing:
    """Decorate a function that draws a figure, so that it draws in the common style."""

    @functools.wraps(draw)
    def draw_in_style(*args: Any, **kwargs: Any) -> Any:
        import matplotlib

        with matplotlib.rc_context(_STYLE):
            return draw(*args, **kwargs)

    return draw_in_style  # type: ignore[return-value]


def require_matplotlib() -> None:
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise YalisError("plots need matplotlib, which is not installed; type pip install matplotlib") from None


def new_figure(height: float, rows: int = 1, columns: int = 1, **settings: Any) -> tuple[Any, Any]:
    """Return a figure of `height` inches and its axes as a rows x columns array."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDTH, height), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, **settings)


def line_style(index: int) -> dict[str, str]:
    """Return colour and marker of the line with this index."""
    return {"color": LINE_COLOURS[index % len(LINE_COLOURS)], "marker": MARKERS[index % len(MARKERS)]}


def or_nan(value: float | None) -> float:
    """Replace None by NaN, which matplotlib leaves out of a line."""
    return float("nan") if value is None else value


def save(figure: Any, file: Path, title: str, notes: Sequence[str] = ()) -> list[Path]:
    """Write PNG and SVG on white with a title above and notes below. Returns both paths.

    The notes are part of the image because it is also shown without the report around it."""
    import matplotlib

    if figure.legends:  # a legend above the axes would overlap with a figure title
        figure.legends[0].set_title(title, prop={"size": 12, "weight": "bold"})
        figure.legends[0].get_title().set_color(INK)
    else:
        figure.suptitle(title, fontsize=12, fontweight="bold", color=INK)
    lines = [line for note in notes for line in textwrap.wrap(note, _MAX_NOTE_CHARS)]
    figure.supxlabel("\n".join(lines), fontsize=8.5, color=INK)
    stem = file.with_suffix("") if file.suffix in (".png", ".svg") else file
    written = [stem.with_name(stem.name + suffix) for suffix in (".png", ".svg")]
    with matplotlib.rc_context({**_STYLE, "svg.fonttype": "path"}):
        for path in written:
            # Without a date, the same results give the same file.
            metadata = {"Date": None} if path.suffix == ".svg" else {}
            figure.savefig(path, dpi=150, facecolor="white", metadata=metadata)
    return written


def to_inline_svg(figure: Any, name: str) -> str:
    """Return an SVG element for a page. It inherits text colour and font; its ids are prefixed with `name`."""
    import matplotlib

    text = io.StringIO()
    with matplotlib.rc_context(_STYLE):
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None})
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :].replace(INK, "currentColor")
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\b(id="|url\(#|href="#)', rf"\1{name}-", svg)
    svg = re.sub(r"font: ([^;\"]*?)'?DejaVu Sans'?[^;\"]*", r"font: \1 inherit", svg)
    svg = re.sub(r"font:\s*((?:\w+ )*)([\d.]+px) [^;\"]*", _font_without_family, svg)
    return re.sub(r'(<svg[^>]*?) height="[^"]*"( [^>]*?)? width="[^"]*"', r"\1\2", svg, count=1)


def _font_without_family(found: re.Match[str]) -> str:
    weight = f"font-weight: {found[1].strip()}; " if found[1].strip() else ""
    return f"{weight}font-size: {found[2]}"


class ShareBar(NamedTuple):
    """A bar of draw_shares()."""

    label: str
    engine: str
    share: float  # of the floor
    time: str  # measured, with its unit


@styled
def draw_shares(bars: Sequence[ShareBar], axis_note: str = "") -> Any:
    """Draw bars of shares of the floor, each with its time. `axis_note` explains how to read the labels."""
    from matplotlib.patches import Patch

    figure, ((axis,),) = new_figure(1.3 + 0.34 * len(bars))
    engines = list(dict.fromkeys(bar.engine for bar in bars))
    positions, position, last_label = [], 0.0, bars[0].label
    for label, engine, share, time in bars:
        position += 0.45 if label != last_label else 0
        colour = LINE_COLOURS[engines.index(engine) % len(LINE_COLOURS)]
        axis.barh(position, share, height=0.74, color=colour, linewidth=0)
        axis.text(share + 0.008, position, f"{share:.0%}, {time}", va="center", fontsize=8.5)
        positions.append(position)
        position, last_label = position + 1, label
    axis.set_yticks(positions, [bar.label for bar in bars])
    axis.invert_yaxis()
    axis.axvline(1, linestyle=":", **REFERENCE)
    axis.set_xlim(0, max(1.15, 1.16 * max(bar.share for bar in bars)))
    axis.xaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    axis.grid(axis="x")
    axis.grid(visible=False, axis="y")
    axis.tick_params(axis="y", length=0)
    axis.spines["left"].set_visible(False)
    floor = "share of the floor (roofline lower bound over measured time), and the measured time"
    axis.set_xlabel("\n".join(filter(None, [floor, axis_note])))
    if len(engines) > 1:
        patches = [Patch(color=LINE_COLOURS[index % len(LINE_COLOURS)]) for index in range(len(engines))]
        figure.legend(patches, engines, loc="outside upper center", ncols=len(engines), handlelength=1, handleheight=1)
    return figure
