"""The all-reduce benchmark: sizes x dtypes x backends, each result checked against a float64 sum.

It needs ranks and no engine. What one rank does is in allreduce_rank.py; here is what is measured, and what the times
of all ranks come to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from statistics import median
from typing import Any

from yalis import results
from yalis.comm.choose import check_name
from yalis.errors import YalisError, YalisFailure, first_line
from yalis.launch.environment import find_place
from yalis.launch.join import join
from yalis.launch.serving import serving
from yalis.study.spread import spread

#: The module that a rank started by rank 0 runs.
WORKER = ("yalis.study.allreduce_rank",)
#: gloo's own all-reduce at every size, which is what torch's users get; backend "torch" is quicker for short messages.
PLAIN = "gloo"
DTYPES = ("float32", "bfloat16", "float16")

Row = dict[str, Any]
Report = Callable[[str], None]


@dataclass(frozen=True)
class AllReducePlan:
    sizes: tuple[int, ...] = tuple(8 << 10 << step for step in range(10))  # bytes, 8 KB to 4 MB
    dtypes: tuple[str, ...] = ("float32",)
    backends: tuple[str, ...] = ()  # none given: all that can be used
    baseline: str = ""  # a backend; none given: gloo on a CPU, else torch
    warmup: int = 5
    repeats: int = 30
    seed: int = 0
    tune: bool = False  # try the options of each backend
    device: str = "auto"
    ranks_per_node: int | None = None
    ranks_per_gpu: int = 1
    join_timeout: float = 300.0

    def __post_init__(self) -> None:
        for name in ("sizes", "dtypes", "backends"):
            object.__setattr__(self, name, tuple(dict.fromkeys(getattr(self, name))))
        for name, low in (("warmup", 1), ("repeats", 1)):
            if getattr(self, name) < low:
                raise YalisError(f"{name} is {getattr(self, name)}; give a whole number of at least {low}")
        for dtype in self.dtypes:
            if dtype not in DTYPES:
                raise YalisError(f"unknown dtype {dtype!r}; accepted: {', '.join(DTYPES)}")
        widest = 4 if "float32" in self.dtypes else 2
        for size in self.sizes:
            if size < widest or size % widest:
                raise YalisError(f"a message of {size} bytes holds no whole number of elements of {widest} bytes each")
        for name in (*self.backends, *filter(None, [self.baseline])):
            if name != PLAIN:
                check_name(name)
        if self.tune and (chosen := {PLAIN, "auto"} & set(self.backends)):
            raise YalisError(f"--tune measures what auto can choose from, which {chosen.pop()} is not; leave it out")

    @classmethod
    def told(cls, told: dict[str, Any]) -> AllReducePlan:
        """The plan that another rank sent as JSON."""
        return cls(**{one.name: told[one.name] for one in fields(cls)})


def measure(plan: AllReducePlan, ranks: int | None, command: str, report: Report) -> results.Result | None:
    """Start or find the ranks and measure; None on all ranks but the first."""
    from yalis.study.allreduce_rank import take_part

    place = find_place()
    size = ranks if ranks is not None else place.size
    if size < 2:
        raise YalisError("an all-reduce takes at least 2 ranks; give --ranks 2 or more, or start several with torchrun")
    if place.launcher and place.size != size:
        raise YalisError(f"--ranks is {size}, and {place.launcher} started {place.size}; leave --ranks out")
    world = join(size, WORKER, plan.join_timeout)
    try:
        if world.rank:
            with serving(world):
                take_part(world, plan, report)
            return None
        measured = take_part(world, plan, report)
    except BaseException as error:
        explained = world.explain(error)
        world.fail(first_line(error) if isinstance(error, Exception) else type(error).__name__)
        if explained:
            raise explained from error
        raise
    finally:
        world.close()
    rows = add_speedups(measured["rows"], plan.baseline)
    return results.new("allreduce", {**asdict(plan), **measured["facts"]}, rows, command, [measured["device"]])


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
    row: Row = dict.fromkeys(results.columns("allreduce"))
    row.update(backend=backend, options=options, dtype=dtype, bytes=size, mode=mode, checked=checked)
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


def add_speedups(rows: list[Row], baseline: str) -> list[Row]:
    """Each row's speed-up over the baseline's plain row of the same setting; that of gloo where none is named."""
    names = [row["backend"] for row in rows]
    base = baseline or (PLAIN if PLAIN in names else "torch")
    found = {
        _setting(row): row["median_us"]
        for row in reversed(rows)
        if row["backend"] == base and row["median_us"] is not None
    }
    for row in rows:
        against = found.get(_setting(row)) or found.get((*_setting(row)[:-1], "eager"))
        if against is not None and row["median_us"] is not None:
            row["speedup"] = against / row["median_us"]
    return rows


def _setting(row: Row) -> tuple[Any, ...]:
    return row["delay_us"], row["dtype"], row["bytes"], row["mode"]


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
