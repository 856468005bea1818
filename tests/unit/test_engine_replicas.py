"""The replica router with real engines and schedulers. A formula replaces the model, so every output is known."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from yalis.config import EngineConfig
from yalis.engine import replicas
from yalis.engine.engine import Engine
from yalis.engine.replicas import ReplicaRouter, serve_replica
from yalis.errors import YalisFailure
from yalis.launch.heartbeat import Progress
from yalis.launch.link import Link, LinkLost, listen
from yalis.scheduling.plan import Emitted, StepOutput, StepPlan
from yalis.types import SamplingParams

EOS = 0


def formula(seed: int, position: int) -> int:
    return (seed * 7919 + position * 104729 + position * position) % 23


def expected_output(params: SamplingParams) -> list[int]:
    tokens: list[int] = []
    while len(tokens) < params.max_tokens:
        tokens.append(formula(params.seed or 0, len(tokens)))
        if tokens[-1] == EOS and not params.ignore_eos:
            break
    return tokens


class FormulaRanks:
    """The part of ReplicaRanks that an engine uses."""

    def __init__(self, device: str, num_blocks: int, max_model_len: int, seconds: float = 0.0) -> None:
        executor = SimpleNamespace(graph_bytes=7, replays=0, padding_tokens=0)
        self.runner = SimpleNamespace(
            device=torch.device(device),
            num_blocks=num_blocks,
            max_model_len=max_model_len,
            block_size=4,
            executor=executor,
            expert_load=SimpleNamespace(by_rank=lambda max_age: [3, 5]),
        )
        self.world = SimpleNamespace(
            explain=lambda error: None, fail=lambda sentence: None, failure=None, rank=0, progress=Progress()
        )
        self.seconds, self.closed = seconds, False

    def launch(self, plan: StepPlan) -> Any:
        time.sleep(self.seconds)
        sampled = {
            step.request_id: formula(step.params.seed or 0, step.output_len) for step in plan.sequences if step.samples
        }
        return SimpleNamespace(result=lambda: StepOutput(plan.step_id, sampled))

    def result(self, step: Any) -> StepOutput:
        output: StepOutput = step.result()
        return output

    def close(self) -> None:
        self.closed = True


def make_engine(
    max_num_seqs: int, device: str = "cpu", blocks: int = 12, length: int = 40, seconds: float = 0.0, step: int = 16
) -> Engine:
    config = EngineConfig(max_num_seqs=max_num_seqs, max_batch_tokens=step, block_size=4, threads=1)
    spec = SimpleNamespace(rope=SimpleNamespace(switch_at=None))
    return Engine(config, spec, FormulaRanks(device, blocks, length, seconds), frozenset({EOS}))  # type: ignore[arg-type]


def sampling(seed: int, max_tokens: int, **more: Any) -> SamplingParams:
    return SamplingParams(seed=seed, max_tokens=max_tokens, **more)


# Replicas in memory: each runs only when the test calls its turn()


class End:
    """Rank 0's end of a link; messages pass through JSON as on a real one."""

    def __init__(self, replica: Replica) -> None:
        self.replica = replica
        self.inbox: deque[str] = deque()

    def send(self, value: Any) -> None:
        self.replica.inbox.append(json.dumps(value))

    def poll(self, timeout: float = 0.0) -> bool:
        return bool(self.inbox)

    def receive(self) -> Any:
        while not self.inbox:
            self.replica.turn()
        return json.loads(self.inbox.popleft())

    def close(self) -> None: ...


class Replica:
    """Runs `serve_replica` in a thread, only during turn(); it is also the replica's end of the link."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.end = engine, End(self)
        self.inbox: deque[str] = deque()
        self._go, self._paused = threading.Semaphore(0), threading.Semaphore(0)
        self._stepped = False
        self._errors: list[BaseException] = []
        self.thread = threading.Thread(target=self._serve, daemon=True)
        self.thread.start()
        self._paused.acquire()

    def turn(self) -> None:
        """Handle the received messages, then run one step if the engine has work."""
        self._go.release()
        assert self._paused.acquire(timeout=10)
        if self._errors:
            raise self._errors[0]

    def _serve(self) -> None:
        try:
            serve_replica(self.engine, self)  # type: ignore[arg-type]
        except BaseException as error:
            self._errors.append(error)
        finally:
            self._paused.release()

    def _pause(self) -> None:
        self._paused.release()
        self._go.acquire()

    def send(self, value: Any) -> None:
        self.end.inbox.append(json.dumps(value))
        self._stepped = self.engine.stats.steps > 0

    def poll(self, timeout: float = 0.0) -> bool:
        if self._stepped:
            self._stepped = False
            self._pause()
        return bool(self.inbox)

    def receive(self) -> Any:
        while not self.inbox:
            self._pause()
        return json.loads(self.inbox.popleft())


class Cluster:
    """The router and its remote replicas, with a record of everything emitted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, engines: list[Engine], max_num_seqs: int) -> None:
        self.engines = engines
        self.remote = [Replica(engine) for engine in engines[1:]]
        links = {2 * i + 2: replica.end for i, replica in enumerate(self.remote)}
        self.router = ReplicaRouter(engines[0], links, max_num_seqs)  # type: ignore[arg-type]
        self.params: dict[int, SamplingParams] = {}
        self.emitted: dict[int, list[Emitted]] = {}
        self.ended: dict[int, str] = {}
        monkeypatch.setattr(replicas, "wait_any", self._wait)

    def add(self, prompt: list[int], params: SamplingParams) -> int:
        id = self.router.add(prompt, params).id
        self.params[id], self.emitted[id] = params, []
        return id

    def step(self) -> None:
        for item in self.router.step():
            assert item.request_id not in self.ended, "a request emitted something after its end"
            self.emitted[item.request_id].append(item)
            if item.finish_reason is not None:
                self.ended[item.request_id] = item.finish_reason

    def cancel(self, id: int) -> None:
        emitted = self.router.cancel(id)
        assert bool(emitted) == (id not in self.ended)
        if emitted:
            self.ended[id] = "cancelled"

    def finish(self, id: int) -> None:
        if self.router.finish(id):
            assert id not in self.ended
            self.ended[id] = "stop string"

    def _wait(self, links: list[End]) -> None:
        for _ in range(100):
            for replica in self.remote:
                if replica.end.inbox:
                    return
                replica.turn()
        raise AssertionError("rank 0 waits, but no replica has a report to send")

    def drain(self) -> None:
        for _ in range(5000):
            if not self.router.has_work:
                return
            self.step()
        raise AssertionError("requests did not finish")

    def check_empty(self) -> None:
        """Let every replica handle its messages; check that no request is left and that all outputs are right."""
        for replica in self.remote:
            for _ in range(4):
                replica.turn()
        while self.router.local.has_work:
            self.step()
        self.step()
        router = self.router
        assert not any([router._assignments, router._assignment_ids, router._waiting])
        assert not any([*router._num_assigned.values(), *router._num_without_token.values()])
        for engine in self.engines:
            assert not engine.has_work
            engine.scheduler.check()
        assert not router._local_replica._requests
        whole = [id for id, reason in self.ended.items() if reason in ("stop", "length")]
        assert sum(router.num_finished.values()) == len(whole)
        assert self.ended.keys() == self.params.keys()
        for id, params in self.params.items():
            tokens = [item.token for item in self.emitted[id] if item.token is not None]
            expected = expected_output(params)
            assert tokens == (expected if id in whole else expected[: len(tokens)])
        assert router.stats.output_tokens == sum(len(items) for items in self.emitted.values())

    def close(self) -> None:
        self.router.close()  # which reads the last message of each replica
        for replica in self.remote:
            replica.thread.join(5)
            assert not replica.thread.is_alive()


ACTIONS = st.one_of(
    st.tuples(st.just("add"), st.integers(1, 25), st.integers(1, 14), st.booleans()),
    st.tuples(st.just("cancel"), st.integers(0, 30)),
    st.tuples(st.just("finish"), st.integers(0, 30)),
    st.tuples(st.just("turn"), st.integers(0, 3)),
    st.tuples(st.just("step")),
)


@settings(max_examples=60, deadline=None)
@given(
    count=st.integers(1, 3), max_num_seqs=st.integers(1, 4), device=st.sampled_from(["cpu", "cuda"]),
    actions=st.lists(ACTIONS, min_size=5, max_size=60),
)  # fmt: skip
def test_every_request_ends_exactly_once(
    count: int, max_num_seqs: int, device: str, actions: list[tuple[Any, ...]]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        cluster = Cluster(patch, [make_engine(max_num_seqs, device) for _ in range(count + 1)], max_num_seqs)
        for kind, *rest in actions:
            if kind == "add":
                length, max_tokens, whole = rest
                cluster.add(
                    [len(cluster.params) % 5] * length, sampling(len(cluster.params), max_tokens, ignore_eos=whole)
                )
            elif kind == "step":
                cluster.step()
            elif kind == "turn":
                cluster.remote[rest[0] % count].turn()
            elif cluster.params:
                getattr(cluster, kind)(rest[0] % len(cluster.params))
        cluster.drain()
        cluster.check_empty()
        cluster.close()


def test_a_free_replica_takes_over_unstarted_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """All replicas step at the same time; completion lengths differ by a factor of 30."""
    for max_num_seqs in (1, 2):
        cluster = Cluster(
            monkeypatch, [make_engine(max_num_seqs, blocks=100, length=160) for _ in range(3)], max_num_seqs
        )
        lengths = [90, 3, 3, 90, 3, 3, 3, 3, 60, 3, 3, 3, 30, 3, 30, 3, 3, 3]
        for seed, max_tokens in enumerate(lengths):
            cluster.add([seed, 1], sampling(seed, max_tokens, ignore_eos=True))
        rounds = wasted = 0
        while cluster.router.has_work:
            before = [engine.stats.steps for engine in cluster.engines]
            cluster.step()
            for replica in cluster.remote:
                replica.turn()
            rounds += 1
            idle = sum(engine.stats.steps == count for engine, count in zip(cluster.engines, before, strict=True))
            queued = sum(engine.scheduler.num_waiting for engine in cluster.engines) + len(cluster.router._waiting)
            wasted += min(idle, queued)
        cluster.check_empty()
        assert sum(cluster.router.num_finished.values()) == len(lengths)
        assert 0 < cluster.router.num_moved < len(lengths)
        assert wasted <= cluster.router.num_moved  # idle rounds with a request waiting: moving one takes a round
        assert rounds <= sum(lengths) / (3 * max_num_seqs) + max(lengths) * (1 - 1 / (3 * max_num_seqs)) + wasted
        cluster.close()


def test_no_request_queues_after_a_long_one_while_a_replica_is_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(monkeypatch, [make_engine(1, blocks=40, length=160) for _ in range(2)], 1)
    cluster.add([1], sampling(0, 150, ignore_eos=True))  # goes to the other replica
    for seed in range(1, 9):
        cluster.add([1], sampling(seed, 4, ignore_eos=True))
    for _ in range(60):
        cluster.step()
        cluster.remote[0].turn()
    assert len(cluster.ended) == 8  # all the short ones, long before the long one
    assert cluster.router.num_finished == {0: 8, 2: 0}
    cluster.drain()
    cluster.check_empty()
    cluster.close()


def test_step_without_work_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(monkeypatch, [make_engine(2) for _ in range(2)], 2)
    assert cluster.router.step() == []
    id = cluster.add([1, 2], sampling(1, 30, ignore_eos=True))
    cluster.step()
    cluster.cancel(id)
    assert cluster.router.step() == []  # though the replica has not received the cancellation yet
    assert not cluster.router.has_work
    cluster.remote[0].turn()
    cluster.check_empty()
    cluster.close()


def test_reports_on_a_cancelled_request_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(monkeypatch, [make_engine(2) for _ in range(2)], 2)
    first = cluster.add([1, 2], sampling(1, 1, ignore_eos=True))
    cluster.router._assign_waiting()
    cluster.remote[0].turn()  # the report of its end is in flight
    cluster.cancel(first)
    assert cluster.router.step() == []
    assert cluster.ended == {first: "cancelled"}
    cluster.check_empty()
    cluster.close()


def test_the_smallest_replica_limits_the_completion_length(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(monkeypatch, [make_engine(2, length=40), make_engine(2, length=24)], 2)
    assert cluster.router.max_model_len == 24
    for seed in range(4):
        cluster.add([1] * 10, sampling(seed, 30, min_tokens=20, ignore_eos=True))
    while cluster.router.has_work:
        cluster.step()
    assert [len(items) for items in cluster.emitted.values()] == [14] * 4
    assert all(cluster.router.num_finished.values())
    cluster.close()


def test_cached_tokens_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(monkeypatch, [make_engine(1) for _ in range(2)], 1)
    prompt = list(range(9))
    for _ in range(2):  # one request per replica, then one per replica that finds its prefix cached
        requests = [cluster.router.add(prompt, sampling(seed, 2, ignore_eos=True)) for seed in range(2)]
        while cluster.router.has_work:
            cluster.router.step()
    assert [request.cached_tokens for request in requests] == [8, 8]
    assert cluster.router.stats.prompt_tokens == 36
    assert cluster.router.stats.expert_load == [3, 5] * len(cluster.engines)  # of the ranks of each replica
    assert cluster.router.stats.expert_imbalance == 1.25
    cluster.close()


# Real links


@contextmanager
def linked(engine: Engine) -> Iterator[tuple[Link, threading.Thread]]:
    with listen("127.0.0.1", 0) as server:
        client = socket.create_connection(server.getsockname())
        accepted, _ = server.accept()
    far, near = Link(accepted, "rank 0 on a"), Link(client, "rank 1 on b")

    def serve() -> None:
        with suppress(LinkLost):
            serve_replica(engine, far)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield near, thread
    near.close()
    thread.join(5)
    far.close()


def _run(router: ReplicaRouter) -> int:
    """Run to the end; returns the number of steps."""
    calls = 0
    while router.has_work:
        router.step()
        calls += 1
    return calls


def test_rank_0_blocks_while_only_other_replicas_work() -> None:
    with linked(make_engine(4, seconds=0.004)) as (link, thread):
        router = ReplicaRouter(make_engine(4), {1: link}, 4)
        router.add([1, 2], sampling(1, 25, ignore_eos=True))  # goes to the other replica
        assert _run(router) <= 60  # one step per token, and some for messages that arrived in parts
        assert router.num_finished == {0: 0, 1: 1}
        router.close()
        thread.join(5)
        assert not thread.is_alive()


def test_many_long_prompts_at_once() -> None:
    """Send more than the socket buffers hold to a replica that is itself sending."""
    engines = [make_engine(4, blocks=10_000, length=10_000, step=20_000) for _ in range(2)]
    with linked(engines[1]) as (link, thread):
        router = ReplicaRouter(engines[0], {1: link}, 4)
        router._max_assigned = 10**6  # assign everything at once
        for seed in range(120):
            router.add([10**9] * 9000, sampling(seed, 3, ignore_eos=True))
        counts = [0] * 120
        while router.has_work:
            for item in router.step():
                counts[item.request_id] += 1
        assert counts == [3] * 120
        router.close()
        thread.join(5)


def test_close_after_a_replica_died_raises_nothing() -> None:
    with linked(make_engine(4)) as (link, _):
        local = make_engine(4)
        router = ReplicaRouter(local, {1: link}, 4)
        for seed in (1, 2):  # one for each replica
            router.add([1], sampling(seed, 30, ignore_eos=True))
        router.step()
        link._socket.shutdown(socket.SHUT_RDWR)  # as if the other end had died
        with pytest.raises(YalisFailure, match="rank 1 on b"):
            _run(router)
        router.close()
        assert local.ranks.closed  # type: ignore[attr-defined]
