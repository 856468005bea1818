"""Lists the splits of a model over nodes, ranks them by a fast estimate, and replays the best on the virtual clock.

Every prediction has an interval from the bounds of the quantities it rests on (intervals.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

from yalis.errors import YalisError, YalisFailure, count_of
from yalis.parallel.plan import Split
from yalis.planner.clock import SimEngine, Simulation, simulate
from yalis.planner.communication import libraries_of
from yalis.planner.compute import ComputeModel
from yalis.planner.efficiency import load_efficiencies
from yalis.planner.estimate import Estimate, estimate
from yalis.planner.expert_times import ASSUMPTIONS, Assumptions
from yalis.planner.intervals import Effect, Interval, interval, prefixes_of
from yalis.planner.job import Capacity, Job, capacity
from yalis.planner.machine import Machine
from yalis.planner.step_time import NO_LIBRARY, StepTimeModel, largest_slices, with_control
from yalis.spec import ModelSpec

#: The `--allreduce` of the libraries that have another name there.
_BACKENDS = {"nccl": "torch", "gloo": "torch"}
#: Libraries that no backend runs: predicted only if --allreduce names them.
_NOT_RUN = ("nvrar-published",)
#: Candidates that are replayed on the virtual clock.
REPLAYED = 5


@dataclass(frozen=True)
class Choices:
    """What the search may choose from; None leaves the choice to it."""

    grid: tuple[int, int] | None = None  # rows, columns of tensor parallelism
    stages: int | None = None
    replicas: int | None = None
    libraries: tuple[str, ...] | None = None  # by their own names or as --allreduce
    expert_parallel: bool | None = None  # whole experts on each row of a grid, instead of slices of every expert


@dataclass(frozen=True)
class Slo:
    """Service-level objectives in seconds: for 90% of the requests. None: no limit."""

    ttft: float | None = None
    itl: float | None = None

    def met(self, ttft: float, itl: float) -> bool:
        return (self.ttft is None or ttft <= self.ttft) and (self.itl is None or itl <= self.itl)


ANY_SPLIT = Choices()
NO_SLO = Slo()


@dataclass(frozen=True)
class Candidate:
    """A split on some nodes with a communication library, and the estimate of its times."""

    nodes: int
    split: Split
    library: str
    capacity: Capacity
    estimate: Estimate

    @property
    def scheme(self) -> str:
        """tp, grid, pp, dp, or hybrid for several of them."""
        split = self.split
        tensor = "grid" if split.cols > 1 else "tp" if split.rows > 1 else ""
        names = [name for name in (tensor, "pp" * (split.stages > 1), "dp" * (split.replicas > 1)) if name]
        return names[0] if len(names) == 1 else "hybrid" if names else "one GPU"

    @property
    def gpus(self) -> int:
        return self.split.size

    def score(self, objective: str) -> float:
        """Return the seconds that the objective minimises: of a request, of the job, or of all GPUs together."""
        one = self.estimate
        return {"latency": one.latency, "throughput": one.seconds, "cost": one.seconds * self.gpus}[objective]


@dataclass(frozen=True)
class Replay:
    """A candidate on the virtual clock."""

    candidate: Candidate
    simulation: Simulation
    seconds: Interval
    tokens_per_s: Interval
    ttft: float  # 90th percentile over the requests, in seconds
    itl: float  # likewise
    latency: float  # mean over the requests, from arrival to last token

    def score(self, objective: str) -> float:
        value = self.seconds.value
        return {"latency": self.latency, "throughput": value, "cost": value * self.candidate.gpus}[objective]


class Planner:
    """Predicts a job on the splits of a machine. Compute times are shared by all splits with equal slices."""

    def __init__(self, machine: Machine, job: Job) -> None:
        self.machine, self.job = with_control(machine), job
        #: What predictions assume about experts; nothing for a dense model.
        self.assumptions: Assumptions = {} if job.spec.moe is None else ASSUMPTIONS
        self._slices: dict[Any, _CachedCompute] = {}

    def candidates(self, nodes: Sequence[int], choices: Choices = ANY_SPLIT, slo: Slo = NO_SLO) -> list[Candidate]:
        """Return each split that fits, once with each library, and that meets the objectives; in no order."""
        libraries = self._libraries(choices)
        found: list[Candidate] = []
        tried = 0
        for count in nodes:
            for split in splits(self.job.spec, count * self.machine.gpus_per_node, self.machine.gpus_per_node, choices):
                if split.replicas > len(self.job.requests):
                    continue  # replicas without a request
                tried += 1
                room = capacity(self.job, self.machine, split)
                if not room.fits:
                    continue
                # A single rank sends nothing, so one library stands for all, and none is needed.
                for library in libraries if split.per_replica > 1 else libraries[:1] or [NO_LIBRARY]:
                    found.append(Candidate(count, split, library, room, self.estimate(split, library, room)))
        if not found:
            raise YalisFailure(self._nothing_fits(nodes, tried, bool(libraries)))
        meeting = [one for one in found if slo.met(one.estimate.ttft, one.estimate.itl)]
        if not meeting:
            first = min(found, key=lambda one: one.estimate.ttft).estimate.ttft
            token = min(found, key=lambda one: one.estimate.itl).estimate.itl
            raise YalisFailure(
                f"no split of {self.job.model} on {self.machine.name} meets --slo: the best time to first token is "
                f"{first:.3g} s and the best inter-token latency {token * 1e3:.3g} ms; relax it, or give more --nodes"
            )
        return meeting

    def model(
        self, split: Split, library: str, machine: Machine | None = None, assumptions: Assumptions = ASSUMPTIONS
    ) -> StepTimeModel:
        job, machine = self.job, machine or self.machine
        compute = partial(self._compute, assumptions)
        return StepTimeModel(machine, job.spec, split, job.itemsize, library, compute)

    def estimate(
        self, split: Split, library: str, room: Capacity, machine: Machine | None = None,
        assumptions: Assumptions = ASSUMPTIONS,
    ) -> Estimate:  # fmt: skip
        return estimate(self.job, split, room, self.model(split, library, machine, assumptions))

    def interval(self, candidate: Candidate) -> Interval:
        """Return the estimated seconds of the job with their bounds."""

        def seconds(machine: Machine, assumptions: Assumptions = ASSUMPTIONS) -> float:
            return self.estimate(candidate.split, candidate.library, candidate.capacity, machine, assumptions).seconds

        further = []
        for name, one in self.assumptions.items():
            ends = [
                seconds(self.machine, {**ASSUMPTIONS, name: replace(one, value=value)}) for value in (one.low, one.high)
            ]
            further.append(Effect(f"experts.{name}", *ends))
        error = load_efficiencies(self.machine.gpu.efficiencies).error
        return interval(self.machine, seconds, prefixes_of(candidate.library), error, further)

    def replay(self, candidate: Candidate) -> Replay:
        """Run the job on the virtual clock, with the real scheduler."""
        split, job = candidate.split, self.job
        model = self.model(split, candidate.library)
        sequences = min(job.config.max_num_seqs, -(-len(job.requests) // split.replicas))
        engine = SimEngine(
            job.scheduler(split), candidate.capacity.kv_blocks, model.stages, model.host, model.replayed,
            on_cpu=not job.on_gpu, return_seconds=model.return_seconds(max(1, sequences // split.stages)),
        )  # fmt: skip
        run = simulate(job.requests, engine, split.replicas)
        seconds = self.interval(candidate).around(run.seconds)
        rate = Interval(*(job.output_tokens / end for end in (seconds.value, seconds.high, seconds.low)))
        latency = sum(one.end - one.arrival for one in run.requests) / len(run.requests)
        return Replay(candidate, run, seconds, rate, run.ttft(90), run.itl(90) or 0.0, latency)

    def _compute(
        self, assumptions: Assumptions, machine: Machine, spec: ModelSpec, split: Split, itemsize: int, rank: int = 0
    ) -> Any:
        dims = largest_slices(spec, replace(split, replicas=1), split.coords(rank).stage)[rank]
        assumed = tuple(assumptions.items()) if spec.moe is not None else ()
        key = (machine.gpu, tuple(machine.host.items()), dims, split.rows, split.cols, itemsize, assumed)
        if key not in self._slices:
            # `rank` matters only through `dims`; the other arguments are in the key, or the same for the whole job.
            model = ComputeModel(
                machine, spec, split, itemsize, rank, self.job.config.max_num_seqs, assumptions=assumptions
            )
            self._slices[key] = _CachedCompute(model)
        return self._slices[key]

    def _libraries(self, choices: Choices) -> list[str]:
        known = libraries_of(self.machine)
        if choices.libraries is None:
            return [name for name in known if name not in _NOT_RUN]
        found: list[str] = []
        for name in choices.libraries:
            matching = [library for library in known if name in (library, backend_of(library))]
            if not matching:
                raise YalisError(
                    f"{self.machine.name} has no parameters for the all-reduce {name!r}; give one of "
                    f"{', '.join(known) or 'auto'}, or measure it there with `yalis calibrate`"
                )
            found += matching
        return found

    def _nothing_fits(self, nodes: Sequence[int], tried: int, connected: bool) -> str:
        job, machine = self.job, self.machine
        if not tried:
            return (
                f"{job.model} cannot be split as asked over {count_of(max(nodes), 'node')} of {machine.name} with "
                f"{machine.gpus_per_node} GPUs each; leave out tp=, pp= and dp=, or give other --nodes"
            )
        gpu = machine.gpu.memory_bytes.value / 2**30
        if not connected:
            return (
                f"{job.model} does not run on single GPUs of {machine.name} ({gpu:.0f} GiB), and the machine has no "
                "parameters of a communication library to split it; measure them with `yalis calibrate` on several "
                "ranks, or copy a libraries section into the machine file"
            )
        return (
            f"{job.model} with one sequence of {job.model_len} tokens does not fit {count_of(max(nodes), 'node')} of "
            f"{machine.name} ({machine.gpus_per_node} GPUs of {gpu:.0f} GiB each) on any split; give more --nodes, "
            "a smaller max_batch_tokens= or another machine"
        )


class _CachedCompute:
    """A ComputeModel that remembers the steps it was asked for."""

    def __init__(self, model: ComputeModel) -> None:
        self.step = lru_cache(maxsize=8192)(model.step)


def splits(spec: ModelSpec, gpus: int, gpus_per_node: int, choices: Choices = ANY_SPLIT) -> Iterator[Split]:
    """Yield every split of a model over exactly so many GPUs.

    A tensor-parallel group fills whole nodes, or several of them fill a node, so that all groups are placed alike.
    """
    for per_stage in divisors(gpus):
        if per_stage % gpus_per_node and gpus_per_node % per_stage:
            continue
        for cols in divisors(per_stage):
            for stages in divisors(gpus // per_stage):
                for whole in (False, True) if spec.moe is not None and per_stage > cols else (False,):
                    split = Split(per_stage // cols, cols, stages, gpus // per_stage // stages, whole)
                    if _chosen(split, choices) and is_possible(split, spec):
                        yield split


def backend_of(library: str) -> str:
    """Return the `--allreduce` that uses a library."""
    return _BACKENDS.get(library, library)


def best_libraries(candidates: Sequence[Candidate], objective: str) -> list[Candidate]:
    """Return one candidate per nodes and split, with its fastest library, the best first."""
    best: dict[tuple[int, Split], Candidate] = {}
    for one in sorted(candidates, key=lambda one: (one.score(objective), one.gpus, one.split.per_stage)):
        best.setdefault((one.nodes, one.split), one)
    return list(best.values())


def scaling(candidates: Sequence[Candidate], objective: str) -> list[Candidate]:
    """Return the best candidate of each scheme on each number of nodes."""
    best: dict[tuple[int, str], Candidate] = {}
    for one in sorted(candidates, key=lambda one: one.score(objective)):
        best.setdefault((one.nodes, one.scheme), one)
    return sorted(best.values(), key=lambda one: (one.scheme, one.nodes))


def divisors(number: int) -> list[int]:
    return [count for count in range(1, number + 1) if number % count == 0]


def _chosen(split: Split, choices: Choices) -> bool:
    return (
        choices.grid in (None, (split.rows, split.cols))
        and choices.stages in (None, split.stages)
        and choices.replicas in (None, split.replicas)
        and (choices.expert_parallel in (None, split.expert_parallel) or split.rows == 1)
    )


def is_possible(split: Split, spec: ModelSpec) -> bool:
    """Return whether every rank gets a shard."""
    try:
        split.check(spec, "")
    except YalisError:
        return False
    return True
