"""The step loop: schedule, launch, commit."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from yalis.config import EngineConfig
from yalis.engine.runner import PendingStep
from yalis.engine.team import RankReport, RemoteStep, Team
from yalis.engine.watch import Watched
from yalis.errors import YalisFailure
from yalis.log import get_logger
from yalis.scheduling.plan import Emitted
from yalis.scheduling.request import Request
from yalis.scheduling.scheduler import Scheduler, SchedulerConfig
from yalis.spec import ModelSpec
from yalis.types import FinishReason, SamplingParams

log = get_logger(__name__)


@dataclass
class EngineStats:
    """Counted since the engine began."""

    steps: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    preemptions: int = 0  # requests that lost their KV blocks and were computed anew
    schedule_seconds: float = 0.0  # host time spent planning and committing
    launch_seconds: float = 0.0  # host time spent building batches and launching them; on a CPU, running them
    graph_bytes: int = 0  # of its GPU, kept by recorded steps; those of one rank of each replica


class Engine:
    """One replica of a model: requests in, tokens out. Knows token ids, never text."""

    def __init__(self, config: EngineConfig, spec: ModelSpec, team: Team, eos: frozenset[int]) -> None:
        self.team, self.runner = team, team.runner
        # On a GPU the host plans the next step while this one runs; a CPU has nothing to overlap with. In a pipeline
        # there is a step for every stage, and a sequence waits for its token to come back from the last.
        piped = config.pp > 1
        on_gpu = self.runner.device.type == "cuda"
        self.scheduler = Scheduler(
            SchedulerConfig(
                max_num_seqs=config.max_num_seqs,
                max_batch_tokens=config.max_batch_tokens,
                max_model_len=self.runner.max_model_len,
                block_size=self.runner.block_size,
                max_outstanding=config.micro_batches or config.pp if piped else 2 if on_gpu else 1,
                feed_on_device=on_gpu and not piped,
                recompute_at=spec.rope.switch_at,
                prefix_reuse=config.prefix_reuse,
                spread=piped,
            ),
            self.runner.num_blocks,
        )
        self.eos = eos
        self.stats = EngineStats(graph_bytes=self.runner.graphs.nbytes)
        self._launched: deque[PendingStep | RemoteStep] = deque()
        self._early: list[Emitted] = []  # by steps that somebody waited for outside of step()
        self._broken: str | None = None
        self._next_id = 0

    @property
    def device(self) -> torch.device:
        return self.runner.device

    @property
    def max_model_len(self) -> int:
        return self.runner.max_model_len

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or bool(self._launched or self._early)

    def add(self, prompt: list[int], params: SamplingParams, request_id: int | None = None) -> Request:
        """Queue a request; `params.seed` must be set. Whoever gives one id gives them all."""
        request = Request(self._next_id if request_id is None else request_id, prompt, params, self.eos)
        self.scheduler.add(request)
        self._next_id += 1
        self.stats.prompt_tokens += len(prompt)
        return request

    def cancel(self, request_id: int) -> list[Emitted]:
        return self.scheduler.cancel(request_id)

    def finish(self, request_id: int, reason: FinishReason = "stop") -> bool:
        return self.scheduler.finish(request_id, reason)

    def step(self) -> list[Emitted]:
        """Launch what may be launched, then wait for the oldest step's tokens.

        A step that fails ends the engine: what the device holds is then unknown.
        """
        with self._ending_with_a_failed_step():
            return self._step()

    @contextlib.contextmanager
    def _ending_with_a_failed_step(self) -> Iterator[None]:
        if self._broken is not None:
            raise YalisFailure(f"this model stopped working in an earlier step ({self._broken}); load it anew")
        world = self.team.world
        try:
            yield
        except BaseException as error:
            # Another rank's end shows here as a collective that broke.
            if isinstance(error, Exception) and (failure := world.explain(error)) is not None:
                self._broken = str(failure)
                log.debug("%s", error)
                raise failure from None
            self._broken = (str(error).strip() or type(error).__name__).splitlines()[0]
            if world.rank == 0:  # elsewhere whoever serves says it, with the traceback
                world.fail(self._broken)
            raise

    def _step(self) -> list[Emitted]:
        if self._early:
            early, self._early = self._early, []
            return early
        while True:
            begin = time.perf_counter()
            plan = self.scheduler.schedule()
            self.stats.schedule_seconds += time.perf_counter() - begin
            if plan is None:
                break
            begin = time.perf_counter()
            self._launched.append(self.team.launch(plan))
            self.stats.launch_seconds += time.perf_counter() - begin
            self.stats.steps += 1
        if not self._launched:
            return []
        return self._commit_oldest()

    def _commit_oldest(self) -> list[Emitted]:
        output = self._launched.popleft().result()
        begin = time.perf_counter()
        emitted = self.scheduler.commit(output)
        self.stats.schedule_seconds += time.perf_counter() - begin
        self.stats.output_tokens += sum(item.token is not None for item in emitted)
        self.stats.preemptions = self.scheduler.counters.preemptions
        return emitted

    def set_micro_batches(self, count: int) -> None:
        """How many steps are on their way through the pipeline at a time, from now on."""
        self.scheduler.config = replace(self.scheduler.config, max_outstanding=count)

    def reports(self) -> list[RankReport]:
        """What each rank holds and did; not while requests run."""
        if self.scheduler.num_running or self.scheduler.num_waiting:
            raise ValueError("reports are asked for between requests")
        self.settle()
        return self.team.reports()

    def watch(self) -> None:
        """Every rank watches its steps from the next one on. Those on their way come to their end first."""
        self._finish_launched()
        self.team.watch()

    def rest(self) -> list[Watched]:
        """End the watch, when what was launched is done; what each rank saw."""
        self._finish_launched()
        return self.team.rest()

    def _finish_launched(self) -> None:
        with self._ending_with_a_failed_step():
            while self._launched:
                self._early += self._commit_oldest()

    def settle(self) -> None:
        """Wait for the steps that are on their way; what they give is dropped, since nobody waits for it any more."""
        while self._launched:
            self.scheduler.commit(self._launched.popleft().result())

    def close(self) -> None:
        if self._broken is None and self.team.world.failure is None:
            with contextlib.suppress(YalisFailure):  # a rank that dies now has done its work
                self.settle()
        self.team.close()
