"""The engine on a virtual clock: the real scheduler and router replay requests against modelled step times.

`_Replica` mirrors engine/engine.py: launch every step that can be scheduled, then wait for the oldest one and commit
it. `_Cluster` mirrors engine/replicas.py: rank 0 routes requests between the steps of its own replica, and the other
replicas step at their own pace. Only the executor is replaced: a step takes the seconds that a model gives it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from yalis.errors import YalisError
from yalis.planner.step import SimRequest, StepShape, StepTime
from yalis.scheduling.plan import Emitted, StepOutput
from yalis.scheduling.request import Request
from yalis.scheduling.routing import LOCAL, RequestRouter
from yalis.scheduling.scheduler import Scheduler, SchedulerConfig
from yalis.types import FinishReason, SamplingParams


def _is_decode(shape: StepShape) -> bool:
    return not shape.chunks


@dataclass(frozen=True)
class SimEngine:
    """One replica: its scheduler, its KV blocks, and how long a step takes on devices and host."""

    scheduler: SchedulerConfig
    num_blocks: int
    stage_times: Callable[[StepShape], Sequence[StepTime]]  # one per pipeline stage, one element without a pipeline
    host_seconds: Callable[[StepShape], float]  # of the driver's host per step: schedule, pack, launch, commit
    #: Whether a step is replayed. A replayed step starts on the device once the host has launched it. The kernels of
    #: an eager step run while the host launches further ones, and it ends no earlier than the host.
    replayed: Callable[[StepShape], bool] = _is_decode
    #: Whether launch() computes the first stage before it returns, as on a CPU. Without a pipeline this follows from
    #: the scheduler: only a GPU feeds sampled tokens to the next step.
    on_cpu: bool = False
    return_seconds: float = 0.0  # from the end of the last pipeline stage until the driver has the tokens

    @property
    def blocking(self) -> bool:
        return self.on_cpu or not (self.scheduler.feed_on_device or self.scheduler.pipelined)


@dataclass(frozen=True)
class RequestTimes:
    """When a request arrived, and when its first and its last token were emitted, in seconds from the start."""

    arrival: float
    first_token: float
    end: float
    output_tokens: int
    tag: str = ""

    @property
    def ttft(self) -> float:
        """Time to first token in seconds."""
        return self.first_token - self.arrival

    @property
    def itl(self) -> float | None:
        """Mean inter-token latency in seconds; None if there is only one token."""
        return (self.end - self.first_token) / (self.output_tokens - 1) if self.output_tokens > 1 else None


@dataclass(frozen=True)
class Simulation:
    """The result of a simulated run."""

    seconds: float  # from the start to the last token
    steps: int  # of all replicas together
    requests: tuple[RequestTimes, ...]  # in the order of the given requests
    preemptions: int
    peak_kv_blocks: int  # of the replica that used most
    num_blocks: int  # of one replica
    #: Mean over the devices of all stages and replicas. Its total is `seconds`: a device is idle in pipeline bubbles,
    #: while it waits for its host, and while it has no requests.
    breakdown: StepTime
    moved: int = 0  # requests that were moved to another replica before they started
    host_seconds: float = 0.0  # that the drivers' hosts worked, summed over the replicas

    @property
    def output_tokens(self) -> int:
        return sum(request.output_tokens for request in self.requests)

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens per second."""
        return self.output_tokens / self.seconds

    def ttft(self, percent: float = 50) -> float:
        """Return a percentile of the time to first token over the requests, in seconds."""
        return _percentile([request.ttft for request in self.requests], percent)

    def itl(self, percent: float = 50) -> float | None:
        """Return a percentile of the requests' mean inter-token latency, in seconds; None if all have one token."""
        values = [request.itl for request in self.requests]
        known = [value for value in values if value is not None]
        return _percentile(known, percent) if known else None


def simulate(
    requests: Sequence[SimRequest],
    engine: SimEngine,
    replicas: int = 1,
    on_step: Callable[[int, StepShape], None] | None = None,
) -> Simulation:
    """Run the requests and return when their tokens were emitted.

    `on_step` is called with the replica and the shape of every step when it is launched.
    """
    if not requests:
        raise YalisError("there are no requests to simulate; give at least one")
    if engine.scheduler.prefix_reuse:
        raise YalisError("a simulated prompt has no tokens to look up; give prefix_reuse=False")
    order = sorted(range(len(requests)), key=lambda index: requests[index].arrival)
    arriving = [requests[index] for index in order]
    members = [_Replica(rank, engine, on_step) for rank in range(replicas)]
    log = _Log(len(requests))
    router = None
    if replicas == 1:
        _run_alone(members[0], arriving, log)
    else:
        router = _Cluster(members, arriving, log).run()
    seconds = max(log.last)
    position = {index: place for place, index in enumerate(order)}
    return Simulation(
        seconds=seconds,
        steps=sum(member.steps for member in members),
        requests=tuple(
            RequestTimes(
                request.arrival,
                log.first[position[index]],
                log.last[position[index]],
                log.count[position[index]],
                request.tag,
            )
            for index, request in enumerate(requests)
        ),
        preemptions=sum(member.scheduler.counters.preemptions for member in members),
        peak_kv_blocks=max(member.peak_blocks for member in members),
        num_blocks=engine.num_blocks,
        breakdown=_mean_breakdown(members, seconds),
        moved=router.num_moved if router is not None else 0,
        host_seconds=sum(member.host_seconds for member in members),
    )


class _Log:
    """Times of the tokens of each request, by its place in the order of arrival."""

    def __init__(self, requests: int) -> None:
        self.first = [-1.0] * requests
        self.last = [0.0] * requests
        self.count = [0] * requests

    def add(self, emitted: Sequence[Emitted], now: float) -> None:
        first, last, count = self.first, self.last, self.count
        for item in emitted:
            id = item.request_id
            if not count[id]:
                first[id] = now
            last[id] = now
            count[id] += 1


class _Replica:
    """One engine: `now` is the time of its driver's host."""

    def __init__(self, rank: int, engine: SimEngine, on_step: Callable[[int, StepShape], None] | None) -> None:
        self.rank, self.engine, self._on_step = rank, engine, on_step
        self.scheduler = Scheduler(engine.scheduler, engine.num_blocks)
        self.requests: dict[int, Request] = {}
        self.now = self.host_seconds = 0.0
        self.steps = self.peak_blocks = 0
        self.stage_free: list[float] = []  # when each stage has finished its last step
        self.busy: list[list[float]] = []  # seconds of each stage by the categories of StepTime
        self._blocking = engine.blocking
        self._launched: deque[tuple[StepOutput, float]] = deque()  # output and end of every step in flight

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def add(self, assignment_id: int, prompt: Sequence[int], params: SamplingParams) -> None:
        request = self.requests[assignment_id] = Request(assignment_id, prompt, params)
        self.scheduler.add(request)

    def finish(self, assignment_id: int, reason: FinishReason) -> None:
        self.scheduler.finish(assignment_id, reason)
        self.requests.pop(assignment_id, None)

    def step(self) -> list[Emitted]:
        """Launch every step that can be scheduled, then wait for the oldest one and return its tokens."""
        scheduler = self.scheduler
        while (plan := scheduler.schedule()) is not None:
            shape = StepShape.of(plan)
            if self._on_step is not None:
                self._on_step(self.rank, shape)
            end = self._launch(shape)
            sampled = dict.fromkeys([step.request_id for step in plan.sequences if step.samples], 0)
            self._launched.append((StepOutput(plan.step_id, sampled), end))
        self.peak_blocks = max(self.peak_blocks, scheduler.blocks.in_use)
        if not self._launched:
            return []
        output, end = self._launched.popleft()
        self.now = max(self.now, end)
        emitted = scheduler.commit(output)
        for item in emitted:
            if item.finish_reason is not None:
                del self.requests[item.request_id]
        return emitted

    def unstarted(self) -> list[int]:
        """Return the requests that have not been scheduled yet."""
        if not self.scheduler.num_waiting:
            return []
        return [id for id, request in self.requests.items() if not request.num_admissions]

    def _launch(self, shape: StepShape) -> float:
        """Advance host and devices by one step; returns when the driver has its tokens.

        A stage starts once the stage before it has ended and its own last step has. If launch() blocks, the driver's
        host computes the first stage itself, and is free again when that ends.
        """
        engine = self.engine
        times = engine.stage_times(shape)
        if not self.stage_free:
            self.stage_free = [0.0] * len(times)
            self.busy = [[0.0] * 5 for _ in times]
        self.steps += 1
        begin = self.now
        host = engine.host_seconds(shape)
        self.host_seconds += host
        launched = begin + host
        end = launched if self._blocking or engine.replayed(shape) else begin
        for stage, time in enumerate(times):
            end = max(end, self.stage_free[stage]) + time.total
            if not self._blocking:
                end = max(end, launched)
            self.stage_free[stage] = end
            if not stage and self._blocking:
                launched = end
            spent = self.busy[stage]
            spent[0] += time.matmul
            spent[1] += time.attention
            spent[2] += time.communication
            spent[3] += time.other
            spent[4] += time.idle
        self.now = launched
        return end + engine.return_seconds


def _run_alone(replica: _Replica, arriving: Sequence[SimRequest], log: _Log) -> None:
    """Run one replica. A request is submitted between two steps, at or after its arrival."""
    submitted = 0
    while submitted < len(arriving) or replica.has_work:
        if not replica.has_work:
            replica.now = max(replica.now, arriving[submitted].arrival)
        while submitted < len(arriving) and arriving[submitted].arrival <= replica.now:
            replica.add(submitted, *_prompt(arriving[submitted]))
            submitted += 1
        log.add(replica.step(), replica.now)


class _Cluster:
    """Several replicas. Rank 0 routes requests between the steps of its own replica.

    A step of another replica depends only on what rank 0 sent before it began. So those replicas are advanced up to
    rank 0's time, and report when their step has ended.
    """

    def __init__(self, members: Sequence[_Replica], arriving: Sequence[SimRequest], log: _Log) -> None:
        self._local, self._remote = members[LOCAL], members[1:]
        self._arriving, self._log = arriving, log
        config = self._local.engine.scheduler
        self.router = RequestRouter(dict(enumerate(members)), config.max_num_seqs, config.max_model_len)
        #: reports that rank 0 has not received yet, by rank: time, tokens, and unstarted requests
        self._reports: list[deque[tuple[float, list[Emitted], list[int]]]] = [deque() for _ in members]

    def run(self) -> RequestRouter:
        arriving, router, local = self._arriving, self.router, self._local
        submitted = 0
        while submitted < len(arriving) or router.has_work:
            if not router.has_work:
                local.now = max(local.now, arriving[submitted].arrival)
            while submitted < len(arriving) and arriving[submitted].arrival <= local.now:
                router.add(*_prompt(arriving[submitted]))
                submitted += 1
            idle = [replica for replica in self._remote if not replica.has_work]
            router.assign()
            for replica in idle:  # what it has just been given cannot start before now
                replica.now = max(replica.now, local.now)
            emitted: list[Emitted] = []
            if local.has_work:
                found = local.step()
                emitted += router.apply(LOCAL, found, [0] * len(found), local.unstarted())
            self._advance(local.now)
            emitted += self._receive()
            if not emitted and not local.has_work and router.has_work:  # rank 0 waits for the next report
                pending = [reports[0][0] for reports in self._reports if reports]
                if pending:
                    local.now = max(local.now, min(pending))
                    emitted += self._receive()
            self._log.add(emitted, local.now)
        return router

    def _advance(self, until: float) -> None:
        """Run the steps of the other replicas that begin by `until`."""
        for replica in self._remote:
            reports = self._reports[replica.rank]
            while replica.now <= until and replica.has_work:
                emitted = replica.step()
                reports.append((replica.now, emitted, replica.unstarted()))

    def _receive(self) -> list[Emitted]:
        """Apply the reports that have arrived at rank 0."""
        now, emitted = self._local.now, []
        for rank, reports in enumerate(self._reports):
            while reports and reports[0][0] <= now:
                _, found, unstarted = reports.popleft()
                emitted += self.router.apply(rank, found, [0] * len(found), unstarted)
        return emitted


def _prompt(request: SimRequest) -> tuple[Sequence[int], SamplingParams]:
    return (0,) * request.prompt_len, _greedy(request.output_len)


@lru_cache(maxsize=65536)
def _greedy(output_len: int) -> SamplingParams:
    return SamplingParams(max_tokens=output_len, ignore_eos=True)


def _mean_breakdown(members: Sequence[_Replica], seconds: float) -> StepTime:
    """Return the mean over all devices, with the time in which they had nothing to run as idle."""
    stages = max(len(member.busy) for member in members)
    devices = stages * len(members)
    spent = [sum(stage[category] for member in members for stage in member.busy) / devices for category in range(5)]
    matmul, attention, communication, other, _ = spent
    return StepTime(matmul, attention, communication, other, seconds - matmul - attention - communication - other)


def _percentile(values: Sequence[float], percent: float) -> float:
    """Return a percentile with linear interpolation."""
    ordered = sorted(values)
    position = (len(ordered) - 1) * percent / 100
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)
