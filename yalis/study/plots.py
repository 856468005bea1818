"""Write the plot of one result to files."""

from __future__ import annotations

from pathlib import Path

from yalis.errors import YalisError, YalisFailure
from yalis.study import results
from yalis.study.results import Result, drawing


def check_plot(file: Path, output_folder: Path | None = None) -> None:
    """Raise if a plot cannot be written to `file`, before anything is measured.

    `output_folder` need not exist yet: the benchmark creates it."""
    drawing.require_matplotlib()
    if not file.name or file.is_dir():
        raise YalisError(f"--plot is {str(file)!r}, which is not a file; give a file name, such as --plot latency")
    if not file.parent.is_dir() and file.parent != output_folder:
        raise YalisError(f"--plot is {file}, but there is no folder {file.parent}; create it, or give another")


def write_plot(result: Result, file: Path) -> list[Path]:
    """Write a result's plot as PNG and SVG. Returns both paths."""
    kind = results.kind_of(result)
    title = f"{kind.section.title}: {kind.title(result)}"
    notes = [*kind.notes(result), *map(results.machine_name, kind.machines(result))]
    try:
        return drawing.save(kind.plot(result), file, title, notes)
    except OSError as error:
        raise YalisFailure(f"cannot write {error.filename}: {error.strerror}; give another --plot") from error
