"""How far measurements lie apart."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import quantiles


def spread(values: Sequence[float]) -> tuple[float, float]:
    """The tenth and ninetieth percentile."""
    if len(values) < 2:
        return values[0], values[0]
    cuts = quantiles(values, n=10, method="inclusive")
    return cuts[0], cuts[-1]


def percentiles(values: Sequence[float], *shares: int) -> list[float]:
    """What so many percent of the values lie below."""
    if len(values) < 2:
        return [values[0]] * len(shares)
    cuts = quantiles(values, n=100, method="inclusive")
    return [cuts[share - 1] for share in shares]
