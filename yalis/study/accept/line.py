"""One line of an acceptance run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

PASSED, FAILED, IMPOSSIBLE = "passed", "failed", "not possible here"
OUTCOMES = (PASSED, FAILED, IMPOSSIBLE)


@dataclass(frozen=True)
class Line:
    """One check: its outcome, and the reason or what was found."""

    area: str
    check: str
    outcome: str
    detail: str
    measured_us: float | None = None
    predicted_us: float | None = None

    def to_row(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        times = "" if self.measured_us is None else f"{self.measured_us:.1f} us"
        if self.predicted_us is not None:
            times += f", predicted {self.predicted_us:.1f} us"
        detail = "; ".join(filter(None, [times, self.detail]))
        return f"{self.outcome:<18}{self.area}: {self.check}{': ' * bool(detail)}{detail}"


def summarize(outcomes: Sequence[str]) -> str:
    """Return the number of lines with each outcome, such as "12 passed, 0 failed, 3 not possible here"."""
    counts = Counter(outcomes)
    return ", ".join(f"{counts[outcome]} {outcome}" for outcome in OUTCOMES)
