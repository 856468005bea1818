"""How far a prediction may be off: each quantity of the machine is moved to its bounds, one at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from yalis.planner.machine import Machine
from yalis.planner.quantity import Quantity

#: Relative error of the step-time model itself on a GPU whose efficiencies are measured (docs/scale.md, validation).
MODEL_ERROR = 0.06


@dataclass(frozen=True)
class Interval:
    """A prediction with its bounds."""

    value: float
    low: float
    high: float

    def scaled(self, factor: float) -> Interval:
        return Interval(self.value * factor, self.low * factor, self.high * factor)

    def around(self, value: float) -> Interval:
        """Return these bounds, relative to the value, around another value of the same prediction."""
        return self.scaled(value / self.value) if self.value else Interval(value, value, value)


@dataclass(frozen=True)
class Sensitivity:
    """The prediction with one quantity at its lower and at its upper bound, relative to the prediction itself."""

    path: str
    origin: str
    at_low: float
    at_high: float

    @property
    def swing(self) -> float:
        return abs(math.log(self.at_high / self.at_low))


def sensitivities(
    machine: Machine, predict: Callable[[Machine], float], paths: Iterable[str], spread: float | None = None
) -> list[Sensitivity]:
    """Return the effect of each quantity on a prediction, the largest first.

    `spread`: move every quantity by this fraction, instead of to its own bounds."""
    value = predict(machine)
    found = []
    for path in paths:
        one = machine.quantities()[path]
        low, high = (one.low, one.high) if spread is None else (one.value * (1 - spread), one.value * (1 + spread))
        if low == high:
            continue
        ends = [predict(machine.with_quantity(path, _fixed(one, end))) / value for end in (low, high)]
        found.append(Sensitivity(path, one.origin, *ends))
    return sorted(found, key=lambda one: -one.swing)


def combine(value: float, effects: Iterable[Sensitivity], model_error: float = MODEL_ERROR) -> Interval:
    """Return the interval of a prediction whose quantities are off independently: logarithms add as squares."""
    below = above = math.log1p(model_error) ** 2
    for one in effects:
        logs = (math.log(one.at_low), math.log(one.at_high))
        below += min(0.0, *logs) ** 2
        above += max(0.0, *logs) ** 2
    return Interval(value, value * math.exp(-math.sqrt(below)), value * math.exp(math.sqrt(above)))


def relevant_paths(machine: Machine, library: str) -> list[str]:
    """Return the quantities that a prediction with this all-reduce library may depend on."""
    others = [f"libraries.{name}." for name in machine.libraries if name != library]
    return [path for path in machine.quantities() if not path.startswith(tuple(others))]


def _fixed(quantity: Quantity, value: float) -> Quantity:
    return replace(quantity, value=value, low=value, high=value)
