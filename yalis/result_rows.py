"""What a row of each kind of result carries, since which version, and a check that it does."""

from __future__ import annotations

from typing import Any

from yalis.errors import YalisError
from yalis.result_forms import fits

#: What a row of each kind must carry. A number may be null where it could not be measured; `status` then says why.
_ROWS: dict[str, dict[str, type]] = {
    "latency": {
        "engine": str,
        "version": str,
        "status": str,  # "ok", or why there are no numbers
        "batch": int,
        "prompt_len": int,
        "output_len": int,
        "first_token_ms": float,
        "first_token_ms_low": float,
        "first_token_ms_high": float,
        "prefill_tokens_per_s": float,
        "decode_ms": float,
        "decode_ms_low": float,
        "decode_ms_high": float,
        "seconds": float,  # of the whole job: the median of the repeats
        "seconds_low": float,
        "seconds_high": float,
        "tokens_per_s": float,
        "host_ms": float,  # the host's own work for a decode step
        "prefill_floor_ms": float,
        "floor_ms": float,  # of a decode step
        "share_of_floor": float,
        "ratio": float,  # this engine's decode step over ours
        "same_tokens": float,  # the share of its sequences whose tokens equal ours
    },
    "throughput": {
        "engine": str,
        "version": str,
        "status": str,  # "ok", or why there are no numbers
        "requests": int,
        "prompt_tokens": int,  # of all requests together
        "output_tokens": int,
        "rate": float,  # requests a second that arrive; null: all at once
        "seconds": float,  # from the first arrival to the last token: the median of the repeats
        "seconds_low": float,
        "seconds_high": float,
        "tokens_per_s": float,  # generated
        "tokens_per_s_low": float,
        "tokens_per_s_high": float,
        "requests_per_s": float,
        "first_token_ms": float,  # after the arrival: the median over the requests of all repeats
        "first_token_ms_p90": float,
        "first_token_ms_p99": float,
        "token_ms": float,  # a request's mean time between tokens: the median over requests
        "token_ms_p90": float,
        "token_ms_p99": float,
        "cached_tokens": int,  # of the prompts, found in the cache; in the last repeat
        "preemptions": int,  # in all repeats
        "floor_s": float,
        "share_of_floor": float,
        "ratio": float,  # this engine's seconds over ours
        "same_tokens": float,  # the share of its answers whose tokens equal ours
    },
    "scaling": {
        "ranks": int,
        "scheme": str,  # one rank, tp, grid, pp, hybrid or dp
        "split": str,  # "tp2x2-pp2"
        "allreduce": str,  # empty with one rank
        "status": str,  # "ok", or what went wrong
        "machine": int,  # which of the machines in the parameters, from 1 on
        "hosts": int,
        "seconds": float,  # of the whole job, as in throughput
        "seconds_low": float,
        "seconds_high": float,
        "tokens_per_s": float,
        "first_token_ms": float,
        "token_ms": float,
        "speedup": float,  # over the baseline of its machine
        "efficiency": float,  # the speed-up over how many times as many ranks there are
        "same_tokens": float,  # the share of answers whose tokens equal the baseline's
        "crowded": str,  # where ranks share cores or GPUs and a speed-up says nothing: how; else empty
        "file": str,  # the setting's own result, beside this one; empty without one
    },
    "profile": {
        "phase": str,  # "prefill": all prompts; "decode": a token for every sequence
        "rank": int,
        "steps": int,  # that were watched
        "ms": float,  # of the phase, as the parts below add up
        "matmul_ms": float,
        "attention_ms": float,
        "communication_ms": float,  # waiting for other ranks included
        "other_ms": float,
        "idle_ms": float,  # gaps in the timeline: the device idles, or the host computes nothing
        "accounted": float,  # of the wall time, by all parts together
    },
    "pipeline": {
        "stages": int,
        "micro_batches": int,
        "seconds": float,  # of one pass of all prompts
        "seconds_low": float,
        "seconds_high": float,
        "idle_share": float,  # of the stages' time
        "ideal_idle_share": float,  # (p - 1) / (m + p - 1)
        "busy_seconds": list,  # of each stage
        "speedup": float,  # over the first row
    },
    "allreduce": {
        "backend": str,
        "options": dict,  # how the backend was told to do it; empty: as it chooses
        "dtype": str,
        "bytes": int,
        "mode": str,  # "eager", or "graph": replayed from a CUDA graph
        "delay_us": float,  # one-way, between the hosts of a lab; null elsewhere
        "status": str,  # "ok", or what was wrong
        "checked": int,  # operations whose result was compared with a float64 sum
        "repeats": int,  # times that the figures below are of: operations, or replays of a graph of many
        "median_us": float,
        "low_us": float,
        "high_us": float,
        "bus_gb_per_s": float,  # bytes * 2 (n - 1) / n over the median: what a ring would move over each link
        "speedup": float,  # over the baseline at the same size
    },
    "kernels": {
        "kernel": str,
        "shape": str,
        "rows": int,
        "status": str,  # "ok", or what was wrong
        "error": float,  # relative to the reference
        "us": float,  # ours
        "us_low": float,
        "us_high": float,
        "torch_us": float,
        "ratio": float,  # torch's time over ours
        "gb_per_s": float,  # of the bytes it must move, by ours
        "gflop_per_s": float,
        "floor_us": float,
        "share_of_floor": float,
    },
}
#: Columns that came with a version; rows of an older one have no such figure.
_SINCE: dict[int, dict[str, tuple[str, ...]]] = {
    2: {"latency": ("host_ms",)},
    3: {
        "latency": ("first_token_ms_low", "first_token_ms_high", "seconds", "seconds_low", "seconds_high"),
        "pipeline": ("seconds_low", "seconds_high"),
        "kernels": ("us_low", "us_high"),
    },
    4: {"allreduce": ("repeats",)},
}
_ALWAYS_THERE = {
    *("engine", "version", "status", "batch", "prompt_len", "output_len", "stages", "micro_batches"),
    *("backend", "options", "dtype", "bytes", "mode", "checked"),
    *("kernel", "shape", "rows"),
    *("requests", "prompt_tokens", "output_tokens"),
    *("ranks", "scheme", "split", "allreduce", "crowded", "file"),
    *("phase", "rank", "steps"),
}
#: A measured figure, and the columns of its spread.
_SPREADS = {
    "latency": [
        ("first_token_ms", "first_token_ms_low", "first_token_ms_high"),
        ("decode_ms", "decode_ms_low", "decode_ms_high"),
        ("seconds", "seconds_low", "seconds_high"),
    ],
    "throughput": [
        ("seconds", "seconds_low", "seconds_high"),
        ("tokens_per_s", "tokens_per_s_low", "tokens_per_s_high"),
    ],
    "scaling": [("seconds", "seconds_low", "seconds_high")],
    "pipeline": [("seconds", "seconds_low", "seconds_high")],
    "kernels": [("us", "us_low", "us_high")],
    "allreduce": [("median_us", "low_us", "high_us")],
}
_ABOVE_ZERO = {
    *("first_token_ms", "decode_ms", "tokens_per_s", "seconds", "token_ms", "ms", "median_us", "us"),
    *("prefill_tokens_per_s", "requests_per_s", "torch_us"),
    *("ranks", "stages", "micro_batches", "batch", "prompt_len", "output_len", "rows", "bytes", "requests"),
    *("machine", "hosts"),
}
#: What a row that went well cannot be shown without.
_NEEDED = {
    "latency": ("decode_ms", "tokens_per_s"),
    "throughput": ("seconds", "seconds_low", "seconds_high", "tokens_per_s", "first_token_ms"),
    "scaling": ("machine", "seconds", "seconds_low", "seconds_high"),
    "pipeline": ("seconds", "idle_share", "ideal_idle_share"),
    "profile": tuple(_ROWS["profile"]),
    "allreduce": ("median_us",),
    "kernels": ("us",),
}


def columns(kind: str) -> list[str]:
    """What a row of this kind carries."""
    return list(_ROWS[kind])


def columns_since(kind: str, version: int) -> list[str]:
    """What rows of this kind did not carry yet in that version of the schema."""
    return [name for later, kinds in _SINCE.items() if later > version for name in kinds.get(kind, ())]


def check_rows(kind: str, rows: list[Any], label: str) -> None:
    if kind not in _ROWS:
        raise YalisError(f"{label} is of kind {kind!r}; this yalis knows {', '.join(_ROWS)}")
    if not rows:
        raise YalisError(f"{label} has no rows: nothing was measured; run the benchmark again")
    columns = _ROWS[kind]
    for number, row in enumerate(rows, 1):
        where = f"row {number} of {label}"
        if not isinstance(row, dict):
            raise YalisError(f"{where} is not an object")
        if set(row) != set(columns):
            odd = sorted(set(row) ^ set(columns))[0]
            raise YalisError(f"{where} {'has an unknown' if odd in row else 'lacks the'} column {odd!r}")
        for name, wanted in columns.items():
            value = row[name]
            if value is None and name not in _ALWAYS_THERE:
                continue
            if not fits(value, wanted):
                raise YalisError(f"{where} has {value!r} as {name!r}; it should be a {wanted.__name__}")
            if name in _ABOVE_ZERO and value <= 0:
                raise YalisError(f"{where} has {value!r} as {name!r}; it should be above 0")
        _check_figures(kind, row, where)
    if kind == "allreduce" and len({row["delay_us"] is None for row in rows}) > 1:
        raise YalisError(f"{label} has a 'delay_us' in some rows and none in others; it is not a yalis result")


def _check_figures(kind: str, row: dict[str, Any], where: str) -> None:
    """A row that went well has its figures, and a spread lies around its median."""
    for name in _NEEDED.get(kind, ()):
        if row[name] is None and row.get("status", "ok") == "ok":
            raise YalisError(f"{where} has no {name!r}, although it is told to be good")
    for middle, low, high in _SPREADS.get(kind, ()):
        known = [row[name] for name in (low, middle, high) if row[name] is not None]
        if row[middle] is None or (len(known) == 1 and kind != "allreduce"):  # which is drawn as a band
            continue
        # The ends are computed and may be off by a rounding.
        if len(known) < 3 or not known[0] * (1 - 1e-9) <= known[1] <= known[2] * (1 + 1e-9):
            raise YalisError(f"{where} has {row[middle]!r} as {middle!r}, from {row[low]!r} to {row[high]!r}")
