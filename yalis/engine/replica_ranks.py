"""The ranks that run one replica of the model, and how a step plan reaches each of them.

Every rank of a replica holds one shard of the model (tensor parallelism) of one stage (pipeline parallelism). One of
them, the driver, also runs the scheduler. A step goes through the ranks like this:

1. The driver's `launch(plan)` encodes the StepPlan (scheduling/wire.py sends only what changed since the last plan) and
   sends ["plan", encoded] to each other rank: over TCP links of its own to up to eight ranks, through a tree to more
   (launch/fan_out.py). It then launches the step on its own runner.
2. Each other rank runs `serve()`: it receives the message, decodes the plan and launches the step on its own runner.
   Activations and partial sums travel in the runner's collectives and sends, never over these links.
3. The ranks of the last pipeline stage sample the tokens and all get the same ones. If the driver is in that stage it
   reads them from its own runner. Otherwise one rank of the last stage, the reporter, sends the encoded StepOutput over
   its direct link to the driver, whose `RemoteStep.result()` receives it.

The same connections carry requests for memory and timing reports, and the start and end of profiling.
"""

from __future__ import annotations

import contextlib
import json
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch

from yalis.checkpoint.base import Checkpoint
from yalis.comm.base import CommBackend
from yalis.comm.selection import open_backend
from yalis.comm.topology import Topology
from yalis.config import EngineConfig
from yalis.engine.device import rank_device, resolve_dtype, share_threads
from yalis.engine.expert_choice import choose_experts
from yalis.engine.oom import check_host_memory
from yalis.engine.runner import PendingStep, Runner
from yalis.engine.step_profiler import RankProfile, StepInfo
from yalis.errors import PeerLost, YalisError, YalisFailure, describe_error
from yalis.launch.fan_out import FanOut
from yalis.launch.heartbeat import CONNECTING, IDLE, LOADING, WARMING_UP
from yalis.launch.link import Link
from yalis.launch.world import World
from yalis.log import get_logger
from yalis.parallel.pipeline import Stage
from yalis.parallel.plan import Grid, Split
from yalis.sampling.grammar import GrammarCompiler, installed_version
from yalis.scheduling.plan import StepOutput, StepPlan
from yalis.scheduling.wire import PlanDecoder, PlanEncoder, decode_output, encode_output
from yalis.spec import ModelSpec

log = get_logger(__name__)


def agree(world: World, config: EngineConfig | None) -> EngineConfig | None:
    """Return rank 0's settings, or None if rank 0 creates no engine. All ranks call this.

    A rank that passes its own settings must pass the same ones as rank 0, else every rank raises YalisError.
    """
    settings = _agreed(world, None if config is None else asdict(config))
    return None if settings is None else EngineConfig(**settings)


def agree_on_model(world: World, checkpoint: Checkpoint, eos: frozenset[int] | None) -> frozenset[int]:
    """Check that every rank opened the same checkpoint, and return rank 0's end-of-sequence token ids."""
    versions = {"torch": torch.__version__, "llguidance": installed_version()}
    _agreed(world, {**versions, "the checkpoint's fingerprint": checkpoint.fingerprint()})
    return frozenset(world.broadcast_object(None if eos is None else sorted(eos)))


def _agreed(world: World, values: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return rank 0's values; raise YalisError if another rank has different ones. Ranks that pass None are skipped."""
    values = json.loads(json.dumps(values))  # tuples become lists, as in the values that other ranks receive
    expected, difference = world.reduce_object(values, partial(_compare, world))
    if difference is not None:
        raise YalisError(difference)
    agreed: dict[str, Any] | None = expected
    return agreed


def _compare(world: World, by_rank: list[dict[str, Any] | None]) -> tuple[dict[str, Any] | None, str | None]:
    """Return rank 0's values, and a sentence about the first rank that has others."""
    expected = by_rank[0]
    if expected is None:
        return None, None
    for rank, found in enumerate(by_rank):
        for name, value in expected.items():
            if found is not None and found[name] != value:
                return expected, (
                    f"the ranks do not agree: {name} is {found[name]!r} on {world.name(rank)} and {value!r} on "
                    f"{world.name(0)}; start every rank with the same command, versions and files"
                )
    return expected, None


@dataclass(frozen=True)
class RankReport:
    """Memory and time of one rank, counted since it was loaded."""

    rank: int
    weight_bytes: int
    kv_bytes: int
    bytes_read: int  # from the checkpoint
    expert_pairs: int  # of a token and an expert that this rank multiplied; counted with expert parallelism only
    busy_seconds: float  # host time to pack, launch and sample steps; on a CPU this includes the computation
    waiting_seconds: float  # host time spent waiting for the previous pipeline stage


class RemoteStep:
    """A launched step whose tokens are sampled on another rank; `result()` waits for them."""

    def __init__(self, reporter: Link) -> None:
        self._reporter = reporter

    def result(self) -> StepOutput:
        return decode_output(self._reporter.receive())


class ReplicaRanks:
    """This rank's view of its replica: the driver launches steps on all ranks, the other ranks `serve()` it."""

    def __init__(
        self,
        world: World,
        config: EngineConfig,
        spec: ModelSpec,
        checkpoint: Checkpoint,
        eos: frozenset[int],
        open_comm: Callable[[World, torch.device, Topology], CommBackend] | None = None,
        grammars: GrammarCompiler | None = None,
    ) -> None:
        """Connect the ranks and load this rank's part of the model. All ranks of the world call this together.

        `grammars` compiles structured outputs. `open_comm` opens the communication backend; by default the one that
        `config.allreduce` names.
        """
        self.world = world
        device = rank_device(config, world)
        self.split = self._choose_split(config, spec, checkpoint.label, device)
        coords = self.split.coords(world.rank)
        share_threads(config, world, device)
        check_host_memory(world, config, spec, self.split, device, checkpoint.label)
        self._comm: CommBackend | None = None
        grid, stage = Grid(), Stage()
        if world.size > 1:
            world.phase = CONNECTING
            topology = Topology.of(world, config.ranks_per_node)
            try:
                self._comm = (open_comm or partial(open_backend, config.allreduce))(world, device, topology)
                log.info("%s over %s, joined by %s", self.split, topology, self._comm.name)
                grid = Grid.open(self.split, world.rank, self._comm)
                stage = Stage.open(self.split, world.rank, self._comm)
            except RuntimeError as error:  # raised by torch or MPI, usually because another rank died
                raise PeerLost(f"the ranks could not be connected ({describe_error(error)})") from error
        world.phase = LOADING
        driver = self.split.driver(coords.replica)
        ranks = range(driver, driver + self.split.per_replica)

        def min_over_ranks(blocks: int) -> int:
            """Return the KV blocks that fit on every rank: a block holds the same tokens on all of them."""
            by_rank = world.all_gather_object(blocks)
            return min(by_rank[rank] for rank in ranks)

        try:
            check = self._comm.check if self._comm is not None else lambda: None

            @contextlib.contextmanager
            def reading() -> Iterator[None]:
                with world.progress.reading(lambda: checkpoint.bytes_read):
                    yield
                world.phase = WARMING_UP

            self.runner = Runner(
                config, spec, checkpoint, eos, device, grid, stage, min_over_ranks, check, reading, grammars
            )
            self._fan_out = world.open_fan_out(driver) if world.size > 1 else FanOut({}, None, ())
            self._links = self._fan_out.links
        except BaseException:
            if self._comm is not None and world.failure is not None:
                self._comm.close()
            raise
        self._bytes_read = checkpoint.bytes_read
        self.is_driver = world.rank == driver
        self._reporter = self.split.reporter(coords.replica)
        self._encoder, self._decoder = PlanEncoder(), PlanDecoder()
        world.phase = "running" if world.rank else IDLE  # rank 0 is "running" only during calls of the user

    def _choose_split(self, config: EngineConfig, spec: ModelSpec, label: str, device: torch.device) -> Split:
        """Return the split that rank 0 chose. All ranks of the world call this."""
        itemsize = resolve_dtype(config.dtype, spec.dtype, device).itemsize
        choice = choose_experts(config, spec, label, itemsize, device.type == "cuda")
        if not choice.reason:
            return choice.split
        log.info("experts: %s", choice.reason)
        return replace(choice.split, expert_parallel=self.world.broadcast_object(choice.split.expert_parallel))

    # On the driver

    def launch(self, plan: StepPlan) -> PendingStep | RemoteStep:
        """Launch the step on every rank. On a GPU this returns before the step has run."""
        if self._links:
            self._fan_out.send(["plan", self._encoder.encode(plan)])
        pending = self.runner.launch(plan)
        return RemoteStep(self._links[self._reporter]) if pending is None else pending

    def result(self, step: PendingStep | RemoteStep) -> StepOutput:
        """Wait for the tokens of a launched step.

        Counted as a wait: on GPUs a device may hang in a collective with another one, and which of them holds it up is
        not known.
        """
        with self.world.progress.waiting():
            return step.result()

    def reports(self) -> list[RankReport]:
        """Return a report of each rank of this replica. No step may be in flight."""
        self._fan_out.send(["report"])
        return [self._report(), *(RankReport(**self._receive(link)) for link in self._links.values())]

    def start_profiling(self) -> Sequence[StepInfo]:
        """Start the profiler of every rank; returns the growing list of steps. No step may be in flight."""
        self._fan_out.send(["start_profiling"])
        steps = self.runner.profiler.start()
        for link in self._links.values():
            self._receive(link)
        return steps

    def stop_profiling(self) -> list[RankProfile]:
        """Stop the profiler of every rank; returns what each recorded, driver first. No step may be in flight."""
        self._fan_out.send(["stop_profiling"])
        return [
            self.runner.profiler.stop(),
            *(RankProfile.from_json(self._receive(link)) for link in self._links.values()),
        ]

    def close(self) -> None:
        """Close this rank's links and communicators; on the driver, end serve() on the other ranks first."""
        if self.is_driver and self.world.failure is None:
            with contextlib.suppress(YalisFailure):  # a rank that dies now has no work left
                self._fan_out.send(["end"])
        self._fan_out.close()
        if self._comm is not None:
            if self.world.failure is None:
                self.runner.executor.release_graphs()  # CUDA graphs keep communicators alive, so they go first
            self._comm.close()

    def _receive(self, link: Link) -> Any:
        """Wait for the answer of another rank."""
        with self.world.progress.waiting():
            return link.receive()

    # On the other ranks

    def serve(self) -> None:
        """Launch the driver's steps, in order, until it sends "end"."""
        (driver,) = self._links.values()
        progress = self.world.progress
        on_gpu = self.runner.device.type == "cuda"
        unreported: deque[PendingStep] = deque()
        while True:
            # Waiting for tokens would delay the next launch on a GPU, so plans that have arrived go first. On a CPU
            # launch() has computed the tokens already.
            while unreported and not (on_gpu and self._fan_out.poll(0)):
                with progress.step():
                    driver.send(encode_output(self.result(unreported.popleft())))
            with progress.waiting():
                message, *arguments = self._fan_out.receive()
            if message == "end":
                return
            with progress.step():
                if message == "plan":
                    pending = self.runner.launch(self._decoder.decode(arguments[0]))
                    if pending is not None and self.world.rank == self._reporter:
                        unreported.append(pending)
                elif message == "report":
                    driver.send(asdict(self._report()))
                elif message == "start_profiling":
                    self.runner.profiler.start()
                    driver.send("started")
                else:
                    assert message == "stop_profiling"
                    driver.send(asdict(self.runner.profiler.stop()))

    def _report(self) -> RankReport:
        runner = self.runner
        return RankReport(
            self.world.rank, runner.weight_bytes, runner.pool.nbytes, self._bytes_read,
            runner.expert_load.own_pairs(), runner.times.busy, runner.times.waiting,
        )  # fmt: skip
