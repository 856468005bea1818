"""One LLM used by several threads, by a forked child, and after the last reference to it is gone."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from tests.families import CASES, make_prompts, make_reference
from yalis import LLM, SamplingParams, YalisError
from yalis.engine.interrupts import Stopped
from yalis.errors import YalisFailure

STEPS = 8
THREADS = 8
PLAIN = SamplingParams(max_tokens=STEPS, ignore_eos=True)


@pytest.fixture(scope="module")
def ref(tmp_path_factory):
    prompts = make_prompts(3, (5, 11, 8, 6), shared=3)
    return make_reference(CASES[0], tmp_path_factory.mktemp("threads"), 3, prompts, STEPS)


def load(ref) -> LLM:
    return LLM(str(ref.path), device="cpu", threads=1, kv_blocks=512, block_size=4, max_model_len=64)


@pytest.fixture(scope="module")
def llm(ref):
    with load(ref) as model:
        yield model


class Steps:
    """Replaces the engine's step: counts calls, fails if two run at once, and may sleep or raise."""

    def __init__(self, llm: LLM, monkeypatch: pytest.MonkeyPatch, seconds: float = 0.0) -> None:
        self.count, self.threads, self.error = 0, set[int](), False
        self._running, self._seconds, self._step = False, seconds, llm._engine.step
        monkeypatch.setattr(llm._engine, "step", self.step)

    def step(self) -> Any:
        assert not self._running, "two threads are in the engine"
        self._running = True
        try:
            self.count += 1
            self.threads.add(threading.get_ident())
            time.sleep(self._seconds)
            if self.error:
                raise RuntimeError("the device is gone")
            return self._step()
        finally:
            self._running = False


def run_threads(functions: list[Callable[[], Any]]) -> list[Any]:
    """Return what each function returned or raised, called in a thread of its own; fails if one does not return."""
    results: list[Any] = [None] * len(functions)

    def run(index: int) -> None:
        try:
            results[index] = functions[index]()
        except BaseException as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a thread waits forever"
    return results


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_threads_share_the_steps(llm, ref, monkeypatch):
    """As many steps as for one batch of all prompts, and the same tokens."""
    prompts, expected = ref.prompts * 50, ref.tokens * 50
    steps = Steps(llm, monkeypatch, 0.002)
    llm.generate(prompts, PLAIN)
    for_one_batch, steps.count = steps.count, 0
    size = len(prompts) // THREADS
    parts = [prompts[i * size : (i + 1) * size] for i in range(THREADS)]
    results = run_threads([lambda part=part: [o.token_ids for o in llm.generate(part, PLAIN)] for part in parts])
    assert [tokens for result in results for tokens in result] == expected
    assert steps.count <= 1.2 * for_one_batch
    llm._engine.scheduler.check()


def test_every_call_works_in_every_thread(llm, ref, monkeypatch):
    steps = Steps(llm, monkeypatch, 0.001)
    seen: list[Any] = []

    def stream() -> list[int]:
        return [token for chunk in llm.stream(ref.prompts[0], PLAIN) for token in chunk.token_ids]

    def abandoned_stream() -> None:
        next(llm.stream(ref.prompts[1], PLAIN))

    def events() -> dict[int, list[int]]:
        ids = [llm.submit(prompt, PLAIN) for prompt in ref.prompts]
        outputs = {event.request_id: event.output.token_ids for event in llm.events() if event.output}
        return [outputs[id] for id in ids]

    def generate() -> list[list[int]]:
        return [o.token_ids for _ in range(3) for o in llm.generate(ref.prompts, PLAIN, progress=seen.append)]

    results = run_threads([stream, generate, events, generate, abandoned_stream, stream])
    assert results == [ref.tokens[0], ref.tokens * 3, ref.tokens, ref.tokens * 3, None, ref.tokens[0]]
    assert len(steps.threads) > 1
    assert seen
    llm.poll()
    assert llm.num_unfinished == 0
    llm._engine.scheduler.check()


def test_submit_and_cancel_while_another_thread_runs_a_step(llm, ref, monkeypatch):
    steps = Steps(llm, monkeypatch, 0.05)
    thread = threading.Thread(target=lambda: llm.generate(ref.prompts, PLAIN), daemon=True)
    thread.start()
    wait_for(lambda: steps._running)
    before = steps.count
    keep, drop = llm.submit(ref.prompts[0], PLAIN), llm.submit(ref.prompts[1], PLAIN)
    llm.cancel(drop)
    assert steps.count == before, "submit() or cancel() waited for the step"
    done: dict[int, Any] = {}
    while len(done) < 2:
        done.update(llm.poll())
    assert done[keep].token_ids == ref.tokens[0]
    assert done[drop].finish_reason == "cancelled"
    thread.join(30)
    thread = threading.Thread(target=lambda: llm.generate(ref.prompts, PLAIN), daemon=True)
    last = llm.submit(ref.prompts[0], SamplingParams(max_tokens=1))
    thread.start()
    wait_for(lambda: bool(llm._submitted.finished))
    before = steps.count
    assert [id for id, _ in llm.poll()] == [last]
    assert steps.count <= before + 2, "poll() waited although it had a result"
    thread.join(30)
    assert llm.num_unfinished == 0


def test_ctrl_c_in_a_thread_that_waits_for_another(llm, ref, monkeypatch):
    steps = Steps(llm, monkeypatch, 0.02)
    results: list[Any] = []
    other = threading.Thread(target=lambda: results.extend(llm.generate(ref.prompts, PLAIN)), daemon=True)
    other.start()
    wait_for(lambda: steps._running)
    threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(Stopped, match="0 of 4 prompts done") as stopped:
        llm.generate(ref.prompts, PLAIN)
    assert [output.finish_reason for output in stopped.value.done] == ["cancelled"] * 4
    other.join(30)
    assert [output.token_ids for output in results] == ref.tokens
    assert llm.num_unfinished == 0


def test_an_exception_in_one_thread_leaves_the_others_alone(llm, ref, monkeypatch):
    Steps(llm, monkeypatch, 0.002)

    def interrupted() -> None:
        def stop(progress: object) -> None:
            raise ZeroDivisionError

        llm.generate(ref.prompts, PLAIN, progress=stop)

    def generate() -> list[list[int]]:
        return [output.token_ids for output in llm.generate(ref.prompts, PLAIN)]

    def invalid() -> None:
        llm.generate([*ref.prompts, [-1]], PLAIN)

    results = run_threads([generate, interrupted, invalid, generate, interrupted])
    assert results[0] == results[3] == ref.tokens
    assert [type(results[i]) for i in (1, 2, 4)] == [ZeroDivisionError, YalisError, ZeroDivisionError]
    assert llm.num_unfinished == 0


def test_a_failed_step_and_a_closed_llm_end_every_thread(ref, monkeypatch):
    with load(ref) as llm:
        steps = Steps(llm, monkeypatch, 0.01)
        threading.Timer(0.03, lambda: setattr(steps, "error", True)).start()
        results = run_threads([lambda: llm.generate(ref.prompts, PLAIN)] * 4)
        kinds = sorted(type(result).__name__ for result in results)
        assert set(kinds) <= {"RuntimeError", "YalisFailure"}, results
        assert all(len(result.done) == 4 for result in results if isinstance(result, YalisFailure))
    llm = load(ref)
    Steps(llm, monkeypatch, 0.02)
    threading.Timer(0.05, llm.close).start()
    for result in run_threads([lambda: llm.generate(ref.prompts, PLAIN)] * 3):
        assert isinstance(result, YalisError)
        assert "this LLM is closed" in str(result)


def test_a_forked_child_is_refused(llm, ref):
    child = os.fork()
    if child == 0:  # no assertion here: it would run the rest of the test session twice
        status = 1
        try:
            llm.generate(ref.prompts, PLAIN)
        except YalisError as error:
            status = 0 if "cannot be used in a process forked from it" in str(error) else 2
        llm.close()
        os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    assert [output.token_ids for output in llm.generate(ref.prompts, PLAIN)] == ref.tokens


def test_an_llm_without_references_frees_its_memory(ref):
    llm = load(ref)
    assert llm.generate(ref.prompts, PLAIN)
    weights, pool = (weakref.ref(part) for part in (llm._engine.runner.model, llm._engine.runner.pool))
    gc.disable()
    try:
        del llm
        assert weights() is None
        assert pool() is None
    finally:
        gc.enable()
