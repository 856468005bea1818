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
