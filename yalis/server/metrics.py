"""Metrics for Prometheus, with the names and the meaning of vLLM's, under `yalis:`.

Nothing is counted while a step runs: completions are measured in the event loop after they have finished, and the
state of the engine is read when /metrics is.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

from fastapi import APIRouter, Request
from fastapi.responses import Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from yalis.engine.async_llm import FinishedCompletion
from yalis.engine.llm import LLM
from yalis.server.state import server_state
from yalis.types import UNLIMITED_TOKENS

router = APIRouter()

_FIRST_TOKEN_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
    160.0, 640.0, 2560.0,
)  # fmt: skip
_TOKEN_S = (
    0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0,
    7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
_REQUEST_S = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
)  # fmt: skip
_TOKENS = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))
_COMPLETIONS = (1.0, 2.0, 5.0, 10.0, 20.0)

_REASONS = {"stop": "stop", "length": "length", "cancelled": "abort"}


class ServerMetrics(Collector):
    """Measures an LLM and the requests of its server."""

    def __init__(self, llm: LLM, model_name: str) -> None:
        self._llm, self._labels = llm, {"model_name": model_name}
        self._finished: Counter[str] = Counter(dict.fromkeys(_REASONS.values(), 0))
        self._mean_seconds = 1.0  # of a completion, weighted towards the last ones
        self._first_token = Histogram("time_to_first_token_seconds", "From submission to first token", _FIRST_TOKEN_S)
        self._between = Histogram("inter_token_latency_seconds", "Between two tokens of a completion", _TOKEN_S)
        self._per_token = Histogram(
            "request_time_per_output_token_seconds", "Mean over the tokens of a completion after its first", _TOKEN_S
        )
        self._total = Histogram("e2e_request_latency_seconds", "From submission to last token", _REQUEST_S)
        self._prompt = Histogram("request_prompt_tokens", "Prompt tokens", _TOKENS)
        self._output = Histogram("request_generation_tokens", "Generated tokens", _TOKENS)
        self._max_tokens = Histogram("request_params_max_tokens", "max_tokens of the request, if it has one", _TOKENS)
        self._computed = Histogram(
            "request_prefill_kv_computed_tokens", "Prompt tokens not found in the prefix cache", _TOKENS
        )
        self._decode = Histogram("request_decode_time_seconds", "From first to last token", _REQUEST_S)
        self._most = Histogram(
            "request_max_num_generation_tokens", "Tokens of the longest completion of a request", _TOKENS
        )
        self._cached_tokens = 0  # of the prompts of finished completions
        self._n = Histogram("request_params_n", "Completions of a request", _COMPLETIONS)
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def observe(self, done: FinishedCompletion) -> None:
        """Record a completion that has finished or was cancelled."""
        self._finished[_REASONS[done.finish_reason]] += 1
        times = done.token_times
        if times:
            self._first_token.observe(times[0] - done.submit_time)
        self._between.observe_all([after - before for before, after in pairwise(times)])
        if done.finish_reason == "cancelled":
            return
        if len(times) > 1:
            self._per_token.observe((times[-1] - times[0]) / (len(times) - 1))
        self._prompt.observe(done.prompt_tokens)
        self._output.observe(len(times))
        self._computed.observe(done.prompt_tokens - done.cached_tokens)
        self._cached_tokens += done.cached_tokens
        if done.request_tokens is not None:
            self._n.observe(len(done.request_tokens))
            self._most.observe(max(done.request_tokens))
        if done.max_tokens != UNLIMITED_TOKENS:
            self._max_tokens.observe(done.max_tokens)
        if times:
            self._decode.observe(times[-1] - times[0])
            seconds = times[-1] - done.submit_time
            self._total.observe(seconds)
            self._mean_seconds += 0.1 * (seconds - self._mean_seconds)

    def seconds_to_finish(self, running: int) -> float:
        """Return about how long it takes until one of `running` completions finishes."""
        return self._mean_seconds / max(1, running)

    def text(self) -> bytes:
        """Return all metrics in the text format of Prometheus."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        stats = self._llm.stats
        yield self._gauge("num_requests_running", "Requests that run", stats.running)
        yield self._gauge("num_requests_waiting", "Requests that wait to run", stats.waiting)
        usage = stats.used_blocks / stats.blocks if stats.blocks else 0.0
        yield self._gauge("kv_cache_usage_perc", "KV cache in use; 1 is all of it", usage)
        yield self._counter("prompt_tokens", "Prompt tokens", stats.prompt_tokens)
        yield self._counter("prompt_tokens_cached", "Prompt tokens that were not computed", self._cached_tokens)
        yield self._counter("generation_tokens", "Generated tokens", stats.output_tokens)
        yield self._counter(
            "prefix_cache_queries", "Prompt tokens looked up in the prefix cache", stats.prefix_query_tokens
        )
        yield self._counter("prefix_cache_hits", "Prompt tokens found in the prefix cache", stats.prefix_hit_tokens)
        yield self._counter("num_preemptions", "Requests that lost their KV blocks", stats.preemptions)
        yield self._counter("request_aborts", "Completions whose client did not wait", self._finished["abort"])
        names = [*self._labels, "finished_reason"]
        success = CounterMetricFamily("yalis:request_success", "Completions that ended", labels=names)
        for reason, count in self._finished.items():
            success.add_metric([*self._labels.values(), reason], count)
        yield success
        for histogram in vars(self).values():
            if isinstance(histogram, Histogram):
                yield histogram.family(self._labels)

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"yalis:{name}", text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(f"yalis:{name}", text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family


class Histogram:
    """Counts values by bucket. Used by one thread, so it has no lock."""

    def __init__(self, name: str, text: str, bounds: Sequence[float]) -> None:
        self.name, self.text, self.bounds = name, text, bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self.observe_all((value,))

    def observe_all(self, values: Iterable[float]) -> None:
        for value in values:
            self._counts[bisect_left(self.bounds, value)] += 1
            self._sum += value

    def family(self, labels: dict[str, str]) -> Metric:
        total, buckets = 0, []
        for bound, count in zip([*map(str, self.bounds), "+Inf"], self._counts, strict=True):
            total += count
            buckets.append((bound, total))
        family = HistogramMetricFamily(f"yalis:{self.name}", self.text, labels=list(labels))
        family.add_metric(list(labels.values()), buckets, self._sum)
        return family


@router.get("/metrics", include_in_schema=False)
async def get_metrics(request: Request) -> Response:
    return Response(server_state(request).metrics.text(), media_type=CONTENT_TYPE_LATEST)
