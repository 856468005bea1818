"""The serving benchmark: latencies and throughput of a running server, seen by a client over HTTP.

It uses only `/v1/models` and `/v1/completions` with token ids as prompts, so it measures other servers with this API
too, such as vLLM's.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Coroutine, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any, TypeVar

from yalis.engine.interrupts import Stopped
from yalis.errors import YalisError, YalisFailure, count_of
from yalis.study import results
from yalis.study.serve.ceiling import measure_ceiling
from yalis.study.serve.http import Answer, Client, HttpError, Target
from yalis.study.serve.load import EncodedRequest, Load, Report, run_load
from yalis.study.serve.stream import Completion, error_message
from yalis.study.spread import percentiles
from yalis.workloads import (
    AnyWorkload,
    RequestSize,
    Workload,
    draw_arrivals,
    draw_sizes,
    random_prompt,
    read_trace,
)

T = TypeVar("T")
_PROBE_SECONDS = 30.0  # for /v1/models
#: A higher share of a core than this means that the client may have delayed what it measured.
_BUSY = 0.7
_VOCAB_SIZE = 30000  # of servers that do not report it; most models have more
_SHORT_SECONDS = 1.0  # a load that ends sooner says nothing about the share of a core


@dataclass(frozen=True)
class ServePlan:
    """What `yalis bench serve` runs. The fields are written to the result as its parameters."""

    rate: tuple[float, ...] = ()  # requests per second of Poisson processes
    concurrency: tuple[int, ...] = ()  # requests at a time
    workloads: tuple[AnyWorkload, ...] = (Workload(64, 128, 128),)  # mixed if several; empty with a trace
    trace: str | None = None  # a JSONL file of lengths
    requests: int | None = None  # per point; None: all of the workloads or the trace
    vary: float = 0.0
    vocab_size: int | None = None  # prompts are random token ids below this; None: that of the server's model
    warmup: int = 4  # unmeasured requests at the start
    timeout: float = 600.0  # seconds for one request
    seed: int = 0

    def __post_init__(self) -> None:
        if bool(self.rate) == bool(self.concurrency):
            raise YalisError("give either --rate, such as 1,2,4, or --concurrency, such as 1,8,64")
        for name, low in (("vocab_size", 1), ("warmup", 0), ("requests", 1)):
            value = getattr(self, name)
            if value is not None and value < low:
                raise YalisError(f"{name} is {value}; give a whole number of at least {low}")
        if any(not 0 < rate < float("inf") for rate in self.rate):
            raise YalisError(f"rate is {_join(self.rate)}; give requests per second above 0, such as 1,2,4")
        if any(count < 1 for count in self.concurrency):
            raise YalisError(f"concurrency is {_join(self.concurrency)}; give whole numbers of at least 1")
        if not 0 <= self.vary < 1:
            raise YalisError(f"vary is {self.vary:g}; give a fraction of at least 0 and below 1, such as 0.5")
        if not 0 < self.timeout < float("inf"):
            raise YalisError(f"timeout is {self.timeout:g}; give seconds above 0")

    @property
    def points(self) -> list[tuple[float | None, int | None]]:
        """Rate and concurrency of each point, one of them None."""
        return [*((rate, None) for rate in self.rate), *((None, count) for count in self.concurrency)]

    def sizes(self) -> list[RequestSize]:
        """Return the lengths of the requests, which are the same at every point."""
        if self.trace is not None:
            return read_trace(Path(self.trace), self.requests)
        return draw_sizes(self.workloads, self.seed, self.requests, self.vary)


def measure(
    target: Target, model: str | None, plan: ServePlan, command: str, report: Report = lambda text: None
) -> results.Result:
    """Run the benchmark against the server; `model` is by default the first that it lists.

    On Ctrl-C, raises Stopped with the result of the points that have finished, if there are any. A point without a
    complete answer becomes a row with its most frequent error as status.
    """
    sizes = plan.sizes()
    model, server, vocab_size = _run(_probe(target, model))
    plan = replace(plan, vocab_size=plan.vocab_size or vocab_size)
    report("measuring the ceiling of this client")
    ceiling = measure_ceiling()
    rows: list[results.Row] = []
    notes: list[str] = []
    interrupt = None
    try:
        _run(_warm_up(target, _encode(target, model, plan, sizes[: plan.warmup], -1), plan, report))
        for index, (rate, concurrency) in enumerate(plan.points):
            arrivals = draw_arrivals(len(sizes), rate, plan.seed)
            timed = [replace(size, arrival=arrival) for size, arrival in zip(sizes, arrivals, strict=True)]
            name = f"rate {rate:g}" if concurrency is None else f"concurrency {concurrency}"
            load = _run(
                _measure_point(target, _encode(target, model, plan, timed, index), concurrency, plan, name, report)
            )
            rows.append(_row(rate, concurrency, load))
            notes += _notes(name, load)
    except KeyboardInterrupt as stop:
        if not rows:
            raise
        interrupt = stop
    progress = f"{len(rows)} of {count_of(len(plan.points), 'point')}"
    if interrupt is not None:
        notes.append(f"stopped after {progress}")
    parameters = {
        **asdict(plan),
        "model": model,
        "server": server,
        "local": target.is_local,
        "client_ceiling_tokens_per_s": ceiling,
    }
    result = results.new("serve", parameters, rows, command, [], list(dict.fromkeys(notes)))
    if interrupt is not None:
        raise Stopped(f"{progress} done", result) from interrupt
    return result


def _run(work: Coroutine[Any, Any, T]) -> T:
    """Run in an event loop of its own; a Ctrl-C ends it and everything that it started."""
    return asyncio.run(work)


async def _probe(target: Target, model: str | None) -> tuple[str, str, int]:
    """Return the model to ask for, the server's version and the vocabulary size; raises if it cannot be used."""
    async with Client(target) as client:
        answer = await _get(client, "/v1/models")
        if answer.status in (401, 403):
            raise YalisFailure(
                f"{target.origin} refused the request with {answer.status} ({error_message(answer.body)}); "
                f"give {'another' if target.api_key else 'the'} key with --api-key-file"
            )
        try:
            known = {str(one["id"]): one for one in json.loads(answer.body)["data"]}
        except (ValueError, KeyError, TypeError):
            known = {}
        if answer.status != 200 or not known:
            raise YalisFailure(
                f"{target.origin}/v1/models returned {answer.status} and no list of models; give the --url of a "
                "server with the API of OpenAI, such as `yalis serve`"
            )
        if model is not None and model not in known:
            raise YalisError(f"the server has no model {model!r}; accepted: {', '.join(known)}")
        model = model or next(iter(known))
        vocab_size = known[model].get("vocab_size")  # of YALIS; vLLM has no such field
        version = await _get(client, "/version")
        try:
            server = f"{known[model].get('owned_by', '')} {json.loads(version.body)['version']}".strip()
        except (ValueError, KeyError, TypeError):
            server = ""
        return model, server, vocab_size or _VOCAB_SIZE


async def _get(client: Client, path: str) -> Answer:
    try:
        return await client.send(client.target.encode("GET", path), _PROBE_SECONDS)
    except HttpError as error:
        raise YalisFailure(
            f"cannot get {client.target.origin}{path}: {error}; start a server with `yalis serve`, or give its --url"
        ) from None


async def _warm_up(target: Target, requests: Sequence[EncodedRequest], plan: ServePlan, report: Report) -> None:
    """Run some requests, and raise the error of one that the server refuses: the others would fail too."""
    if not requests:
        return
    async with Client(target) as client:
        load = await run_load(client, requests, len(requests), plan.timeout, lambda text: report(f"warm-up: {text}"))
    refused = next((one for one in load.completions if one.status in ("400", "401", "403", "404", "413", "422")), None)
    if refused is not None:
        raise YalisFailure(
            f"the server refused a request with {refused.status}: {refused.message}; prompts are token ids below "
            "--vocab-size, and their lengths are those of --workload"
        )
    short = next((one for one in load.completions if one.status == "short answer"), None)
    if short is not None:
        raise YalisFailure(f"the server ended an answer early, so the times are not valid: {short.message}")


async def _measure_point(
    target: Target,
    requests: Sequence[EncodedRequest],
    concurrency: int | None,
    plan: ServePlan,
    name: str,
    report: Report,
) -> Load:
    async with Client(target) as client:
        return await run_load(client, requests, concurrency, plan.timeout, lambda text: report(f"{name}: {text}"))


def make_prompts(sizes: Sequence[RequestSize], seed: int, point: int, vocab_size: int) -> list[list[int]]:
    """Return random prompts, other ones for each point, so that none is in the prefix cache."""
    tokens = random.Random(f"{seed}/{point}")
    return [random_prompt(tokens, size.prompt_len, vocab_size) for size in sizes]


def _encode(
    target: Target, model: str, plan: ServePlan, sizes: Sequence[RequestSize], point: int
) -> list[EncodedRequest]:
    assert plan.vocab_size is not None
    encoded = []
    for size, prompt in zip(sizes, make_prompts(sizes, plan.seed, point, plan.vocab_size), strict=True):
        body = {
            "model": model,
            "prompt": prompt,
            "max_tokens": size.output_len,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        content = target.encode("POST", "/v1/completions", body)
        encoded.append(EncodedRequest(content, size.output_len, size.arrival))
    return encoded


def _row(rate: float | None, concurrency: int | None, load: Load) -> results.Row:
    row = results.empty_row("serve")
    good = [one for one in load.completions if one.ok]
    errors = Counter(one.status for one in load.completions if not one.ok)
    row.update(
        status="ok",
        rate=rate,
        concurrency=concurrency,
        requests=len(load.completions),
        completed=len(good),
        errors=dict(errors.most_common()),
        prompt_tokens=sum(one.prompt_tokens for one in good),
        output_tokens=sum(one.output_tokens for one in good),
        cached_tokens=sum(one.cached_tokens for one in good),
        events=sum(len(one.tokens_at) for one in good),
        most_in_flight=load.most_in_flight,
        client_cpu=load.client_cpu,
    )
    if not good:
        row["status"] = f"no request succeeded; {_worst(load.completions)}"
        return row
    row.update(
        seconds=load.seconds,
        requests_per_s=len(good) / load.seconds,
        tokens_per_s=row["output_tokens"] / load.seconds,
    )
    latencies = {
        "first_token_ms": [one.tokens_at[0] - one.arrival for one in good],
        "token_ms": [b - a for one in good for a, b in zip(one.tokens_at, one.tokens_at[1:], strict=False)],
        "total_ms": [one.ended - one.arrival for one in good],
    }
    for name, seconds in latencies.items():
        if seconds:  # answers of one event have no time between events
            values = [1e3 * each for each in seconds]
            row[name], row[f"{name}_p90"], row[f"{name}_p99"] = percentiles(values, 50, 90, 99)
            row[f"{name}_mean"] = mean(values)
    return row


def _worst(completions: Sequence[Completion]) -> str:
    """Return the most frequent error with the message of one such request."""
    status, _ = Counter(one.status for one in completions if not one.ok).most_common(1)[0]
    message = next(one.message for one in completions if one.status == status)
    return f"{status}: {message}" if message else status


def _notes(name: str, load: Load) -> list[str]:
    notes = []
    if failed := [one for one in load.completions if not one.ok]:
        share = f"{len(failed)} of {count_of(len(load.completions), 'request')}"
        notes.append(f"{name}: {share} failed; most often {_worst(failed)}")
    if load.client_cpu > _BUSY and load.seconds > _SHORT_SECONDS:
        notes.append(
            f"{name}: this client used {load.client_cpu:.0%} of a core, which may have delayed what it measured"
        )
    if not all(one.has_usage for one in load.completions if one.ok):
        notes.append("the server sends no usage, so every event counts as one token")
    return notes


def _join(values: Sequence[float]) -> str:
    return ",".join(f"{value:g}" for value in values)
