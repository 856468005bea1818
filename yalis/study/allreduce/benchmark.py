"""The all-reduce benchmark: sizes x dtypes x backends, with every sum checked against a float64 one.

It needs ranks but no engine. This file has the plan, the start of the ranks, and the rows made from the times of all
ranks; `rank.py` has what one rank does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import median
from typing import Any

from yalis.comm import tuning
from yalis.comm.base import BACKENDS
from yalis.comm.tuning import Choice, ShapeTimings, Timing
from yalis.errors import YalisError, YalisFailure, count_of
from yalis.launch.join import join
from yalis.launch.launchers import detect_launcher
from yalis.launch.serving import serving
from yalis.study import results
from yalis.study.results import Result, Row
from yalis.study.results.kinds.allreduce import (
    NCCL_REGISTERED,
    NVRAR_PEERS,
    PLAIN_GLOO,
    add_speedups,
    fully_measured,
    label,
)
from yalis.study.spread import spread
from yalis.study.topology import topology_of

#: The module that ranks started by rank 0 run.
WORKER = ("yalis.study.allreduce.rank",)
#: Backends whose sums may differ between ranks by rounding. All others promise the same bits on every rank.
INEXACT_BACKENDS = ("nvshmem",)
MAX_BYTES = 1 << 30
#: Measured for comparison only; an engine cannot use them.
PEERS = (PLAIN_GLOO, NCCL_REGISTERED, *NVRAR_PEERS)
DTYPES = ("float32", "bfloat16", "float16")
#: Measured operations, unless a number is given.
MAX_REPEATS, MIN_REPEATS = 30, 9

Report = Callable[[str], None]


@dataclass(frozen=True)
class AllReducePlan:
    sizes: tuple[int, ...] = ()  # bytes; default: powers of two from 8 KB to 64 MB, or to 4 MB with `tune`
    dtypes: tuple[str, ...] = ("float32",)
    backends: tuple[str, ...] = ()  # default: all that can be used
    baseline: str = ""  # a backend; default: gloo on a CPU, else torch
    warmup: int = 5
    repeats: int | None = None  # None: 30, and fewer for messages above 4 MB
    seed: int = 0
    tune: bool = False  # measure the options of each backend
    device: str = "auto"
    ranks_per_node: int | None = None
    ranks_per_gpu: int = 1
    equal_nodes: bool = False  # refuse nodes with different numbers of ranks, before anything is measured
    join_timeout: float = 300.0

    def __post_init__(self) -> None:
        if not self.sizes:
            largest = 4 << 20 if self.tune else 64 << 20
            doubling = tuple(8 << 10 << step for step in range(14) if 8 << 10 << step <= largest)
            object.__setattr__(self, "sizes", doubling)
        for name in ("sizes", "dtypes", "backends"):
            object.__setattr__(self, name, tuple(dict.fromkeys(getattr(self, name))))
        for name in ("warmup", "repeats"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise YalisError(f"{name} is {value}; give a whole number of at least 1")
        if self.join_timeout <= 0:
            raise YalisError(f"join_timeout is {self.join_timeout:g}; give a number of seconds above 0")
        if not self.dtypes:
            raise YalisError("no dtypes given; give for example --dtypes float32,bfloat16")
        for dtype in self.dtypes:
            if dtype not in DTYPES:
                raise YalisError(f"unknown dtype {dtype!r}; accepted: {', '.join(DTYPES)}")
        widest = 4 if "float32" in self.dtypes else 2
        for size in self.sizes:
            if size < widest or size % widest or size > MAX_BYTES:
                accepted = f"multiples of {widest} up to {MAX_BYTES >> 20}M, such as 64K or 1M"
                raise YalisError(f"a message of {size} bytes cannot be measured; accepted: {accepted}")
        for name in (*self.backends, *filter(None, [self.baseline])):
            if name not in (known := [*BACKENDS.names(), *PEERS]):
                raise YalisError(f"unknown backend {name!r}; accepted: {', '.join(known)}")
        if self.baseline and self.backends and self.baseline not in self.backends:
            raise YalisError(f"the baseline {self.baseline} is not among the backends; add it to --backends")
        if self.tune and self.backends and not set(self.backends) - set(PEERS):
            raise YalisError(f"--tune measures the backends that auto chooses from, and {self.backends[0]} is not one")
        if self.tune and "auto" in self.backends:
            raise YalisError("--tune measures the backends that auto chooses from; leave auto out of --backends")

    def repeats_of(self, size: int) -> int:
        """Return the measured operations for a message size in bytes; by default fewer for messages above 4 MB."""
        if self.repeats is not None:
            return self.repeats
        return min(MAX_REPEATS, max(MIN_REPEATS, MAX_REPEATS * (4 << 20) // size))

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> AllReducePlan:
        """Return the plan that another rank sent with `asdict`."""
        return cls(**{field.name: values[field.name] for field in fields(cls)})


def measure(
    plan: AllReducePlan, ranks: int | None, command: str, report: Report, insecure_rendezvous: bool = False
) -> Result | None:
    """Start the ranks, or join those a launcher started, and measure. Returns None on all ranks except rank 0."""
    from yalis.study.allreduce.rank import run_rank

    launch = detect_launcher()
    size = ranks if ranks is not None else launch.size
    if size < 2:
        raise YalisError("an all-reduce needs at least 2 ranks; give --ranks 2 or more, or start several with torchrun")
    if launch.launcher and launch.size != size:
        raise YalisError(f"--ranks is {size}, but {launch.launcher} started {launch.size}; leave --ranks out")
    world = join(size, WORKER, plan.join_timeout, insecure_rendezvous)
    try:
        if world.rank:
            with serving(world):
                run_rank(world, plan, lambda text: None)
            return None
        measured = run_rank(world, plan, report)
        topology = topology_of(world)
    except BaseException as error:
        reason = world.abort(error)
        if reason is error:
            raise
        raise reason from reason.__cause__
    finally:
        world.close()
    rows = add_speedups(measured["rows"], plan.baseline)
    facts, devices = {**asdict(plan), **measured["facts"]}, [measured["device"]]
    notes = list(measured["notes"])
    if plan.ranks_per_gpu > 1 and any(row["backend"] == "torch" for row in rows):
        notes.append(
            "torch is NCCL over sockets here: NCCL only lets ranks share a GPU that appear to be on different hosts."
        )
    return results.new("allreduce", facts, rows, command, devices, notes, topology=topology)


def make_row(
    backend: str,
    options: dict[str, Any],
    dtype: str,
    size: int,
    mode: str,
    ranks: int,
    error: str | None,
    checked: int,
    seconds: Sequence[float],
) -> Row:
    """Return a row. `seconds` has each operation's time on its slowest rank. `error` is None or what was wrong."""
    row: Row = results.empty_row("allreduce")
    row.update(backend=backend, options=options, dtype=dtype, bytes=size, mode=mode, checked=checked)
    row["repeats"] = len(seconds)
    row["status"] = error or "ok"
    if not error:
        middle, (low, high) = median(seconds), spread(seconds)
        row.update(median_us=1e6 * middle, low_us=1e6 * low, high_us=1e6 * high)
        row["bus_gb_per_s"] = 2 * (ranks - 1) / ranks * size / middle / 1e9
    return row


def save_table(result: Result) -> tuple[Path, list[tuple[int, Choice]]]:
    """Save a result's times for `--allreduce auto`: those of its first dtype, in graph mode if that was measured.

    Returns the path, and the fastest choice for each size."""
    rows, facts = result.rows, result.parameters
    mode = "graph" if any(row["mode"] == "graph" for row in rows) else "eager"
    kept = [
        Timing(row["bytes"], Choice(row["backend"], row["options"]), row["median_us"])
        for row in fully_measured(rows)
        if row["dtype"] == facts["dtypes"][0] and row["mode"] == mode and row["backend"] not in PEERS
    ]
    tuned = ShapeTimings(tuple(kept))
    names = {timing.choice.backend for timing in kept}
    best = [(size, choice) for size in facts["sizes"] if (choice := tuned.best(size, names))]
    return tuning.save(tuning.TableKey(**facts["table_key"]), facts["nodes"], kept, result.command), best


def check_sums(rows: Sequence[Row]) -> None:
    """Raise if any sum was wrong."""
    if wrong := [row for row in rows if row["status"].startswith("wrong")]:
        first = wrong[0]
        raise YalisFailure(
            f"{len(wrong)} of {count_of(len(rows), 'setting')} gave wrong sums, the first {label(first)} with "
            f"{first['bytes']} bytes of {first['dtype']} ({first['mode']}): {first['status'].removeprefix('wrong: ')}"
        )
