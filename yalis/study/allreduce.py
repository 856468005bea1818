"""The all-reduce benchmark: sizes x dtypes x backends, each result checked against a float64 sum.

It needs ranks and no engine. What one rank does is in allreduce_rank.py; here is what is measured, and what the times
of all ranks come to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import median
from typing import Any

import torch

from yalis import result_rows, results
from yalis.comm import tuning
from yalis.comm.base import BACKENDS
from yalis.comm.tuning import Choice, ShapeTimings, Timing
from yalis.errors import YalisError, YalisFailure, first_line
from yalis.launch.join import join
from yalis.launch.launchers import detect_launcher
from yalis.launch.serving import serving
from yalis.perfmodel.collectives import BETWEEN, Link, Shape, hierarchical, one_shot, ring
from yalis.study.spread import spread
from yalis.study.topology import topology_of

#: The module that a rank started by rank 0 runs.
WORKER = ("yalis.study.allreduce_rank",)
#: gloo's own all-reduce at every size, which is what torch's users get; backend "torch" is quicker for short messages.
PLAIN = "gloo"
#: What nvrar is measured against: other algorithms on its own words, and NVSHMEM's own.
BESIDE_NVRAR = ("ring", "oneshot", "nvshmem")
#: Whose sums may differ between ranks by rounding; everybody else promises the same bits.
UNLIKE = ("nvshmem",)
MOST_BYTES = 1 << 30
#: No backends of an engine, but what those are compared with.
PEERS = (PLAIN, *BESIDE_NVRAR)
RIVALS = {"hierarchical": (PLAIN, "mpi"), "nvrar": (*BESIDE_NVRAR, "torch")}
DTYPES = ("float32", "bfloat16", "float16")
#: Operations that count, unless a number is given.
MOST_REPEATS, FEWEST_REPEATS = 30, 9
#: Bytes on the wire for each of data, where words carry flags.
WORDS = 2.0

Row = dict[str, Any]
Report = Callable[[str], None]


@dataclass(frozen=True)
class AllReducePlan:
    sizes: tuple[int, ...] = ()  # bytes; none given: doubling from 8 KB to 64 MB, and to 4 MB where options are tried
    dtypes: tuple[str, ...] = ("float32",)
    backends: tuple[str, ...] = ()  # none given: all that can be used
    baseline: str = ""  # a backend; none given: gloo on a CPU, else torch
    warmup: int = 5
    repeats: int | None = None  # None: 30, and fewer of messages above 4 MB
    seed: int = 0
    tune: bool = False  # try the options of each backend
    device: str = "auto"
    ranks_per_node: int | None = None
    ranks_per_gpu: int = 1
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
            if size < widest or size % widest or size > MOST_BYTES:
                most = f"multiples of {widest} up to {MOST_BYTES >> 20}M"
                raise YalisError(f"a message of {size} bytes cannot be measured; accepted: {most}, such as 64K or 1M")
        for name in (*self.backends, *filter(None, [self.baseline])):
            if name not in (known := [*BACKENDS.names(), *PEERS]):
                raise YalisError(f"unknown backend {name!r}; accepted: {', '.join(known)}")
        if self.baseline and self.backends and self.baseline not in self.backends:
            raise YalisError(f"the baseline {self.baseline} is not among the backends; add it to --backends")
        if self.tune and self.backends and not set(self.backends) - set(PEERS):
            raise YalisError(f"--tune measures what auto can choose from, and {self.backends[0]} is only a peer")
        if self.tune and "auto" in self.backends:
            raise YalisError("--tune measures what auto can choose from, which is not auto; leave it out")

    def repeats_of(self, size: int) -> int:
        """Operations that count, of messages of so many bytes. By default large ones share what 4 MB would take."""
        if self.repeats is not None:
            return self.repeats
        return min(MOST_REPEATS, max(FEWEST_REPEATS, MOST_REPEATS * (4 << 20) // size))

    @classmethod
    def told(cls, told: dict[str, Any]) -> AllReducePlan:
        """The plan that another rank sent as JSON."""
        return cls(**{one.name: told[one.name] for one in fields(cls)})


def measure(plan: AllReducePlan, ranks: int | None, command: str, report: Report) -> results.Result | None:
    """Start or find the ranks and measure; None on all ranks but the first."""
    from yalis.study.allreduce_rank import take_part

    place = detect_launcher()
    size = ranks if ranks is not None else place.size
    if size < 2:
        raise YalisError("an all-reduce takes at least 2 ranks; give --ranks 2 or more, or start several with torchrun")
    if place.launcher and place.size != size:
        raise YalisError(f"--ranks is {size}, and {place.launcher} started {place.size}; leave --ranks out")
    world = join(size, WORKER, plan.join_timeout)
    try:
        if world.rank:
            with serving(world):
                take_part(world, plan, lambda text: None)
            return None
        measured = take_part(world, plan, report)
        topology = topology_of(world)
    except BaseException as error:
        explained = world.explain(error)
        world.fail(first_line(error) if isinstance(error, Exception) else type(error).__name__)
        if explained:
            raise explained from error
        raise
    finally:
        world.close()
    rows = add_speedups(measured["rows"], plan.baseline)
    facts, devices = {**asdict(plan), **measured["facts"]}, [measured["device"]]
    notes = list(measured["notes"])
    if plan.ranks_per_gpu > 1 and any(row["backend"] == "torch" for row in rows):
        notes.append("torch is NCCL over sockets here: it lets ranks share a GPU only where they pose as machines.")
    return results.new("allreduce", facts, rows, command, devices, notes, topology=topology)


def make_row(
    backend: str,
    options: dict[str, Any],
    dtype: str,
    size: int,
    mode: str,
    ranks: int,
    wrong: str | None,
    checked: int,
    seconds: Sequence[float],
) -> Row:
    """`seconds`: of each operation, the slowest rank's."""
    row: Row = dict.fromkeys(result_rows.columns("allreduce"))
    row.update(backend=backend, options=options, dtype=dtype, bytes=size, mode=mode, checked=checked)
    row["repeats"] = len(seconds)
    row["status"] = wrong or "ok"
    if not wrong:
        middle, (low, high) = median(seconds), spread(seconds)
        row.update(median_us=1e6 * middle, low_us=1e6 * low, high_us=1e6 * high)
        row["bus_gb_per_s"] = 2 * (ranks - 1) / ranks * size / middle / 1e9
    return row


def label(row: Row) -> str:
    """ "hierarchical between=halving chunk=65536"; "mpi ring"."""
    options = row["options"]
    if set(options) == {"algorithm"}:
        return f"{row['backend']} {options['algorithm']}"
    return " ".join([row["backend"], *(f"{name}={value}" for name, value in options.items())])


def name_of(result: results.Result, backend: str) -> str:
    """A backend, and what it is where that is not what its users expect."""
    shared = backend == "torch" and result.parameters.get("ranks_per_gpu", 1) > 1
    return f"{backend} (NCCL over sockets)" if shared and result.devices[0]["type"] == "cuda" else backend


def baseline_of(rows: Sequence[Row], named: str) -> str:
    """The backend that speed-ups are over: the one that was named, else gloo if it was measured, else torch."""
    return named or (PLAIN if any(row["backend"] == PLAIN for row in rows) else "torch")


def add_speedups(rows: list[Row], baseline: str) -> list[Row]:
    """Each row's speed-up over the baseline in the same setting; over the eager one, where no graph can hold that."""
    name = baseline_of(rows, baseline)
    found = {_setting(row): row["median_us"] for row in reversed(rows) if row["backend"] == name}
    for row in rows:
        against = found.get(_setting(row)) or found.get((*_setting(row)[:-1], "eager"))
        if against and row["median_us"]:
            row["speedup"] = against / row["median_us"]
    return rows


def _setting(row: Row) -> tuple[Any, ...]:
    return row["delay_us"], row["dtype"], row["bytes"], row["mode"]


def _way(row: Row) -> tuple[Any, ...]:
    return *_setting(row), row["backend"]


@dataclass(frozen=True)
class Ratio:
    """How much faster one of ours is than a rival at its best, in one setting."""

    ours: Row
    rival: Row
    times_faster: float


def to_the_end(rows: Sequence[Row]) -> list[Row]:
    """What was measured as often as anything of its backend and setting; a search drops the others after a glance."""
    most: dict[tuple[Any, ...], int] = {}
    for row in rows:
        most[_way(row)] = max(most.get(_way(row), 0), row["repeats"] or 0)
    return [row for row in rows if row["median_us"] is not None and (row["repeats"] or 0) == most[_way(row)]]


def fastest(rows: Sequence[Row]) -> list[Row]:
    """Each backend's fastest row in each setting."""
    best: dict[tuple[Any, ...], Row] = {}
    for row in to_the_end(rows):
        if _way(row) not in best or row["median_us"] < best[_way(row)]["median_us"]:
            best[_way(row)] = row
    return list(best.values())


def ratios(rows: Sequence[Row]) -> list[Ratio]:
    """Ours, at their best, against each rival that was measured in the same setting."""
    best = {_way(row): row for row in fastest(rows)}
    return [
        Ratio(row, against, against["median_us"] / row["median_us"])
        for ours, rivals in RIVALS.items()
        for rival in rivals
        for key, row in best.items()
        if key[-1] == ours and (against := best.get((*key[:-1], rival)))
    ]


def added_by_delay(rows: Sequence[Row]) -> list[tuple[Row, float]]:
    """For each row with a delay whose setting was measured without one too: the microseconds that the delay added.

    Without any delay the times are what the hosts' cores take for each message, which is not the network's.
    """
    still = {
        (label(row), *_setting(row)[1:]): row["median_us"]
        for row in rows
        if row["delay_us"] == 0 and row["median_us"] is not None
    }
    return [
        (row, row["median_us"] - still[key])
        for row in rows
        if row["delay_us"] and row["median_us"] is not None and (key := (label(row), *_setting(row)[1:])) in still
    ]


def save_table(result: results.Result) -> tuple[Path, list[tuple[int, Choice]]]:
    """Keep a result's times for `auto`: those of its first dtype, in graphs where they were measured.

    Returns where, and the fastest way for each size.
    """
    rows, facts = result.rows, result.parameters
    mode = "graph" if any(row["mode"] == "graph" for row in rows) else "eager"
    kept = [
        Timing(row["bytes"], Choice(row["backend"], row["options"]), row["median_us"])
        for row in to_the_end(rows)
        if row["dtype"] == facts["dtypes"][0] and row["mode"] == mode and row["backend"] not in PEERS
    ]
    device = torch.device(result.devices[0]["type"])
    tuned = ShapeTimings(tuple(kept))
    names = {timing.choice.backend for timing in kept}
    best = [(size, choice) for size in facts["sizes"] if (choice := tuned.best(size, names))]
    return tuning.save(device, facts["nodes"], kept, result.command), best


def model(result: results.Result, delay_us: float | None, size: int) -> dict[str, float]:
    """Microseconds that the cost model expects of algorithms on this result's links; nothing where they are unknown.

    On GPUs all of them move words with flags, and a kernel's launch and end are fixed.
    """
    facts = result.parameters
    counts = {len(ranks) for ranks in facts["nodes"]}
    found = [link for link in facts["links"] if link["delay_us"] == delay_us]
    if not found or len(counts) > 1:
        return {}
    inside, between = (
        Link(**found[0].get(kind, {"latency": 0, "seconds_per_byte": 0})) for kind in ("inside", "between")
    )
    shared = bool(facts.get("lab", {}).get("rate"))
    shape = Shape(len(facts["nodes"]), counts.pop(), shared_link=shared)
    if (fixed := found[0].get("fixed")) is not None:
        flat = Shape(shape.size, 1) if shape.nodes > 1 else shape  # a single ring, which knows no nodes
        costs = {
            "nvrar": hierarchical(shape, size, word_factor=WORDS),
            "ring": ring(flat, WORDS * size),
            "oneshot": one_shot(shape, WORDS * size),
        }
        return {name: 1e6 * (fixed + cost.seconds(inside, between)) for name, cost in costs.items()}
    best = min(hierarchical(shape, size, way).seconds(inside, between) for way in BETWEEN)
    return {"hierarchical": 1e6 * best, "ring": 1e6 * ring(shape, size).seconds(inside, between)}


def wrong_rows(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row["status"].startswith("wrong")]


def check_right(rows: Sequence[Row]) -> None:
    """Fail, in one sentence, if any sum was wrong."""
    if wrong := wrong_rows(rows):
        first = wrong[0]
        raise YalisFailure(
            f"{len(wrong)} of {len(rows)} settings gave wrong sums, the first {label(first)} with {first['bytes']} "
            f"bytes of {first['dtype']} ({first['mode']}): {first['status'].removeprefix('wrong: ')}"
        )
