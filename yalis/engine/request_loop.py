"""Runs the engine for any number of threads, one of them at a time.

A thread that waits for output runs steps itself if no other thread does: it leads. Other waiting threads follow: they
sleep until the leader has delivered output for them. A leader that has its output wakes a follower, which leads next.

New requests and cancellations are queued. The thread that has the engine applies them between two steps; if no thread
has it, the caller applies them at once. So no call waits for a step, unless it needs the result.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TypeVar, Union

import torch

from yalis.checkpoint.tokenizer import Tokenizer
from yalis.engine.device import release_memory
from yalis.engine.engine import Engine
from yalis.engine.interrupts import interrupts_held
from yalis.engine.replicas import ReplicaRouter
from yalis.engine.requests import PendingCompletion, PendingRequest
from yalis.errors import YalisError
from yalis.launch.heartbeat import CLOSING, IDLE
from yalis.launch.launchers import detect_launcher
from yalis.launch.world import World
from yalis.scheduling.plan import Emitted
from yalis.types import SamplingParams

AnyEngine = Union[Engine, ReplicaRouter]
_Result = TypeVar("_Result")
#: Seconds after which a follower looks again by itself. Only an interrupt at a bad moment can lose a wake-up.
_RECHECK_S = 1.0


class _Follower:
    """A thread that sleeps until `ready()`, or until it is woken to lead."""

    def __init__(self, ready: Callable[[], bool]) -> None:
        self.ready = ready
        self.woken = threading.Event()


class RequestLoop:
    """An engine and its unfinished requests. Every method may be called from any thread."""

    def __init__(self, engine: AnyEngine, world: World) -> None:
        self.world = world
        self.requests: dict[int, PendingRequest] = {}  # unfinished ones, by id
        #: Guards the output of request groups. Reentrant, because garbage collection can run a generator's clean-up in
        #: a thread that holds it.
        self.output = threading.RLock()
        self._engine: AnyEngine | None = engine  # None once it is closed
        self._by_sequence: dict[int, PendingCompletion] = {}  # completions of unfinished requests, by sequence id
        self._commands: deque[Callable[[], object]] = deque()  # to be run between steps
        self._turn = threading.Lock()  # held by the thread that has the engine
        self._owner: int | None = None  # that thread
        self._followers: list[_Follower] = []
        self._thread = threading.local()
        self._pid = os.getpid()

    @property
    def engine(self) -> AnyEngine:
        """The engine; raises YalisError if it is closed, or if this process was forked from the one that loaded it."""
        if self._pid != os.getpid():
            raise YalisError(
                f"this LLM belongs to process {self._pid} and cannot be used in a process forked from it; create an "
                "LLM in this process, or start processes with the spawn method of multiprocessing"
            )
        if self._engine is None:
            raise YalisError("this LLM is closed; create a new one")
        return self._engine

    @property
    def has_work(self) -> bool:
        """Whether a request is unfinished, or a step in flight has to be committed."""
        return bool(self.requests) or self.engine.has_work

    def add(self, request: PendingRequest, params: Sequence[SamplingParams], tokenizer: Tokenizer | None) -> None:
        """Queue a request with one completion for each of `params`."""
        self.requests[request.id] = request
        request.group.add(request)
        self._enqueue(lambda: self._add(request, params, tokenizer))

    def cancel(self, ids: Iterable[int]) -> None:
        """End requests before the next step. Ids of finished requests are ignored."""
        if unfinished := [id for id in ids if id in self.requests]:
            self._enqueue(lambda: self._cancel(unfinished))

    def cancel_and_wait(self, ids: Sequence[int]) -> None:
        """End requests; on return their groups have the results."""
        self.call(lambda: self._cancel(ids))

    def call(self, function: Callable[[], _Result]) -> _Result:
        """Run `function` between two steps and return its result."""
        if self._owner == threading.get_ident():  # called by a signal handler during a step
            return function()
        future: Future[_Result] = Future()

        def command() -> None:
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)

        self._enqueue(command)
        return future.result()

    def advance(self, ready: Callable[[], bool]) -> None:
        """Run steps, or wait for the thread that runs them, until `ready()`, which must be cheap and take no lock."""
        try:
            while not ready():
                if not self._try_step():
                    self._follow(ready)
        finally:
            self._pass_on()

    def advance_once(self, ready: Callable[[], bool]) -> None:
        """Run one step; if another thread runs steps, wait for `ready()` instead, at most a second."""
        try:
            if not self._try_step():
                self._follow(ready)
        finally:
            self._pass_on()

    def close(self) -> None:
        """Drop all requests, close the engine, and end the ranks that this process started.

        Ranks of a launcher stay and wait for the next LLM. Does nothing in a forked process.
        """
        if self._pid != os.getpid() or (engine := self.call(self._detach)) is None:
            return
        device = engine.device
        with interrupts_held():
            self.world.phase = CLOSING
            try:
                engine.close()
            except Exception as error:
                reason = self.world.abort(error)
                raise reason from reason.__cause__
            finally:
                self.world.phase = IDLE
            if detect_launcher().size == 1:
                self.world.close()
            else:
                self.world.set_idle()
            del engine
            release_memory(device)

    @contextmanager
    def phase_running(self) -> Iterator[None]:
        """Mark this process as running. If a rank dies now, a call that cannot return is ended from another thread;
        if it dies while this process is idle, the next call reports it."""
        self.world.phase = "running"
        try:
            with self.world.progress.step():
                yield
        finally:
            self.world.phase = IDLE

    # The thread that has the engine

    def _try_step(self) -> bool:
        """Run a step and deliver its output; False if another thread has the engine.

        Ctrl-C during the step takes effect after both.
        """
        engine = self.engine
        with interrupts_held():
            if not self._turn.acquire(blocking=False):
                return False
            try:
                self._owner = threading.get_ident()
                self._run_queued()
                if engine is self._engine:  # not closed by a command
                    self._select_device(engine.device)
                    with self.phase_running():
                        emitted = engine.step()
                    self._deliver(emitted)
            finally:
                self._owner = None
                self._turn.release()
        return True

    def _enqueue(self, command: Callable[[], object]) -> None:
        self._commands.append(command)
        self._pass_on()

    def _pass_on(self) -> None:
        """Run what was queued while this thread had the engine, then wake a follower to lead.

        Whoever queues a command while another thread has the engine leaves it to that thread, which looks here after it
        has released the engine. So no command is left behind.
        """
        while self._commands:
            with interrupts_held():
                if not self._turn.acquire(blocking=False):
                    return
                try:
                    self._owner = threading.get_ident()
                    self._run_queued()
                finally:
                    self._owner = None
                    self._turn.release()
        if self._followers:
            with self.output:
                for follower in self._followers[:1]:
                    follower.woken.set()

    def _run_queued(self) -> None:
        while self._commands:
            self._commands.popleft()()

    def _select_device(self, device: torch.device) -> None:
        """Make the engine's GPU the current device of this thread; CUDA keeps one for each thread."""
        if device.type == "cuda" and not getattr(self._thread, "selected", False):
            torch.cuda.set_device(device)
            self._thread.selected = True

    def _add(self, request: PendingRequest, params: Sequence[SamplingParams], tokenizer: Tokenizer | None) -> None:
        if self._engine is None:
            return
        for one in params:
            sequence = self._engine.add(request.token_ids, one)
            self._by_sequence[sequence.id] = request.add(sequence, one, tokenizer)

    def _cancel(self, ids: Sequence[int]) -> None:
        for id in ids:
            request = self.requests.get(id)
            for completion in request.completions if request is not None else ():
                if completion.finish_reason is None and self._engine is not None:
                    self._deliver(self._engine.cancel(completion.sequence.id))

    def _detach(self) -> AnyEngine | None:
        """Return the engine, which no thread uses from here on; None if it is closed."""
        engine, self._engine = self._engine, None
        self.requests.clear()
        self._by_sequence.clear()
        with self.output:
            for follower in self._followers:
                follower.woken.set()
        return engine

    def _deliver(self, emitted: list[Emitted]) -> None:
        """Add tokens and ends of sequences to their completions, and wake the followers that wait for them."""
        with self.output:
            for item in emitted:
                completion = self._by_sequence.get(item.request_id)
                if completion is None or completion.finish_reason is not None:
                    continue
                request = completion.request
                request.group.output_tokens += item.token is not None
                if completion.append(item):
                    # It reached a stop string. A step that is in flight may still emit one more token.
                    self.engine.finish(completion.sequence.id)
                if completion.finish_reason is not None and request.finished:
                    del self.requests[request.id]
                    for ended in request.completions:
                        del self._by_sequence[ended.sequence.id]
                request.group.notify(completion)
            for follower in self._followers:
                if follower.ready():
                    follower.woken.set()
        if not self.requests:
            self.world.set_idle()

    # The other threads

    def _follow(self, ready: Callable[[], bool]) -> None:
        """Sleep until `ready()`, or until no thread has the engine."""
        follower = _Follower(ready)
        with self.output:
            self._followers.append(follower)
        try:
            # A thread that releases the engine from here on wakes a follower.
            if self._turn.locked() and not ready():
                follower.woken.wait(_RECHECK_S)
        finally:
            with self.output:
                self._followers.remove(follower)
