"""Intervals of predictions, from the bounds of the quantities they rest on."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import hypot

from yalis.planner.communication import LIBRARIES, full_library_of
from yalis.planner.machine import Machine
from yalis.planner.quantity import Quantity


@dataclass(frozen=True)
class Interval:
    """A predicted value and its bounds."""

    value: float
    low: float
    high: float

    def around(self, value: float) -> Interval:
        """Return an interval of the same relative width around another value of the same prediction."""
        factor = value / self.value
        return Interval(value, self.low * factor, self.high * factor)


@dataclass(frozen=True)
class Effect:
    """What a prediction becomes if one quantity takes its lower or upper bound."""

    path: str
    at_low: float
    at_high: float


def effects(
    machine: Machine, predict: Callable[[Machine], float], prefixes: Iterable[str] = ("",), spread: float | None = None
) -> list[Effect]:
    """Return the effect of each quantity whose path starts with one of `prefixes`, without those that have none.

    With `spread` every quantity is changed by this share of its value instead of to its bounds."""
    unchanged = predict(machine)
    found = []
    for path, quantity in machine.quantities().items():
        if not path.startswith(tuple(prefixes)):
            continue
        low, high = (quantity.low, quantity.high) if spread is None else _spread(quantity, spread)
        ends = [predict(machine.with_quantity(path, _fixed(quantity, value))) for value in (low, high)]
        if ends != [unchanged, unchanged]:
            found.append(Effect(path, *ends))
    return found


def interval(
    machine: Machine, predict: Callable[[Machine], float], prefixes: Iterable[str] = ("",), model_error: float = 0.0,
    further: Iterable[Effect] = (),
) -> Interval:  # fmt: skip
    """Return the prediction with the root of the summed squares of all effects in each direction.

    `model_error`: error of the model itself, as a share of the value, which counts as one more effect. `further`:
    effects of quantities that are not of the machine."""
    value = predict(machine)
    below = above = abs(value) * model_error
    for one in (*effects(machine, predict, prefixes), *further):
        below = hypot(below, max(0.0, value - min(one.at_low, one.at_high)))
        above = hypot(above, max(0.0, max(one.at_low, one.at_high) - value))
    return Interval(value, value - below, value + above)


def prefixes_of(library: str) -> tuple[str, ...]:
    """Return the prefixes of the quantities that a prediction with this communication library may depend on."""
    libraries = dict.fromkeys((library, full_library_of(library))) if library in LIBRARIES else ()
    return ("gpu.", "intra_", "nic_", "host.", *(f"libraries.{name}." for name in libraries))


def _spread(quantity: Quantity, spread: float) -> tuple[float, float]:
    return quantity.value * (1 - spread), quantity.value * (1 + spread)


def _fixed(quantity: Quantity, value: float) -> Quantity:
    return Quantity(value, quantity.origin, quantity.source, value, value)
