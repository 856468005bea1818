"""One schema for every measurement: what was run, where, with which versions, and a table of rows.

A result is a JSON object that is checked when it is written and when it is read, so a plot or a report never meets a
file it half understands. Host names are left out on purpose: results are published.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

from yalis.errors import YalisError, YalisFailure
from yalis.result_forms import check_form, fits
from yalis.version import __version__

SCHEMA = "yalis-result"
VERSION = 4

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


@dataclass(frozen=True)
class Result:
    kind: str
    parameters: dict[str, Any]
    rows: list[dict[str, Any]]
    command: str
    devices: list[dict[str, Any]]
    topology: dict[str, Any] | None  # ranks, how many each host has, who started them; None: not told
    created: str
    versions: dict[str, str | None]
    host: dict[str, Any]
    revision: str | None  # of the checkout it ran from, with -dirty when that had changes
    schema: str = SCHEMA
    schema_version: int = VERSION
    notes: list[str] = field(default_factory=list)


def new(
    kind: str,
    parameters: dict[str, Any],
    rows: list[dict[str, Any]],
    command: str,
    devices: list[dict[str, Any]],
    notes: list[str] | None = None,
    topology: dict[str, Any] | None = None,
) -> Result:
    """A result of this process, now, with everything around the rows filled in."""
    result = Result(
        kind=kind,
        parameters=parameters,
        rows=rows,
        command=command,
        devices=devices,
        topology=topology,
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        versions=versions(),
        host=host(),
        revision=revision(),
        notes=notes or [],
    )
    check(asdict(result), "this result")
    return result


def write(result: Result, folder: Path) -> Path:
    """Write into `folder`, whole or not at all, under a name made of kind and time."""
    data = asdict(result)
    check(data, "this result")
    text = json.dumps(data, indent=2, allow_nan=False) + "\n"
    stamp = result.created.replace(":", "").replace("-", "")[:15]
    temporary = None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path = _free_name(folder, f"{result.kind}-{stamp}")
        handle, temporary = tempfile.mkstemp(dir=folder, prefix=f".{result.kind}-")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
        temporary = None
    except OSError as error:
        raise YalisFailure(f"cannot write a result into {folder}: {error.strerror}; give another folder") from error
    finally:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
    return path


def _free_name(folder: Path, stem: str) -> Path:
    path, number = folder / f"{stem}.json", 2
    while path.exists():
        path, number = folder / f"{stem}-{number}.json", number + 1
    return path


def read(path: Path) -> Result:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise YalisError(f"cannot read {path}: {error.strerror}; give a file that a yalis benchmark wrote") from error
    except (ValueError, RecursionError) as error:
        raise YalisError(f"{path} is not JSON ({error}); give a file that a yalis benchmark wrote") from error
    data = _upgrade(data)
    check(data, str(path))
    return Result(**data)


def _upgrade(data: Any) -> Any:
    """An older version told less: the first no topology, and each of them fewer columns."""
    if not isinstance(data, dict) or data.get("schema_version") not in range(1, VERSION):
        return data
    told = {"topology": None, **data, "schema_version": VERSION}
    old, kind, rows = data["schema_version"], str(data.get("kind")), data.get("rows")
    if isinstance(rows, list):
        added = [name for version, kinds in _SINCE.items() if version > old for name in kinds.get(kind, ())]
        told["rows"] = [{**dict.fromkeys(added), **row} if isinstance(row, dict) else row for row in rows]
    return told


def check(data: Any, label: str) -> None:
    """Raise a sentence naming the first thing in `data` that the schema does not allow."""
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        raise YalisError(f"{label} is not a yalis result; give a file that a yalis benchmark wrote")
    if data.get("schema_version") != VERSION:
        raise YalisError(
            f"{label} has schema version {data.get('schema_version')!r}, and this yalis reads versions 1 to {VERSION}; "
            "run the benchmark again, or read it with the yalis that wrote it"
        )
    kinds: dict[str, tuple[type, ...]] = {
        "kind": (str,), "parameters": (dict,), "rows": (list,), "command": (str,), "devices": (list,),
        "topology": (dict, type(None)), "created": (str,), "versions": (dict,), "host": (dict,),
        "revision": (str, type(None)), "schema": (str,), "schema_version": (int,), "notes": (list,),
    }  # fmt: skip
    assert set(kinds) == {f.name for f in fields(Result)}
    for name, accepted in kinds.items():
        if name not in data:
            raise YalisError(f"{label} has no {name!r}; it is not a whole yalis result")
        if not isinstance(data[name], accepted):
            raise YalisError(f"{label} has a {name!r} of type {type(data[name]).__name__}; it is not a yalis result")
    if extra := sorted(set(data) - set(kinds)):
        raise YalisError(f"{label} has a field {extra[0]!r} that a yalis result does not have")
    _check_rows(data["kind"], data["rows"], label)
    _check_created(data["created"], label)
    if word := check_form(data):
        raise YalisError(f"{label} has {word}")


def _check_created(created: str, label: str) -> None:
    try:
        known = datetime.fromisoformat(created).tzinfo is not None
    except ValueError:
        known = False
    if not known:
        raise YalisError(f"{label} was created {created!r}; it should be a time such as 2026-01-31T12:00:00+00:00")


def _check_rows(kind: str, rows: list[Any], label: str) -> None:
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


def age(path: Path, result: Result) -> tuple[datetime, int, str]:
    """Sorts results from the oldest to the newest; of one second, in the order in which names are given."""
    return datetime.fromisoformat(result.created), len(path.name), path.name


def columns(kind: str) -> list[str]:
    """What a row of this kind carries."""
    return list(_ROWS[kind])


def topology(nodes: Sequence[int], launcher: str = "") -> dict[str, Any]:
    """`nodes`: for each rank, in order, the number of its machine. `launcher`: who started them, if not rank 0."""
    return {"ranks": len(nodes), "ranks_per_host": list(Counter(nodes).values()), "launcher": launcher}


def machine(result: Result) -> dict[str, Any]:
    """What kind of machine a result is from. Results of different ones are never joined into one ratio."""
    named = ("type", "name", "memory_gib", "capability")
    devices = [{name: device[name] for name in named if name in device} for device in result.devices]
    facts = {"cpu": result.host.get("cpu"), "machine": result.host.get("machine"), "devices": devices}
    if any(device.get("type") == "cpu" for device in devices):  # a GPU's job may have any share of the cores
        facts["cores"] = result.host.get("cores")
    return facts


def versions() -> dict[str, str | None]:
    # By name, because the package's face knows the engine, which lies above this file.
    own = __version__
    found: dict[str, str | None] = {"yalis": own, "python": platform.python_version()}
    for package in ("torch", "transformers", "triton", "gguf"):
        found[package] = package_version(package)
    return found


def package_version(package: str) -> str | None:
    """The installed version, read without importing the package; None when it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def host() -> dict[str, Any]:
    try:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        memory = 0
    return {
        "system": f"{platform.system()} {platform.release()}",
        "machine": platform.machine(),
        "cpu": _cpu_name(),
        "cores": usable_cores(),
        "memory_gib": round(memory / 2**30, 1),
    }


def usable_cores() -> int:
    """Cores this process may run on, which a job scheduler may have made fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def revision() -> str | None:
    """The commit this package runs from, when it runs from a checkout."""
    root = Path(__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None
