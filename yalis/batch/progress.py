"""Progress of a batch job: results so far, throughput, and an estimate of the time left."""

from __future__ import annotations

from dataclasses import dataclass, replace

# Seconds after which an observation of the speed counts half: requests run faster when fewer share the engine.
_HALF_LIFE = 5.0


@dataclass(frozen=True)
class TimeLeft:
    seconds: float
    at_most: bool  # an upper bound: so far every completion reached its max_tokens, and later ones may end earlier


@dataclass(frozen=True)
class JobProgress:
    total: int  # lines of the input that are not blank
    done: int  # lines that have a result
    errors: int  # results that are errors
    resumed: int  # results that the file had before this run
    output_tokens: int  # in the results of this run
    seconds: float  # since the first request of this run
    running: int = 0  # requests with tokens but without a result
    generated: int = 0  # tokens of this run, including those of running requests
    time_left: TimeLeft | None = None  # None until there is a first result

    @property
    def requests_per_s(self) -> float:
        return (self.done - self.resumed) / self.seconds if self.seconds > 0 else 0.0

    @property
    def tokens_per_s(self) -> float:
        return self.generated / self.seconds if self.seconds > 0 else 0.0


class ProgressEstimator:
    """Estimates the time left from the requests so far: what share of max_tokens they use, and how fast each runs."""

    def __init__(self) -> None:
        self._limits: dict[int, int] = {}  # max tokens of every request without a result, by id
        self._num_submitted = self._submitted_limits = 0  # requests so far, and the sum of their limits
        self._finished_tokens = self._finished_limits = 0  # of the requests that have finished
        # Running time summed over requests, and the tokens generated in it; both decay with the half-life.
        self._recent_seconds = self._recent_tokens = 0.0

    def submit(self, request_id: int, limit: int) -> None:
        """Add a request that generates at most `limit` tokens."""
        self._limits[request_id] = limit
        self._num_submitted += 1
        self._submitted_limits += limit

    def finish(self, request_id: int, tokens: int) -> None:
        self._finished_tokens += tokens
        self._finished_limits += self._limits.pop(request_id)

    def update(self, before: JobProgress, seconds: float, tokens_so_far: dict[int, int]) -> JobProgress:
        """Return the progress now. `tokens_so_far` has the tokens of every request without a result, by id."""
        running = sum(tokens > 0 for tokens in tokens_so_far.values())
        generated = self._finished_tokens + sum(tokens_so_far.values())
        now = replace(before, seconds=seconds, running=running, generated=generated)
        decay = 0.5 ** ((seconds - before.seconds) / _HALF_LIFE)
        self._recent_seconds = decay * self._recent_seconds + running * (seconds - before.seconds)
        self._recent_tokens = decay * self._recent_tokens + now.generated - before.generated
        return replace(now, time_left=self._time_left(now, tokens_so_far))

    def _time_left(self, now: JobProgress, tokens_so_far: dict[int, int]) -> TimeLeft | None:
        """Return the larger of two estimates: all remaining tokens at the throughput of the run, or the longest
        remaining completion at the recent speed of a single request."""
        if not self._finished_tokens or not now.tokens_per_s:
            return None
        used_share = self._finished_tokens / self._finished_limits
        remaining = [_remaining_tokens(self._limits[id], tokens, used_share) for id, tokens in tokens_so_far.items()]
        num_unread = now.total - now.done - len(tokens_so_far)
        unread_tokens = num_unread * used_share * self._submitted_limits / self._num_submitted
        whole_job = (sum(remaining) + unread_tokens) / now.tokens_per_s
        longest = 0.0
        if self._recent_tokens:
            longest = max(remaining, default=0.0) * self._recent_seconds / self._recent_tokens
        return TimeLeft(max(whole_job, longest), at_most=used_share == 1.0)


def _remaining_tokens(limit: int, tokens: int, used_share: float) -> float:
    """Estimate the tokens that a request will still generate: up to the usual share of its limit, and at least as many
    again as it already has, but never beyond its limit."""
    return min(limit - tokens, max(used_share * limit - tokens, tokens))
