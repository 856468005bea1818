"""The figure of one result, as files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from yalis import results
from yalis.errors import YalisError, YalisFailure
from yalis.results import Result
from yalis.study import figures


def check_plot(file: Path, made: Path | None = None) -> None:
    """Refuse, before anything is measured, what could not be drawn. `made`: a folder that will be there by then."""
    figures.need_matplotlib()
    if not file.name or file.is_dir():
        raise YalisError(f"--plot is {str(file)!r}, which is no file; give one, such as --plot latency")
    if not file.parent.is_dir() and file.parent != made:
        raise YalisError(f"--plot is {file}, but there is no folder {file.parent}; make it, or give another")


def draw_allreduce(result: Result, file: Path) -> list[Path]:
    """Latency against size and the speed-up over the baseline, as PNG and SVG."""
    facts = result.parameters
    title = f"All-reduce, {facts['ranks']} ranks ({facts['shape']})"
    return _save(figures.draw_allreduce(result), file, title, [machine_name(results.machine(result))])


def draw_scaling(result: Result, file: Path) -> list[Path]:
    """Time of the job and parallel efficiency against ranks, as PNG and SVG."""
    return _save(figures.draw_scaling(result), file, f"Strong scaling, {model_name(result)}", result.notes)


def draw_profile(result: Result, file: Path) -> list[Path]:
    """The parts of prefill and decode, as PNG and SVG."""
    notes = [*result.notes, machine_name(results.machine(result))]
    return _save(figures.draw_profiles([result]), file, model_name(result), notes)


def _save(figure: Any, file: Path, title: str, notes: Sequence[str] = ()) -> list[Path]:
    try:
        return figures.save(figure, file, title, notes)
    except OSError as error:
        raise YalisFailure(f"cannot write {error.filename}: {error.strerror}; give another --plot") from error


def model_name(result: Result) -> str:
    """ "smollm2-135m, float32"."""
    facts = result.parameters
    name = Path(facts["engine"]["model"]).name.removesuffix(".json")
    return ", ".join(filter(None, [name, facts.get("dtype", "")]))


def machine_name(machine: dict[str, Any]) -> str:
    """ "NVIDIA H200 · Intel(R) Xeon(R) ...", of what `results.machine` tells."""
    told = [str(device.get("name", device.get("type"))) for device in machine.get("devices", [])]
    devices = ", ".join(dict.fromkeys(told))
    cores = f", {machine['cores']} cores" if "cores" in machine else ""
    return f"{devices} · {machine.get('cpu')}{cores}"
