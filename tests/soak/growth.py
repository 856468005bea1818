"""Growth per minute of a sampled quantity, with a confidence interval."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

_WINDOWS = 20
_T_95 = 2.101  # two-sided 95% of Student's t with _WINDOWS - 2 degrees of freedom


@dataclass(frozen=True)
class Growth:
    """The slope of a fitted line and its 95% confidence interval, per minute."""

    per_minute: float
    low: float
    high: float


def fit_growth(seconds: Sequence[float], values: Sequence[float]) -> Growth:
    """Fit a line by least squares to the means of _WINDOWS successive windows.

    Neighbouring samples are not independent: memory moves in steps that last for seconds. Means of long windows nearly
    are, so the interval is not too narrow.
    """
    size = len(values) // _WINDOWS
    if size < 1:
        raise ValueError(f"{len(values)} samples are too few; at least {_WINDOWS} are needed")
    starts = range(len(values) - size * _WINDOWS, len(values), size)
    x = [fmean(seconds[start : start + size]) / 60 for start in starts]
    y = [fmean(values[start : start + size]) for start in starts]
    mean_x, mean_y = fmean(x), fmean(y)
    spread = sum((each - mean_x) ** 2 for each in x)
    slope = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / spread
    residuals = sum((b - mean_y - slope * (a - mean_x)) ** 2 for a, b in zip(x, y, strict=True))
    half = _T_95 * math.sqrt(residuals / (_WINDOWS - 2) / spread)
    return Growth(slope, slope - half, slope + half)
