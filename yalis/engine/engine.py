"""The step loop: schedule, launch, commit."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch

from yalis.config import EngineConfig
from yalis.engine.replica_ranks import RankReport, RemoteStep, ReplicaRanks
from yalis.engine.runner import PendingStep
from yalis.engine.step_profiler import RankProfile, StepInfo
from yalis.errors import YalisFailure, describe_error
from yalis.log import get_logger
from yalis.scheduling.plan import Emitted
from yalis.scheduling.request import Request
from yalis.scheduling.scheduler import Scheduler
from yalis.scheduling.settings import scheduler_settings
from yalis.spec import ModelSpec
from yalis.types import FinishReason, SamplingParams

log = get_logger(__name__)

#: Seconds between two copies of the expert load from a GPU while requests run.
EXPERT_LOAD_AGE = 0.1


@dataclass
class EngineStats:
    """Counters since the engine was created, and what it holds now."""

    steps: int = 0
    replayed_steps: int = 0  # on the first rank of each replica
    padding_tokens: int = 0  # computed in replayed steps only to fill up a recorded size
    prompt_tokens: int = 0
    output_tokens: int = 0
    preemptions: int = 0  # requests that lost their KV blocks and were recomputed
    schedule_seconds: float = 0.0  # host time spent in schedule() and commit()
    launch_seconds: float = 0.0  # host time spent building batches and launching them; on a CPU, running them
    graph_bytes: int = 0  # GPU memory held by CUDA graphs, on one rank of each replica
    prefix_query_tokens: int = 0  # prompt tokens that were looked up in the prefix cache
    prefix_hit_tokens: int = 0  # of these, tokens found in it
    running: int = 0  # requests now
    waiting: int = 0
    used_blocks: int = 0  # KV blocks of these requests
    blocks: int = 0  # KV blocks in total
    #: With expert parallelism: pairs of a token and an expert that each rank multiplied, for the ranks of the first
    #: pipeline stage of each replica. On a GPU the copy may be EXPERT_LOAD_AGE seconds old while requests run.
    expert_load: list[int] = field(default_factory=list)

    @property
    def replayed_share(self) -> float:
        """Share of the steps that were replayed."""
        return self.replayed_steps / self.steps if self.steps else 0.0

    @property
    def mean_padding(self) -> float:
        """Mean padding tokens of a replayed step."""
        return self.padding_tokens / self.replayed_steps if self.replayed_steps else 0.0

    @property
    def expert_imbalance(self) -> float:
        """The largest load of a rank over the mean, 1.0 if all are equal or none is counted."""
        total = sum(self.expert_load)
        return max(self.expert_load) * len(self.expert_load) / total if total else 1.0


class Engine:
    """One replica of a model: token ids of requests in, generated token ids out."""

    def __init__(self, config: EngineConfig, spec: ModelSpec, ranks: ReplicaRanks, eos: frozenset[int]) -> None:
        self.ranks, self.runner = ranks, ranks.runner
        runner, on_gpu = self.runner, self.runner.device.type == "cuda"
        settings = scheduler_settings(config, spec, on_gpu, runner.max_model_len, runner.block_size)
        self.scheduler = Scheduler(settings, runner.num_blocks)
        self.eos = eos
        self._stats = EngineStats(blocks=runner.num_blocks, graph_bytes=self.runner.executor.graph_bytes)
        self._launched: deque[PendingStep | RemoteStep] = deque()
        self._early: list[Emitted] = []  # from steps that were committed outside of step()
        self._broken: str | None = None
        self._next_id = 0

    @property
    def stats(self) -> EngineStats:
        stats, scheduler, executor = self._stats, self.scheduler, self.runner.executor
        stats.replayed_steps, stats.padding_tokens = executor.replays, executor.padding_tokens
        stats.preemptions = scheduler.counters.preemptions
        stats.prefix_query_tokens = scheduler.counters.prompt_query_tokens
        stats.prefix_hit_tokens = scheduler.counters.prompt_hit_tokens
        stats.running, stats.waiting = scheduler.num_running, scheduler.num_waiting
        stats.used_blocks = scheduler.blocks.in_use
        stats.expert_load = self.runner.expert_load.by_rank(EXPERT_LOAD_AGE if self.has_work else 0.0)
        return stats

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
        """Queue a request; `params.seed` must be set. A caller that passes a request id must pass one every time."""
        request = Request(self._next_id if request_id is None else request_id, prompt, params, self.eos)
        self.scheduler.add(request)
        self._next_id += 1
        self._stats.prompt_tokens += len(prompt)
        return request

    def cancel(self, request_id: int) -> list[Emitted]:
        return self.scheduler.cancel(request_id)

    def finish(self, request_id: int, reason: FinishReason = "stop") -> bool:
        return self.scheduler.finish(request_id, reason)

    def step(self) -> list[Emitted]:
        """Launch every step that can be scheduled, then wait for the oldest one and return its tokens.

        A step that fails breaks the engine, because the contents of the KV cache are then unknown.
        """
        with self._breaking_on_error():
            return self._step()

    @contextlib.contextmanager
    def _breaking_on_error(self) -> Iterator[None]:
        if self._broken is not None:
            raise YalisFailure(f"this model failed in an earlier step ({self._broken}); create a new LLM")
        world = self.ranks.world
        try:
            yield
        except BaseException as error:
            if world.rank:  # its serve loop reports the error
                self._broken = describe_error(error)
                raise
            # The failure of another rank shows up here as a failed collective or link; abort() finds its reason.
            reason = world.abort(error)
            self._broken = describe_error(reason)
            if reason is error:
                raise
            log.debug("%s", error)
            raise reason from reason.__cause__

    def _step(self) -> list[Emitted]:
        if self._early:
            emitted, self._early = self._early, []
            return emitted
        while True:
            begin = time.perf_counter()
            plan = self.scheduler.schedule()
            self._stats.schedule_seconds += time.perf_counter() - begin
            if plan is None:
                break
            begin = time.perf_counter()
            self._launched.append(self.ranks.launch(plan))
            self._stats.launch_seconds += time.perf_counter() - begin
            self._stats.steps += 1
        if not self._launched:
            return []
        return self._commit_oldest()

    def _commit_oldest(self) -> list[Emitted]:
        output = self.ranks.result(self._launched.popleft())
        begin = time.perf_counter()
        emitted = self.scheduler.commit(output)
        self._stats.schedule_seconds += time.perf_counter() - begin
        self._stats.output_tokens += sum(item.token is not None for item in emitted)
        return emitted

    def set_micro_batches(self, count: int) -> None:
        """Set how many steps may be in flight at once from now on."""
        self.scheduler.config = replace(self.scheduler.config, max_in_flight=count)

    def reports(self) -> list[RankReport]:
        """Return memory and timing of each rank; only while no request is running."""
        if self.scheduler.num_running or self.scheduler.num_waiting:
            raise ValueError("rank reports are available only between requests")
        self.drain()
        return self.ranks.reports()

    def start_profiling(self) -> Sequence[StepInfo]:
        """Profile the next steps on every rank, once the steps in flight have finished.

        Returns the list to which every launched step is appended.
        """
        self._finish_launched()
        return self.ranks.start_profiling()

    def stop_profiling(self) -> list[RankProfile]:
        """Wait for the steps in flight, stop profiling, and return what each rank recorded."""
        self._finish_launched()
        return self.ranks.stop_profiling()

    def _finish_launched(self) -> None:
        """Commit the steps in flight; the next step() returns their tokens."""
        with self._breaking_on_error():
            while self._launched:
                self._early += self._commit_oldest()

    def drain(self) -> None:
        """Wait for the steps in flight and discard their tokens: their requests have ended."""
        while self._launched:
            self.scheduler.commit(self.ranks.result(self._launched.popleft()))

    def close(self) -> None:
        if self._broken is None and self.ranks.world.failure is None:
            with contextlib.suppress(YalisFailure):  # a rank that dies now has no work left
                self.drain()
        self.ranks.close()
