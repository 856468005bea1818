"""Replicas with real engines and schedulers; only the model is a formula, so that every answer is known beforehand."""

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
from yalis.engine.replicas import Replicas, serve_replica
from yalis.errors import YalisFailure
from yalis.launch.link import Link, LinkLost, listen
from yalis.scheduling.plan import Emitted, StepOutput, StepPlan
from yalis.types import SamplingParams

EOS = 0


def formula(seed: int, place: int) -> int:
    return (seed * 7919 + place * 104729 + place * place) % 23


def answer(params: SamplingParams) -> list[int]:
    tokens: list[int] = []
    while len(tokens) < params.max_tokens:
        tokens.append(formula(params.seed or 0, len(tokens)))
        if tokens[-1] == EOS and not params.ignore_eos:
            break
    return tokens


class FormulaRanks:
    """What an engine needs of its ranks."""

    def __init__(self, device: str, num_blocks: int, max_model_len: int, seconds: float = 0.0) -> None:
        graphs = SimpleNamespace(nbytes=7)
        self.runner = SimpleNamespace(
            device=torch.device(device),
            num_blocks=num_blocks,
            max_model_len=max_model_len,
            block_size=4,
            graphs=graphs,
        )
        self.world = SimpleNamespace(explain=lambda error: None, fail=lambda sentence: None, failure=None, rank=0)
        self.seconds, self.closed = seconds, False

    def launch(self, plan: StepPlan) -> Any:
        time.sleep(self.seconds)
        sampled = {
            step.request_id: formula(step.params.seed or 0, step.output_len) for step in plan.sequences if step.samples
        }
        return SimpleNamespace(result=lambda: StepOutput(plan.number, sampled))

    def close(self) -> None:
        self.closed = True


def make_engine(
    seats: int, device: str = "cpu", blocks: int = 12, length: int = 40, seconds: float = 0.0, step: int = 16
) -> Engine:
    config = EngineConfig(max_num_seqs=seats, max_batch_tokens=step, block_size=4, threads=1)
    spec = SimpleNamespace(rope=SimpleNamespace(switch_at=None))
    return Engine(config, spec, FormulaRanks(device, blocks, length, seconds), frozenset({EOS}))  # type: ignore[arg-type]


def drawn(seed: int, max_tokens: int, **more: Any) -> SamplingParams:
    return SamplingParams(seed=seed, max_tokens=max_tokens, **more)


# A world in memory, whose replicas take a turn when they are told to


class End:
    """Rank 0's end of a link; the messages are those of a real one."""

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
    """`serve_replica` in a thread that runs only during its turns; also its end of the link."""

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
        """Take what has come, and one step where there is one to take."""
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


class Room:
    """Rank 0's Replicas and the others, with a record of what was emitted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, engines: list[Engine], seats: int) -> None:
        self.engines = engines
        self.others = [Replica(engine) for engine in engines[1:]]
        self.router = Replicas(engines[0], {2 * i + 2: one.end for i, one in enumerate(self.others)}, seats)  # type: ignore[misc]
        self.params: dict[int, SamplingParams] = {}
        self.heard: dict[int, list[Emitted]] = {}
        self.ended: dict[int, str] = {}
        monkeypatch.setattr(replicas, "wait_any", self._wait)

    def add(self, prompt: list[int], params: SamplingParams) -> int:
        id = self.router.add(prompt, params).id
        self.params[id], self.heard[id] = params, []
        return id

    def step(self) -> None:
        for item in self.router.step():
            assert item.request_id not in self.ended, "something was emitted after the end"
            self.heard[item.request_id].append(item)
            if item.finish_reason is not None:
                self.ended[item.request_id] = item.finish_reason

    def cancel(self, id: int) -> None:
        told = self.router.cancel(id)
        assert bool(told) == (id not in self.ended)
        if told:
            self.ended[id] = "cancelled"

    def finish(self, id: int) -> None:
        if self.router.finish(id):
            assert id not in self.ended
            self.ended[id] = "stop string"

    def _wait(self, links: list[End]) -> None:
        for _ in range(100):
            for one in self.others:
                if one.end.inbox:
                    return
                one.turn()
        raise AssertionError("rank 0 waits, and nobody has anything to say")

    def drain(self) -> None:
        for _ in range(5000):
            if not self.router.has_work:
                return
            self.step()
        raise AssertionError("requests are left over")

    def check_empty(self) -> None:
        """Everybody hears the last word, and nothing is left of anything."""
        for one in self.others:
            for _ in range(4):
                one.turn()
        while self.router.own.has_work:
            self.step()
        self.step()
        router = self.router
        assert not any([router._given, router._tickets, router._waiting])
        assert not any([*router._load.values(), *router._fresh.values()])
        for engine in self.engines:
            assert not engine.has_work
            engine.scheduler.check()
        assert not router._own._requests
        whole = [id for id, reason in self.ended.items() if reason in ("stop", "length")]
        assert sum(router.served.values()) == len(whole)
        assert self.ended.keys() == self.params.keys()
        for id, params in self.params.items():
            tokens = [item.token for item in self.heard[id] if item.token is not None]
            expected = answer(params)
            assert tokens == (expected if id in whole else expected[: len(tokens)])
        assert router.stats.output_tokens == sum(len(items) for items in self.heard.values())

    def close(self) -> None:
        self.router.close()  # which hears the others' last word
        for one in self.others:
            one.thread.join(5)
            assert not one.thread.is_alive()


ACTIONS = st.one_of(
    st.tuples(st.just("add"), st.integers(1, 25), st.integers(1, 14), st.booleans()),
    st.tuples(st.just("cancel"), st.integers(0, 30)),
    st.tuples(st.just("finish"), st.integers(0, 30)),
    st.tuples(st.just("turn"), st.integers(0, 3)),
    st.tuples(st.just("step")),
)


@settings(max_examples=60, deadline=None)
@given(
    count=st.integers(1, 3), seats=st.integers(1, 4), device=st.sampled_from(["cpu", "cuda"]),
    actions=st.lists(ACTIONS, min_size=5, max_size=60),
)  # fmt: skip
def test_every_request_ends_exactly_once(count: int, seats: int, device: str, actions: list[tuple[Any, ...]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        room = Room(patch, [make_engine(seats, device) for _ in range(count + 1)], seats)
        for kind, *rest in actions:
            if kind == "add":
                length, most, whole = rest
                room.add([len(room.params) % 5] * length, drawn(len(room.params), most, ignore_eos=whole))
            elif kind == "step":
                room.step()
            elif kind == "turn":
                room.others[rest[0] % count].turn()
            elif room.params:
                getattr(room, kind)(rest[0] % len(room.params))
        room.drain()
        room.check_empty()
        room.close()


def test_a_free_replica_takes_what_another_has_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    """All replicas take a step at the same time; lines differ by a factor of 30."""
    for seats in (1, 2):
        room = Room(monkeypatch, [make_engine(seats, blocks=100, length=160) for _ in range(3)], seats)
        lengths = [90, 3, 3, 90, 3, 3, 3, 3, 60, 3, 3, 3, 30, 3, 30, 3, 3, 3]
        for seed, most in enumerate(lengths):
            room.add([seed, 1], drawn(seed, most, ignore_eos=True))
        rounds = wasted = 0
        while room.router.has_work:
            before = [engine.stats.steps for engine in room.engines]
            room.step()
            for one in room.others:
                one.turn()
            rounds += 1
            idle = sum(engine.stats.steps == count for engine, count in zip(room.engines, before, strict=True))
            queued = sum(engine.scheduler.num_waiting for engine in room.engines) + len(room.router._waiting)
            wasted += min(idle, queued)
        room.check_empty()
        assert sum(room.router.served.values()) == len(lengths)
        assert 0 < room.router.moved < len(lengths)
        assert wasted <= room.router.moved  # rounds in which a replica was idle and a request waited: news travels
        assert rounds <= sum(lengths) / (3 * seats) + max(lengths) * (1 - 1 / (3 * seats)) + wasted
        room.close()


def test_nothing_waits_behind_a_long_answer_while_a_replica_is_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    room = Room(monkeypatch, [make_engine(1, blocks=40, length=160) for _ in range(2)], 1)
    room.add([1], drawn(0, 150, ignore_eos=True))  # goes to the other replica
    for seed in range(1, 9):
        room.add([1], drawn(seed, 4, ignore_eos=True))
    for _ in range(60):
        room.step()
        room.others[0].turn()
    assert len(room.ended) == 8  # all the short ones, long before the long one
    assert room.router.served == {0: 8, 2: 0}
    room.drain()
    room.check_empty()
    room.close()


def test_an_idle_engine_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    room = Room(monkeypatch, [make_engine(2) for _ in range(2)], 2)
    assert room.router.step() == []
    id = room.add([1, 2], drawn(1, 30, ignore_eos=True))
    room.step()
    room.cancel(id)
    assert room.router.step() == []  # though the replica has yet to hear of it
    assert not room.router.has_work
    room.others[0].turn()
    room.check_empty()
    room.close()


def test_what_a_replica_says_of_a_cancelled_request_is_not_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    room = Room(monkeypatch, [make_engine(2) for _ in range(2)], 2)
    first = room.add([1, 2], drawn(1, 1, ignore_eos=True))
    room.router._hand_out()
    room.others[0].turn()  # its end is on the way
    room.cancel(first)
    assert room.router.step() == []
    assert room.ended == {first: "cancelled"}
    room.check_empty()
    room.close()


def test_the_smallest_replica_says_how_long_an_answer_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    room = Room(monkeypatch, [make_engine(2, length=40), make_engine(2, length=24)], 2)
    assert room.router.max_model_len == 24
    for seed in range(4):
        room.add([1] * 10, drawn(seed, 30, min_tokens=20, ignore_eos=True))
    while room.router.has_work:
        room.step()
    assert [len(items) for items in room.heard.values()] == [14] * 4
    assert all(served for served in room.router.served.values())
    room.close()


def test_prefix_reuse_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    room = Room(monkeypatch, [make_engine(1) for _ in range(2)], 1)
    prompt = list(range(9))
    for _ in range(2):  # one on each replica, then one on each that finds its prefix
        requests = [room.router.add(prompt, drawn(seed, 2, ignore_eos=True)) for seed in range(2)]
        while room.router.has_work:
            room.router.step()
    assert [request.cached_tokens for request in requests] == [8, 8]
    assert room.router.stats.prompt_tokens == 36
    room.close()


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


def _run(router: Replicas) -> int:
    """To the end; how many steps that took."""
    calls = 0
    while router.has_work:
        router.step()
        calls += 1
    return calls


def test_rank_0_sleeps_while_only_others_work() -> None:
    with linked(make_engine(4, seconds=0.004)) as (link, thread):
        router = Replicas(make_engine(4), {1: link}, 4)
        router.add([1, 2], drawn(1, 25, ignore_eos=True))  # goes to the other
        assert _run(router) <= 60  # a step for each token, some for news that came in parts
        assert router.served == {0: 0, 1: 1}
        router.close()
        thread.join(5)
        assert not thread.is_alive()


def test_many_long_prompts_at_once() -> None:
    """More than the connection holds goes to a replica that is sending already."""
    engines = [make_engine(4, blocks=10_000, length=10_000, step=20_000) for _ in range(2)]
    with linked(engines[1]) as (link, thread):
        router = Replicas(engines[0], {1: link}, 4)
        router._most = 10**6  # everything goes out at once
        for seed in range(120):
            router.add([10**9] * 9000, drawn(seed, 3, ignore_eos=True))
        counts = [0] * 120
        while router.has_work:
            for item in router.step():
                counts[item.request_id] += 1
        assert counts == [3] * 120
        router.close()
        thread.join(5)


def test_closing_after_a_replica_is_gone_is_quiet() -> None:
    with linked(make_engine(4)) as (link, _):
        own = make_engine(4)
        router = Replicas(own, {1: link}, 4)
        for seed in (1, 2):  # one for each replica
            router.add([1], drawn(seed, 30, ignore_eos=True))
        router.step()
        link._socket.shutdown(socket.SHUT_RDWR)  # as if the other end had died
        with pytest.raises(YalisFailure, match="rank 1 on b"):
            _run(router)
        router.close()
        assert own.ranks.closed  # type: ignore[attr-defined]
