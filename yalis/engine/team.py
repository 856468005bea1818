"""The ranks that run one replica of a model: what they settle before the first step, and how steps reach them."""

from __future__ import annotations

import contextlib
import json
from collections import deque
from dataclasses import asdict, dataclass
from typing import Any

import torch

from yalis.checkpoint.base import Checkpoint
from yalis.comm.base import CommBackend
from yalis.comm.selection import open_backend
from yalis.comm.topology import Topology
from yalis.config import EngineConfig
from yalis.engine.device import rank_device, share_threads
from yalis.engine.runner import PendingStep, Runner
from yalis.engine.watch import Watched
from yalis.errors import YalisError, YalisFailure
from yalis.launch.link import Link
from yalis.launch.world import World
from yalis.log import get_logger
from yalis.parallel.pipeline import Stage
from yalis.parallel.plan import Grid, Split
from yalis.scheduling.plan import StepOutput, StepPlan
from yalis.scheduling.wire import PlanDecoder, PlanEncoder, decode_output, encode_output
from yalis.spec import ModelSpec

log = get_logger(__name__)


def split_of(config: EngineConfig) -> Split:
    return Split(*config.tp, config.pp, config.dp)


def agree(world: World, config: EngineConfig | None) -> EngineConfig | None:
    """Rank 0's settings, None where it makes no engine; a rank that brought its own must have the same."""
    ours = _agreed(world, None if config is None else asdict(config))
    return None if ours is None else EngineConfig(**ours)


def agree_on_model(world: World, checkpoint: Checkpoint, eos: frozenset[int] | None) -> frozenset[int]:
    """The tokens that end a text, which rank 0 knows; every rank must see the same model."""
    _agreed(world, {"torch": torch.__version__, "the checkpoint's fingerprint": checkpoint.fingerprint()})
    found = world.exchange(None if eos is None else sorted(eos))[0]
    return frozenset(found)


def _agreed(world: World, facts: dict[str, Any] | None) -> dict[str, Any] | None:
    facts = json.loads(json.dumps(facts))  # as the others will see them
    everyone = world.exchange(facts)
    ours: dict[str, Any] | None = everyone[0]
    for rank, theirs in enumerate(everyone):
        for name, value in ours.items() if ours is not None and theirs is not None else ():
            if theirs[name] != value:
                raise YalisError(
                    f"the ranks do not agree: {name} is {theirs[name]!r} on {world.name(rank)} and {value!r} on "
                    f"{world.name(0)}; start every rank with the same command, versions and files"
                )
    return ours


@dataclass(frozen=True)
class RankReport:
    """What a rank holds and did."""

    rank: int
    weight_bytes: int
    kv_bytes: int
    bytes_read: int  # of the checkpoint
    busy_seconds: float  # computing, where the host can tell: on a CPU
    waiting_seconds: float  # for the stage before


class RemoteStep:
    """A step whose tokens another rank samples; `result()` waits for them."""

    def __init__(self, link: Link) -> None:
        self._link = link

    def result(self) -> StepOutput:
        return decode_output(self._link.receive())


class Team:
    """This rank's part in its replica. The driver launches steps on all of its ranks; the others serve it."""

    def __init__(
        self, world: World, config: EngineConfig, spec: ModelSpec, checkpoint: Checkpoint, eos: frozenset[int]
    ) -> None:
        """Every rank of the world does this at the same time."""
        self.world, self.split = world, split_of(config)
        coords = self.split.coords(world.rank)
        device = rank_device(config, world)
        share_threads(config, world, device)
        self._comm: CommBackend | None = None
        grid, stage = Grid(), Stage()
        if world.size > 1:
            world.phase = "connecting"
            topology = Topology.of(world, config.ranks_per_node)
            self._comm = open_backend(config.allreduce, world, device, topology)
            log.info("%s over %s, joined by %s", self.split, topology, self._comm.name)
            grid = Grid.open(self.split, world.rank, self._comm)
            stage = Stage.open(self.split, world.rank, self._comm)
        world.phase = "loading the model"
        driver = self.split.driver(coords.replica)
        ranks = range(driver, driver + self.split.per_replica)

        def settle(blocks: int) -> int:
            """A block is the same tokens on every rank, so the one with the least room decides."""
            everyone = world.exchange(blocks)
            return min(everyone[rank] for rank in ranks)

        try:
            check = self._comm.check if self._comm is not None else lambda: None
            self.runner = Runner(config, spec, checkpoint, eos, device, grid, stage, settle, check)
        except BaseException:
            if self._comm is not None and world.failure is not None:
                self._comm.close()
            raise
        self._bytes_read = checkpoint.bytes_read
        self.is_driver = world.rank == driver
        self._links = world.links(driver) if world.size > 1 else {}
        self._reporter = self.split.reporter(coords.replica)
        self._encoder, self._decoder = PlanEncoder(), PlanDecoder()
        world.phase = "running" if world.rank else "idle"  # rank 0 runs while its user calls

    # The driver's side

    def launch(self, plan: StepPlan) -> PendingStep | RemoteStep:
        """Start the step on every rank."""
        self._tell(["plan", self._encoder.encode(plan)] if self._links else None)
        pending = self.runner.launch(plan)
        return RemoteStep(self._links[self._reporter]) if pending is None else pending

    def reports(self) -> list[RankReport]:
        """What each rank of this replica holds and did; only while no step is on its way."""
        self._tell(["report"])
        return [self._report(), *(RankReport(**link.receive()) for link in self._links.values())]

    def watch(self) -> None:
        """Every rank begins to watch its steps; only while none is on its way."""
        self._tell(["watch"])
        self.runner.watch.begin()
        for link in self._links.values():
            link.receive()

    def rest(self) -> list[Watched]:
        """Every rank ends its watch; what each of them saw. Only while no step is on its way."""
        self._tell(["rest"])
        return [self.runner.watch.end(), *(Watched.of(link.receive()) for link in self._links.values())]

    def close(self) -> None:
        """Send the other ranks home."""
        if self.is_driver and self.world.failure is None:
            with contextlib.suppress(YalisFailure):  # who dies now has done its work
                self._tell(["end"])
        for link in self._links.values():
            link.close()
        if self._comm is not None:
            if self.world.failure is None:
                self.runner.graphs.forget()  # a communicator waits for the graphs that hold its collectives
            self._comm.close()

    def _tell(self, message: Any) -> None:
        for link in self._links.values():
            link.send(message)

    # The others' side

    def serve(self) -> None:
        """Run the driver's steps until it is done."""
        (driver,) = self._links.values()
        on_gpu = self.runner.device.type == "cuda"
        unreported: deque[PendingStep] = deque()
        while True:
            # A GPU is given the next step before its host waits for the last; on a CPU the tokens are there already.
            while unreported and not (on_gpu and driver.poll(0)):
                driver.send(encode_output(unreported.popleft().result()))
            kind, *rest = driver.receive()
            if kind == "plan":
                pending = self.runner.launch(self._decoder.decode(rest[0]))
                if pending is not None and self.world.rank == self._reporter:
                    unreported.append(pending)
            elif kind == "report":
                driver.send(asdict(self._report()))
            elif kind == "watch":
                self.runner.watch.begin()
                driver.send("watching")
            elif kind == "rest":
                driver.send(asdict(self.runner.watch.end()))
            else:
                return

    def _report(self) -> RankReport:
        runner = self.runner
        return RankReport(
            self.world.rank, runner.weight_bytes, runner.pool.nbytes, self._bytes_read,
            runner.times.busy, runner.times.waiting,
        )  # fmt: skip
