"""What each rank does in the all-reduce benchmark.

Ranks start every operation together. Where one clock serves them all (one machine, whatever hosts it poses as) they
wait for the same moment of it; between machines they leave a barrier. An operation's time is the longest that any rank
took from its own start to its own end, on a GPU until the stream is empty again. A graph holds many operations, as that
of a decode step does; they are timed by the GPU's clock once all ranks have come, and that is divided by their number.

Before every operation the input is written anew, and the checked one has an output full of NaN: a sum that was never
taken cannot pass for one of an earlier operation.

`python -m yalis.study.allreduce.rank` is a rank that rank 0 started.
"""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from yalis.comm import tuning
from yalis.comm.base import BACKENDS, CommBackend, Communicator
from yalis.comm.custom_allreduce import CustomAllReduceBackend, CustomAllReduceGroup
from yalis.comm.selection import unusable_on_any_rank
from yalis.comm.topology import Topology
from yalis.comm.torch_dist import TorchBackend, TorchGroup
from yalis.comm.tuning import Choice, ShapeTimings, Timing, TuningTable
from yalis.config import EngineConfig
from yalis.engine.device import rank_device, share_threads
from yalis.errors import YalisError, YalisFailure
from yalis.launch.join import join
from yalis.launch.launchers import detect_launcher
from yalis.launch.serving import serving
from yalis.launch.world import World
from yalis.machine import usable_cores
from yalis.study import bandwidth
from yalis.study.allreduce.benchmark import INEXACT_BACKENDS, WORKER, AllReducePlan, Report, make_row
from yalis.study.allreduce.links import IN_GRAPH, links_of_messages, links_of_pairs, record
from yalis.study.results import Row
from yalis.study.results.kinds.allreduce import NVRAR_PEERS, PLAIN_GLOO

_SPIN_S = 3e-4  # sleeping ends late by up to this
_LEAD_S = 0.02  # for all ranks to hear of the first moment
_WARM_S = 2e-3  # between starts while nobody knows how long it takes
_PART = 1 << 20  # elements that are checked at a time
TURNS = 3  # in which the repeats of all backends alternate
# A search goes on after its first turn with so many of the ways that a backend offers.
FINALISTS = 6
# Does something; returns the seconds it took, or None, which leaves that to the host's clock.
Act = Callable[[], float | None]
_BOOT = Path("/proc/sys/kernel/random/boot_id")


def take_part(world: World, plan: AllReducePlan | None, report: Report) -> dict[str, Any]:
    """Measure with the other ranks what rank 0's plan says: the same rows on every rank, and what they were made on."""
    plan = AllReducePlan.from_json(world.all_gather_object(asdict(plan) if plan else None)[0])
    world.phase = "measuring"
    config = EngineConfig(device=plan.device, ranks_per_gpu=plan.ranks_per_gpu, ranks_per_node=plan.ranks_per_node)
    device = rank_device(config, world)
    share_threads(config, world, device)
    field = Field(world, device, Topology.of(world, plan.ranks_per_node))
    try:
        links = field.links(plan)
        rows = list(field.run(plan, report))
    finally:
        field.close()
    nodes = field.topology.by_node()
    facts = {
        "ranks": world.size,
        "nodes": [list(ranks) for ranks in nodes],
        "shape": tuning.shape_of(nodes),
        "start": "clock" if field.start.shared else "barrier",
        "links": [{"delay_us": None, **links}] if links else [],
    }
    notes = [f"The sums of {name} are not the same bits on every rank." for name in sorted(field.unlike)]
    return {"rows": rows, "facts": facts, "device": bandwidth.describe_device(device), "notes": notes}


class PlainGloo(CustomAllReduceGroup):
    """gloo's ring as torch gives it to its users, for short messages too."""

    def all_reduce(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        target = x if out is None else out.copy_(x)
        self.torch_group._group.allreduce([target]).wait()
        return target


class Told(CustomAllReduceGroup):
    """A group that is told how to do each all-reduce."""

    def __init__(self, group: Any, options: dict[str, int | str]) -> None:
        super().__init__(group.torch_group)
        self._group, self._options, self.capturable = group, options, group.capturable

    def all_reduce(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        total: Tensor = self._group.all_reduce_with(x, x if out is None else out, **self._options)
        return total

    def workspace(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        if self._options.get("algorithm") != "nvshmem":
            return super().workspace(shape, dtype, device)
        reserved: Tensor = self._group.symmetric_tensor(shape, dtype)
        return reserved


class Start:
    """Lets the ranks start together, and times what they do then."""

    def __init__(self, world: World, comm: Communicator) -> None:
        self._world, self._comm = world, comm
        boots = world.all_gather_object(_BOOT.read_text() if _BOOT.exists() else None)
        self.shared = len(set(boots)) == 1 and boots[0] is not None
        self._spin = _SPIN_S if world.size <= usable_cores() else 0.0
        self._pace = 0.0  # seconds that the slowest rank took for one operation and what prepares it

    def times(self, prepare: Callable[[], None], act: Act, count: int, period: float) -> list[float]:
        """The slowest rank's seconds for each `act`. `period`: from one start to the next, where a clock says when."""
        moment = max(self._world.all_gather_object(time.monotonic())) + _LEAD_S
        own, paces = [], []
        for _ in range(count):
            entered = time.perf_counter()
            prepare()
            moment += period
            ready = time.perf_counter()
            if self.shared:
                self._wait(moment)
            else:
                self._comm.barrier()
            begin = time.perf_counter()
            told = act()
            ended = time.perf_counter()
            own.append(ended - begin if told is None else told)
            paces.append(ended - begin + ready - entered)
        everyone = self._world.all_gather_object([own, max(paces[1:] or paces)])
        self._pace = max(pace for _, pace in everyone)
        return [max(ranks) for ranks in zip(*(times for times, _ in everyone), strict=True)]

    def settled(self, prepare: Callable[[], None], act: Act, warmup: int, count: int) -> list[float]:
        """The same, at a pace that the first few, which do not count, have shown to be slow enough for all ranks."""
        self.times(prepare, act, warmup, _WARM_S)
        return self.times(prepare, act, count, 1.5 * self._pace + 5e-4)

    def _wait(self, moment: float) -> None:
        if (left := moment - time.monotonic() - self._spin) > 0:
            time.sleep(left)
        while time.monotonic() < moment:
            pass


@dataclass(frozen=True)
class Sum:
    """The inputs of all ranks, which all know, and what they must add up to."""

    mine: Tensor
    total: Tensor  # in float64
    bound: Tensor  # how far rounding at every addition may lead from it

    @classmethod
    def draw(cls, seed: str, rank: int, ranks: int, length: int, dtype: torch.dtype) -> Sum:
        total = torch.zeros(length, dtype=torch.float64)
        weight = torch.zeros(length, dtype=torch.float64)
        mine = torch.empty(0)
        for other in range(ranks):
            digest = hashlib.blake2b(f"{seed}/{other}".encode(), digest_size=7).digest()
            noise = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
            values = torch.randn(length, generator=noise).to(dtype)
            total += values
            weight += values.abs()
            if other == rank:
                mine = values
        return cls(mine, total, weight * (ranks * torch.finfo(dtype).eps / 2))

    def fault(self, out: Tensor) -> str | None:
        """What is wrong with this rank's result."""
        parts = zip(*(each.split(_PART) for each in (out.cpu(), self.total, self.bound)), strict=True)
        bad = sum(int((~((own.double() - total).abs() <= bound)).sum()) for own, total, bound in parts)
        return f"{bad} of {len(self.total)} elements are not the sum" if bad else None


class Entry:
    """One way of summing messages of one size: run, timed and checked. `promised`: the same bits on all ranks."""

    def __init__(
        self, world: World, start: Start, group: Communicator, wanted: Sum, mode: str, device: torch.device,
        promised: bool,
    ) -> None:  # fmt: skip
        self._promised = promised
        self._world, self._start, self._group, self._wanted, self._device = world, start, group, wanted, device
        self._mine = wanted.mine.to(device)
        self._x, self._out = (group.workspace(tuple(self._mine.shape), self._mine.dtype, device) for _ in range(2))
        self._act: Act = self._reduce
        # In place, as models do it; NVSHMEM's own is wrong there between four ranks and more.
        self._result, self._each = self._x if promised else self._out, 1
        self.seconds: list[float] = []
        self.checked = 0
        self.alike = True
        self.wrong: str | None = None  # the same on all ranks
        self._check_poisoned()
        if mode == "graph" and not self.wrong:
            self._act, self._result, self._each = self._record(), self._out, IN_GRAPH

    def take_turn(self, warmup: int, count: int) -> None:
        """A wrong result ends an entry's part."""
        if self.wrong or not count:
            return
        taken = self._start.settled(self._prepare, self._act, warmup, count)
        self.seconds += [seconds / self._each for seconds in taken]
        self._check(self._result)

    def _check_poisoned(self) -> None:
        self._prepare()
        self._group.all_reduce(self._x, self._out)
        bandwidth.synchronize(self._device)
        self._check(self._out)

    def _prepare(self) -> None:
        self._x.copy_(self._mine)
        self._out.fill_(float("nan"))
        bandwidth.synchronize(self._device)

    def _reduce(self) -> None:
        self._group.all_reduce(self._x, None if self._result is self._x else self._result)
        bandwidth.synchronize(self._device)

    def _record(self) -> Act:
        self._prepare()
        return record(lambda: self._group.all_reduce(self._x, self._out), self._device)

    def _check(self, out: Tensor) -> None:
        """All ranks have the sum, and whether with the same bits."""
        self.checked += 1
        bits = hashlib.blake2b(out.cpu().view(torch.uint8).numpy().tobytes()).hexdigest()
        told = self._world.all_gather_object([self._wanted.fault(out), bits])
        for rank, (fault, other) in enumerate(told):
            if fault or (other != told[0][1] and self._promised):
                self.wrong = f"wrong: {fault or 'not the bits of rank 0'} on rank {rank}"
                return
            self.alike = self.alike and other == told[0][1]


Ways = list[tuple[Choice, str, Entry]]


def enter(
    world: World, start: Start, group: Communicator, wanted: Sum, mode: str, device: torch.device, promised: bool
) -> Entry | str:
    """An entry, or why the backend has no room for such messages: all ranks hear that together."""
    try:
        return Entry(world, start, group, wanted, mode, device, promised)
    except YalisFailure:  # somebody is gone
        raise
    except YalisError as error:
        return str(error)


def _finalists(ways: Ways) -> Iterator[tuple[Choice, str, Entry]]:
    """The fastest of each backend and mode so far, at their best: what disturbs a few operations only adds time.

    The times, and so the choice, are the same on all ranks.
    """
    for kind in dict.fromkeys((choice.backend, mode) for choice, mode, _ in ways):
        own = [way for way in ways if (way[0].backend, way[1]) == kind and not way[2].wrong]
        yield from sorted(own, key=lambda way: min(way[2].seconds, default=0.0))[:FINALISTS]


class Field:
    """The backends side by side on the same ranks."""

    def __init__(self, world: World, device: torch.device, topology: Topology) -> None:
        self.world, self.device, self.topology = world, device, topology
        self._table = tuning.load_on_all_ranks(world, device)
        self._torch = TorchBackend(world, device, topology, self._table)
        self._opened: list[CommBackend] = [self._torch]
        under = self._torch.group("allreduce", range(world.size))
        assert isinstance(under, TorchGroup)
        self._under = under
        self._groups: dict[str, Communicator] = {"torch": under}
        if device.type == "cpu":
            self._groups[PLAIN_GLOO] = PlainGloo(under)
        self.start = Start(world, under)
        self.unlike: set[str] = set()  # whose ranks ended with different bits

    def run(self, plan: AllReducePlan, report: Report) -> Iterator[Row]:
        names = self._choose(plan)
        for dtype in plan.dtypes:
            for size in plan.sizes:
                yield from self._compare(names, dtype, size, plan, report)

    def _compare(self, names: list[str], dtype: str, size: int, plan: AllReducePlan, report: Report) -> Iterator[Row]:
        """All ways of summing messages of one size, in turns: a machine that slows down slows all of them."""
        kind: torch.dtype = getattr(torch, dtype)
        seed = f"{plan.seed}/{dtype}/{size}"
        wanted = Sum.draw(seed, self.world.rank, self.world.size, size // kind.itemsize, kind)
        tried = [
            (
                Choice(name, options),
                mode,
                enter(self.world, self.start, group, wanted, mode, self.device, promised=name not in INEXACT_BACKENDS),
            )
            for name in names
            for options in (self._options(name, size) if plan.tune else [{}])
            for group in [self._group(name, options)]
            for mode in self._modes(group, plan.tune)
        ]
        going: Ways = [(choice, mode, entry) for choice, mode, entry in tried if isinstance(entry, Entry)]
        repeats = plan.repeats_of(size)
        for turn in range(TURNS):
            # The first turn has one at least: it chooses who goes on.
            count = -(-repeats * (turn + 1) // TURNS) - -(-repeats * turn // TURNS)
            for choice, mode, entry in going:
                report(f"{size / 1024:g} KB of {dtype}: {choice}, {mode}, turn {turn + 1} of {TURNS}")
                glance = plan.tune and mode == "graph" and turn == 0  # a graph holds many operations
                entry.take_turn(*((2, 4) if glance else (min(plan.warmup, max(2, count)), count)))
            going = list(_finalists(going))
        for choice, mode, way in tried:
            found: tuple[str | None, int, list[float]]
            if isinstance(way, Entry):
                found = (way.wrong, way.checked, way.seconds)
                if not way.alike:
                    self.unlike.add(choice.backend)
            else:
                found = (way, 0, [])
            yield make_row(choice.backend, dict(choice.options), dtype, size, mode, self.world.size, *found)

    def _modes(self, group: Communicator, tune: bool) -> tuple[str, ...]:
        """A search is for what a decode step runs, which is a graph where there can be one."""
        if self.device.type == "cpu" or not group.capturable:
            return ("eager",)
        return ("graph",) if tune else ("eager", "graph")

    def links(self, plan: AllReducePlan) -> dict[str, Any]:
        """What the cost model needs to know, where it can be measured."""
        if self.device.type == "cpu":
            return links_of_messages(self.world, self.topology, self._under)
        if "nvrar" not in self._choose(plan):
            return {}
        self._group("nvrar", {})
        (backend,) = (backend for backend in self._opened if backend.name == "nvrar")
        return links_of_pairs(self.world, self.topology, backend, self.start)

    def _choose(self, plan: AllReducePlan) -> list[str]:
        """Those asked for; else gloo, what can be used, and what belongs beside it. Auto only does what others do."""
        names = list(plan.backends)
        if not names:
            known = [name for name in BACKENDS.names() if name != "auto" and self._refusal(name) is None]
            names = [PLAIN_GLOO, *known] if self.device.type == "cpu" else known
            names += NVRAR_PEERS if "nvrar" in known else ()
        for name in names:
            if reason := self._refusal(name):
                raise YalisError(f"backend {name!r} cannot be measured here: {reason}; leave it out")
        return names

    def _refusal(self, name: str) -> str | None:
        if name == PLAIN_GLOO:
            return None if self.device.type == "cpu" else f"gloo joins CPUs, and these ranks are on {self.device.type}"
        return unusable_on_any_rank("nvrar" if name in NVRAR_PEERS else name, self.world, self.device)

    def _options(self, name: str, size: int) -> list[dict[str, int | str]]:
        """The ways to do it that are worth trying, if there are several."""
        if name in (PLAIN_GLOO, "nvshmem"):
            return [{}]
        if name == "nvrar" or name in NVRAR_PEERS:
            group: Any = self._group("nvrar", {})
            tried: list[dict[str, int | str]] = group.candidate_options(size, name)
            return tried
        offered = getattr(BACKENDS.load(name), "candidate_options", None)
        return list(offered(size)) if offered else [{}]

    def _group(self, name: str, options: dict[str, int | str]) -> Communicator:
        """A backend's group, which does it with these options if there are any."""
        key = str(Choice(name, options))
        if key not in self._groups:
            self._groups[key] = self._make(name, options)
        return self._groups[key]

    def _make(self, name: str, options: dict[str, int | str]) -> Communicator:
        if name in NVRAR_PEERS:
            return Told(self._group("nvrar", {}), {"algorithm": name, **options})
        if options and hasattr(self._group(name, {}), "all_reduce_with"):
            return Told(self._group(name, {}), options)
        table = self._table
        if options:  # a table that knows nothing else
            shape = tuning.shape_of(self.topology.by_node())
            table = TuningTable({shape: ShapeTimings((Timing(1, Choice(name, options), 1.0),))})
        kind, ranks = BACKENDS.load(name), range(self.world.size)
        backend: CommBackend
        if issubclass(kind, CustomAllReduceBackend):
            backend = over = kind(self.world, self.device, self.topology, table, self._torch)
            group = over.wrap_group(self._under, str(Choice(name, options)), ranks)
        else:
            backend = kind(self.world, self.device, self.topology, table)
            group = backend.group(name, ranks)
        self._opened.append(backend)
        return group

    def close(self) -> None:
        for backend in reversed(self._opened):
            backend.close()


def main() -> int:
    place = detect_launcher()
    try:
        world = join(place.size, WORKER)
        with serving(world):
            take_part(world, None, lambda text: None)
        world.close()
    except YalisError as error:
        return error.exit_code  # rank 0 was told, and says it
    return 0


if __name__ == "__main__":
    sys.exit(main())
