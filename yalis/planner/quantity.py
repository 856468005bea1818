"""A number of a machine, with where it comes from and how far it may be off."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from yalis.errors import YalisError

#: measured: by a command of this repository. specification: a vendor's data sheet. fitted: chosen so that predictions
#: meet published or measured values, which are then no evidence for it. assumed: an estimate without either.
ORIGINS = ("measured", "specification", "fitted", "assumed")
#: Relative half-width of the interval of a quantity that gives none.
_DEFAULT_SPREAD = {"measured": 0.05, "specification": 0.10, "fitted": 0.20, "assumed": 0.30}


@dataclass(frozen=True)
class Quantity:
    """`low` and `high` bound the value; predictions take their intervals from them."""

    value: float
    origin: str
    source: str  # a file of this repository, a data sheet, a publication, or the reason for an assumption
    low: float
    high: float

    def __post_init__(self) -> None:
        if self.origin not in ORIGINS:
            raise YalisError(f"unknown origin {self.origin!r}; accepted: {', '.join(ORIGINS)}")
        if not self.low <= self.value <= self.high:
            raise YalisError(f"{self.value:g} is not between its bounds {self.low:g} and {self.high:g}")

    def __float__(self) -> float:
        return float(self.value)  # JSON may have given an int

    @classmethod
    def of(
        cls, value: float, origin: str, source: str, low: float | None = None, high: float | None = None
    ) -> Quantity:
        """Return a quantity; bounds that are not given follow from its origin."""
        spread = _DEFAULT_SPREAD.get(origin, 0.0)
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
            raise YalisError(f"{where} must be an object with value, origin and source")
        if unknown := set(data) - {"value", "origin", "source", "low", "high"}:
            raise YalisError(f"{where} has an unknown field {sorted(unknown)[0]!r}")
        numbers = [data[name] for name in ("value", "low", "high") if data.get(name) is not None]
        if not all(isinstance(number, (int, float)) and not isinstance(number, bool) for number in numbers):
            raise YalisError(f"{where} has a value that is not a number")
        try:
            return cls.of(data["value"], data["origin"], data["source"], data.get("low"), data.get("high"))
        except YalisError as error:
            raise YalisError(f"{where}: {error}") from None

    def to_json(self) -> dict[str, Any]:
        return {"value": self.value, "origin": self.origin, "source": self.source, "low": self.low, "high": self.high}

    def scaled(self, factor: float) -> Quantity:
        """Return this quantity with value and bounds multiplied by `factor`."""
        return Quantity(self.value * factor, self.origin, self.source, self.low * factor, self.high * factor)
