"""Measurements of a running server."""

from __future__ import annotations


class ServerMetrics:
    """Collects what finished requests took."""

    def __init__(self) -> None:
        self._mean_seconds = 1.0  # of a request, weighted towards the last ones

    def observe(self, seconds: float) -> None:
        """Record a finished request."""
        self._mean_seconds += 0.1 * (seconds - self._mean_seconds)

    def seconds_to_finish(self, running: int) -> float:
        """Return about how long it takes until one of `running` requests finishes."""
        return self._mean_seconds / max(1, running)
