"""Percentiles of repeated measurements."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import quantiles


def spread(values: Sequence[float]) -> tuple[float, float]:
    """Return the 10th and the 90th percentile."""
    if len(values) < 2:
        return values[0], values[0]
    deciles = quantiles(values, n=10, method="inclusive")
    return deciles[0], deciles[-1]


def percentiles(values: Sequence[float], *percents: int) -> list[float]:
    """Return the percentiles given by `percents`, each from 1 to 99."""
    if len(values) < 2:
        return [values[0]] * len(percents)
    cut_points = quantiles(values, n=100, method="inclusive")
    return [cut_points[percent - 1] for percent in percents]
