"""A number of a machine, with where it comes from and how far it may be off."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

from yalis.errors import YalisError

#: measured: by a command of this repository. specification: a vendor's data sheet. fitted: chosen so that predictions
#: meet published or measured values, which are then no evidence for it. assumed: an estimate without either.
ORIGINS = ("measured", "specification", "fitted", "assumed")
#: Relative half-width of the interval of a quantity that gives none.
_DEFAULT_SPREAD = {"measured": 0.05, "specification": 0.10, "fitted": 0.20, "assumed": 0.30}
_EXAMPLE = '{"value": 2.5e10, "origin": "specification", "source": "data sheet"}'


@dataclass(frozen=True)
class Quantity:
    """`low` and `high` bound the value; predictions take their intervals from them."""

    value: float
    origin: str
    source: str  # a file of this repository, a data sheet, a publication, or the reason for an assumption
    low: float
    high: float

    def __post_init__(self) -> None:
        _check_origin(self.origin)
        if not self.low <= self.value <= self.high:
            raise YalisError(
                f"{self.value:g} is not between its bounds {self.low:g} and {self.high:g}; give low <= value <= high"
            )

    def __float__(self) -> float:
        return float(self.value)  # JSON may have given an int

    @classmethod
    def of(
        cls, value: float, origin: str, source: str, low: float | None = None, high: float | None = None
    ) -> Quantity:
        """Return a quantity; bounds that are not given follow from its origin."""
        _check_origin(origin)  # before it is looked up: a file may give a list
        spread = _DEFAULT_SPREAD[origin]
        return cls(
            value,
            origin,
            source,
            value * (1 - spread) if low is None else low,
            value * (1 + spread) if high is None else high,
        )

    @classmethod
    def from_json(cls, data: Any, where: str) -> Quantity:
        """Read {"value", "origin", "source"} with optional "low" and "high". `where` names it in errors."""
        if not isinstance(data, dict) or not {"value", "origin", "source"} <= set(data):
            raise YalisError(f"{where} is {_shorten(data)}; give an object such as {_EXAMPLE}")
        if unknown := set(data) - {"value", "origin", "source", "low", "high"}:
            raise YalisError(
                f"{where} has an unknown field {sorted(unknown)[0]!r}; accepted: value, origin, source, low, high"
            )
        for name in ("value", "low", "high"):
            number = data.get(name)
            if not _is_amount(number) and not (number is None and name != "value"):
                raise YalisError(f"{where}: {name} is {_shorten(number)}; give a number of at least 0, such as 2.5e10")
        if not isinstance(data["source"], str):
            raise YalisError(f"{where}: source is {_shorten(data['source'])}; give a text that says where it is from")
        try:
            return cls.of(data["value"], data["origin"], data["source"], data.get("low"), data.get("high"))
        except YalisError as error:
            raise YalisError(f"{where}: {error}") from None

    def to_json(self) -> dict[str, Any]:
        return {"value": self.value, "origin": self.origin, "source": self.source, "low": self.low, "high": self.high}

    def scaled(self, factor: float) -> Quantity:
        """Return this quantity with value and bounds multiplied by `factor`."""
        return Quantity(self.value * factor, self.origin, self.source, self.low * factor, self.high * factor)


def _check_origin(origin: Any) -> None:
    if origin not in ORIGINS:
        raise YalisError(f"unknown origin {_shorten(origin)}; accepted: {', '.join(ORIGINS)}")


def _is_amount(number: Any) -> bool:
    """Return whether a JSON value is a finite number of at least 0. JSON can hold NaN, and ints no float can."""
    if not isinstance(number, (int, float)) or isinstance(number, bool):
        return False
    return 0 <= number <= sys.float_info.max


def _shorten(value: Any) -> str:
    return "missing" if value is None else repr(value)[:60]
