"""What each rank does in the all-reduce benchmark.

All ranks start every operation together. If they share a clock (one machine, even if it emulates several hosts), they
wait for the same moment; across machines they leave a barrier. The time of an operation is the longest of any rank,
from its own start to its own end; on a GPU, until the stream is empty. A CUDA graph holds many operations, like that of
a decode step: they are timed by the GPU's clock after all ranks have started, and the time is divided by their number.

`python -m yalis.study.allreduce.rank` runs a rank that rank 0 started.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from yalis.comm import tuning
from yalis.comm.base import BACKENDS, CommBackend, Communicator
from yalis.comm.custom_allreduce import CustomAllReduceBackend, CustomAllReduceGroup
from yalis.comm.nvrar.transport import gather_transports
from yalis.comm.selection import unusable_on_any_rank
from yalis.comm.topology import Topology
from yalis.comm.torch_dist import TorchBackend, TorchGroup
from yalis.comm.tuning import Choice, ShapeTimings, Timing, TuningTable
from yalis.config import EngineConfig
from yalis.engine.device import rank_device, share_threads
from yalis.errors import YalisError
from yalis.launch.join import join
from yalis.launch.launchers import detect_launcher
from yalis.launch.serving import serving
from yalis.launch.world import World
from yalis.study import bandwidth
from yalis.study.allreduce.benchmark import INEXACT_BACKENDS, WORKER, AllReducePlan, Report, make_row
from yalis.study.allreduce.links import measure_by_pairs, measure_by_ping
from yalis.study.allreduce.registered import RegisteredNcclGroup, find_obstacle
from yalis.study.allreduce.timing import SynchronizedTimer
from yalis.study.allreduce.trial import ExpectedSum, Trial, start_trial
from yalis.study.results import Row
from yalis.study.results.kinds.allreduce import NCCL_REGISTERED, NVRAR_PEERS, PLAIN_GLOO
from yalis.study.topology import shape_of

ROUNDS = 3  # the repeats of all trials are interleaved in so many rounds
MAX_FINALISTS = 6  # options of a backend that --tune measures beyond the first round

Options = dict[str, int | str]


def run_rank(world: World, plan: AllReducePlan | None, report: Report) -> dict[str, Any]:
    """Measure the plan of rank 0 together with the other ranks. Returns rows, parameters, device and notes."""
    plan = AllReducePlan.from_json(world.all_gather_object(asdict(plan) if plan else None)[0])
    world.phase = "measuring"
    config = EngineConfig(device=plan.device, ranks_per_gpu=plan.ranks_per_gpu, ranks_per_node=plan.ranks_per_node)
    device = rank_device(config, world)
    share_threads(config, world, device)
    topology = Topology.of(world, plan.ranks_per_node)
    if plan.equal_nodes:
        shape_of(topology.by_node())
    runner = TrialRunner(world, device, topology)
    try:
        links = runner.measure_links(plan)
        rows = list(runner.run(plan, report))
    finally:
        runner.close()
    nodes = runner.topology.by_node()
    facts = {
        "ranks": world.size,
        "nodes": [list(ranks) for ranks in nodes],
        "shape": tuning.shape_of(nodes),
        "start": "clock" if runner.timer.shared_clock else "barrier",
        "links": [{"delay_us": None, **links}] if links else [],
        "transport": runner.transport,
        "table_key": asdict(runner.key),
    }
    notes = [f"The sums of {name} do not have the same bits on every rank." for name in sorted(runner.unequal)]
    return {"rows": rows, "facts": facts, "device": bandwidth.describe_device(device), "notes": notes}


def _describe_transport(world: World, device: torch.device) -> str | None:
    """Return rank 0's transport between GPUs and why it was chosen; None on CPUs. Every rank calls this."""
    if device.type == "cpu":
        return None
    return str(gather_transports(world, str(torch.cuda.get_device_properties(device).uuid))[0])


class PlainGlooGroup(CustomAllReduceGroup):
    """gloo's own all-reduce at every size, as torch.distributed offers it."""

    def all_reduce(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        target = x if out is None else out.copy_(x)
        self.torch_group._group.allreduce([target]).wait()
        return target


class FixedOptionsGroup(CustomAllReduceGroup):
    """A group that does every all-reduce with given options instead of those from the tuning table."""

    def __init__(self, group: Any, options: Options) -> None:
        super().__init__(group.torch_group)
        self._group, self._options, self.capturable = group, options, group.capturable

    def all_reduce(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        total: Tensor = self._group.all_reduce_with(x, x if out is None else out, **self._options)
        return total

    def workspace(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        if self._options.get("algorithm") != "nvshmem":
            return super().workspace(shape, dtype, device)
        symmetric: Tensor = self._group.symmetric_tensor(shape, dtype)
        return symmetric


Candidates = list[tuple[Choice, str, Trial]]  # choice, mode, trial


def _pick_finalists(candidates: Candidates) -> Iterator[tuple[Choice, str, Trial]]:
    """Yield the fastest options of each backend and mode, by their best time: disturbances only add time.

    The times, and so the choice, are the same on all ranks."""
    for key in dict.fromkeys((choice.backend, mode) for choice, mode, _ in candidates):
        group = [one for one in candidates if (one[0].backend, one[1]) == key and not one[2].error]
        yield from sorted(group, key=lambda one: min(one[2].seconds, default=0.0))[:MAX_FINALISTS]


class TrialRunner:
    """Runs the trials of all backends on the same ranks, and keeps their groups."""

    def __init__(self, world: World, device: torch.device, topology: Topology) -> None:
        self.world, self.device, self.topology = world, device, topology
        self._table = tuning.load_on_all_ranks(world, device)
        self.key = tuning.find_key(world, device)
        self.transport = _describe_transport(world, device)
        self._torch = TorchBackend(world, device, topology, self._table)
        self._backends: list[CommBackend] = [self._torch]
        torch_group = self._torch.group("allreduce", range(world.size))
        assert isinstance(torch_group, TorchGroup)
        self._torch_group = torch_group
        self._groups: dict[str, Communicator] = {"torch": torch_group}
        if device.type == "cpu":
            self._groups[PLAIN_GLOO] = PlainGlooGroup(torch_group)
        self._registered: RegisteredNcclGroup | None = None
        self.timer = SynchronizedTimer(world, torch_group)
        self.unequal: set[str] = set()  # backends whose ranks ended with different bits

    def run(self, plan: AllReducePlan, report: Report) -> Iterator[Row]:
        names = self._choose_backends(plan)
        for dtype in plan.dtypes:
            for size in plan.sizes:
                yield from self._run_size(names, dtype, size, plan, report)

    def _run_size(self, names: list[str], dtype: str, size: int, plan: AllReducePlan, report: Report) -> Iterator[Row]:
        """Measure all backends for one size, interleaved, so that a machine that slows down slows all of them."""
        torch_dtype: torch.dtype = getattr(torch, dtype)
        seed = f"{plan.seed}/{dtype}/{size}"
        length = size // torch_dtype.itemsize
        expected = ExpectedSum.draw(seed, self.world.rank, self.world.size, length, torch_dtype)
        started = [
            (
                Choice(name, options),
                mode,
                start_trial(self.world, self.timer, group, expected, mode, self.device, name not in INEXACT_BACKENDS),
            )
            for name in names
            for options in (self._candidate_options(name, size) if plan.tune else [{}])
            for group in [self._group(name, options)]
            for mode in self._modes(group, plan.tune)
        ]
        candidates: Candidates = [(choice, mode, trial) for choice, mode, trial in started if isinstance(trial, Trial)]
        repeats = plan.repeats_of(size)
        for round_index in range(ROUNDS):
            # Rounded up, so that the first round, which picks the finalists, has at least one repeat.
            count = -(-repeats * (round_index + 1) // ROUNDS) - -(-repeats * round_index // ROUNDS)
            for choice, mode, trial in candidates:
                report(f"{size / 1024:g} KB of {dtype}: {choice}, {mode}, round {round_index + 1} of {ROUNDS}")
                short = plan.tune and mode == "graph" and round_index == 0  # a graph holds many operations
                trial.measure(*((2, 4) if short else (min(plan.warmup, max(2, count)), count)))
            candidates = list(_pick_finalists(candidates))
        for choice, mode, outcome in started:
            measured: tuple[str | None, int, list[float]]
            if isinstance(outcome, Trial):
                measured = (outcome.error, outcome.checked, outcome.seconds)
                if not outcome.ranks_equal:
                    self.unequal.add(choice.backend)
            else:
                measured = (outcome, 0, [])
            yield make_row(choice.backend, dict(choice.options), dtype, size, mode, self.world.size, *measured)

    def _modes(self, group: Communicator, tune: bool) -> tuple[str, ...]:
        """Return the modes to measure. --tune measures what a decode step uses: a graph where the backend allows it."""
        if self.device.type == "cpu" or not group.capturable:
            return ("eager",)
        return ("graph",) if tune else ("eager", "graph")

    def measure_links(self, plan: AllReducePlan) -> dict[str, Any]:
        """Measure the links for the cost model. Returns nothing if they cannot be measured."""
        if self.device.type == "cpu":
            return measure_by_ping(self.world, self.topology, self._torch_group)
        if "nvrar" not in self._choose_backends(plan):
            return {}
        self._group("nvrar", {})
        (backend,) = (backend for backend in self._backends if backend.name == "nvrar")
        return measure_by_pairs(self.world, self.topology, backend, self.timer)

    def _choose_backends(self, plan: AllReducePlan) -> list[str]:
        """Return the backends of the plan; by default all usable ones and their peers, except auto."""
        names = list(plan.backends)
        if not names:
            usable = [name for name in BACKENDS.names() if name != "auto" and self._find_obstacle(name) is None]
            peer = PLAIN_GLOO if self.device.type == "cpu" else NCCL_REGISTERED
            names = [*([peer] if self._find_obstacle(peer) is None else []), *usable]
            names += NVRAR_PEERS if "nvrar" in usable else ()
        for name in names:
            if reason := self._find_obstacle(name):
                raise YalisError(f"backend {name!r} cannot be measured here: {reason}; leave it out")
        return names

    def _find_obstacle(self, name: str) -> str | None:
        """Return why a backend cannot be used here, or None."""
        if name == NCCL_REGISTERED:
            return find_obstacle(self.world, self.device)
        if name == PLAIN_GLOO:
            return None if self.device.type == "cpu" else f"gloo needs CPUs, and these ranks use {self.device.type}"
        return unusable_on_any_rank("nvrar" if name in NVRAR_PEERS else name, self.world, self.device)

    def _candidate_options(self, name: str, size: int) -> list[Options]:
        """Return the options of a backend that --tune tries for this size; [{}] if it has none."""
        if name in (PLAIN_GLOO, NCCL_REGISTERED, "nvshmem"):
            return [{}]
        if name == "nvrar" or name in NVRAR_PEERS:
            group: Any = self._group("nvrar", {})
            options: list[Options] = group.candidate_options(size, name)
            return options
        candidate_options = getattr(BACKENDS.load(name), "candidate_options", None)
        return list(candidate_options(size)) if candidate_options else [{}]

    def _group(self, name: str, options: Options) -> Communicator:
        """Return a backend's group, which uses these options if there are any."""
        key = str(Choice(name, options))
        if key not in self._groups:
            self._groups[key] = self._make_group(name, options)
        return self._groups[key]

    def _make_group(self, name: str, options: Options) -> Communicator:
        if name == NCCL_REGISTERED:
            self._registered = RegisteredNcclGroup(self._torch_group, self.device)
            return self._registered
        if name in NVRAR_PEERS:
            return FixedOptionsGroup(self._group("nvrar", {}), {"algorithm": name, **options})
        if options and hasattr(self._group(name, {}), "all_reduce_with"):
            return FixedOptionsGroup(self._group(name, {}), options)
        table = self._table
        if options:  # a table with these options for every size
            shape = tuning.shape_of(self.topology.by_node())
            table = TuningTable({shape: ShapeTimings((Timing(1, Choice(name, options), 1.0),))})
        backend_class, ranks = BACKENDS.load(name), range(self.world.size)
        backend: CommBackend
        if issubclass(backend_class, CustomAllReduceBackend):
            backend = custom = backend_class(self.world, self.device, self.topology, table, self._torch)
            group = custom.wrap_group(self._torch_group, str(Choice(name, options)), ranks)
        else:
            backend = backend_class(self.world, self.device, self.topology, table)
            group = backend.group(name, ranks)
        self._backends.append(backend)
        return group

    def close(self) -> None:
        if self._registered is not None:
            self._registered.close()
        for backend in reversed(self._backends):
            backend.close()


def main() -> int:
    try:
        world = join(detect_launcher().size, WORKER)
        with serving(world):
            run_rank(world, None, lambda text: None)
        world.close()
    except YalisError as error:
        return error.exit_code  # rank 0 reports it
    return 0


if __name__ == "__main__":
    sys.exit(main())
