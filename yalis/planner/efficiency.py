"""Efficiency tables: how close the engine's kernels come to the two rates of a device, and their fixed times.

Shares are relative to a device's read and matmul rates, so that a table measured on one GPU serves another GPU of
which only the specification is known. Fixed times are taken over as they are.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from typing import Any

from yalis.errors import YalisError
from yalis.planner.quantity import Quantity


@dataclass(frozen=True)
class Efficiencies:
    """The parameters of one device type; kernel_times.py and cpu_times.py say what each means."""

    name: str
    device: str  # "cuda" or "cpu"
    parameters: Mapping[str, Quantity]
    calibration: tuple[Mapping[str, str], ...] = ()  # rows of results that parameters were fitted to
    excluded: tuple[
        Mapping[str, str], ...
    ] = ()  # rows that count neither as calibration nor as validation, with reason
    results: tuple[str, ...] = ()  # files of the engine as it is now: calibration rows, and the others as validation
    caveat: str = ""  # how far the validation is evidence
    error: float = 0.0  # relative error that 9 of 10 predictions of rows outside the calibration stay within

    def __getitem__(self, name: str) -> float:
        try:
            return self.parameters[name].value
        except KeyError:
            raise YalisError(f"the efficiency table {self.name!r} has no parameter {name!r}") from None

    def with_values(self, values: Mapping[str, float]) -> Efficiencies:
        """Return this table with other values, for fitting."""
        changed = {
            name: Quantity.of(value, self.parameters[name].origin, self.parameters[name].source)
            for name, value in values.items()
        }
        return replace(self, parameters={**self.parameters, **changed})

    @classmethod
    def from_json(cls, data: Any, label: str) -> Efficiencies:
        if not isinstance(data, dict) or not isinstance(data.get("parameters"), dict):
            raise YalisError(f"{label} is no efficiency table: it has no object 'parameters'")
        if data.get("device") not in ("cuda", "cpu"):
            raise YalisError(f"{label}: device is {data.get('device')!r}; accepted: cuda, cpu")
        parameters = {
            name: Quantity.from_json(one, f"{label}: parameters.{name}") for name, one in data["parameters"].items()
        }
        lists = {name: tuple(data.get(name, ())) for name in ("calibration", "excluded", "results")}
        return cls(
            label,
            data["device"],
            parameters,
            caveat=str(data.get("caveat", "")),
            error=float(data.get("error", 0.0)),
            **lists,
        )


def efficiency_names() -> list[str]:
    """Return the names of the tables that come with yalis."""
    folder = resources.files("yalis.planner") / "efficiencies"
    return sorted(file.name.removesuffix(".json") for file in folder.iterdir() if file.name.endswith(".json"))


@cache
def load_efficiencies(name: str) -> Efficiencies:
    """Return a table by name."""
    if name not in efficiency_names():
        raise YalisError(
            f"unknown efficiency table {name!r}; set gpu.efficiencies of the machine to one of "
            f"{', '.join(efficiency_names())}"
        )
    text = (resources.files("yalis.planner") / "efficiencies" / f"{name}.json").read_text()
    return Efficiencies.from_json(json.loads(text), name)
