"""How far an offline job is, how fast it goes and how long it may still take."""

from __future__ import annotations

from dataclasses import dataclass, replace

_HALF_LIFE = 5.0  # seconds; one request alone goes faster than in a crowd


@dataclass(frozen=True)
class TimeLeft:
    seconds: float
    at_most: bool  # every answer so far ran to its limit; one that ends by itself makes it less


@dataclass(frozen=True)
class JobProgress:
    total: int  # lines of the input that ask for something
    done: int  # of them, in the result file
    errors: int  # of those, results that are errors
    resumed: int  # in the file before this run
    output_tokens: int  # in the results of this run
    seconds: float  # since this run's first request
    running: int = 0  # requests that have tokens and no result yet
    generated: int = 0  # tokens of this run, with those of running requests
    left: TimeLeft | None = None  # None while nothing sensible can be said

    @property
    def requests_per_s(self) -> float:
        return (self.done - self.resumed) / self.seconds if self.seconds > 0 else 0.0

    @property
    def tokens_per_s(self) -> float:
        return self.generated / self.seconds if self.seconds > 0 else 0.0


class Pace:
    """What a run has shown of its requests: how much of their limits they use, and how fast one of them goes."""

    def __init__(self) -> None:
        self._limits: dict[int, int] = {}  # the most tokens of every request without a result
        self._submitted = self._allowed = 0  # requests so far, and the sum of their limits
        self._made = self._could = 0  # tokens of those that ended, and the sum of their limits
        # Seconds that requests ran, summed over them, and tokens that they made; what is long ago counts less.
        self._busy = self._recent = 0.0

    def submit(self, request_id: int, limit: int) -> None:
        self._limits[request_id] = limit
        self._submitted += 1
        self._allowed += limit

    def finish(self, request_id: int, tokens: int) -> None:
        self._made += tokens
        self._could += self._limits.pop(request_id)

    def look(self, before: JobProgress, seconds: float, so_far: dict[int, int]) -> JobProgress:
        """The progress now; `so_far` has the tokens of every request without a result."""
        running = sum(tokens > 0 for tokens in so_far.values())
        now = replace(before, seconds=seconds, running=running, generated=self._made + sum(so_far.values()))
        keep = 0.5 ** ((seconds - before.seconds) / _HALF_LIFE)
        self._busy = keep * self._busy + running * (seconds - before.seconds)
        self._recent = keep * self._recent + now.generated - before.generated
        return replace(now, left=self._time_left(now, so_far))

    def _time_left(self, now: JobProgress, so_far: dict[int, int]) -> TimeLeft | None:
        """As long as all the work takes at the rate of the run, or the longest answer at the speed of one."""
        if not self._made or not now.tokens_per_s:
            return None
        share = self._made / self._could
        ahead = [_tokens_left(self._limits[id], made, share) for id, made in so_far.items()]
        unread = (now.total - now.done - len(so_far)) * share * self._allowed / self._submitted
        all_of_it = (sum(ahead) + unread) / now.tokens_per_s
        longest = max(ahead, default=0.0) * self._busy / self._recent if self._recent else 0.0
        return TimeLeft(max(all_of_it, longest), at_most=share == 1.0)


def _tokens_left(limit: int, made: int, share: float) -> float:
    """The usual share of its limit; an answer that has come far may well go as far again."""
    return min(limit - made, max(share * limit - made, made))
