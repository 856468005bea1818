"""AsyncLLM: the tokens of generate(), errors of the call, cancellation, and failures of the step thread."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

from tests.tiny_chat import save_tiny_chat
from yalis import LLM, SamplingParams, YalisError, YalisFailure
from yalis.engine.async_llm import AsyncLLM, FinishedCompletion
from yalis.types import RequestEvent

LONG = SamplingParams(max_tokens=200, ignore_eos=True)
ENDLESS = SamplingParams(max_tokens=1000, ignore_eos=True)  # for requests that are cancelled


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = save_tiny_chat(tmp_path_factory.mktemp("model"), max_position=4096)
    with LLM(str(folder), threads=1, kv_memory=0.05, max_num_seqs=8) as loaded:
        yield loaded


def run(llm: LLM, test: Callable[[AsyncLLM], Awaitable[Any]], **options: Any) -> Any:
    async def main() -> Any:
        async_llm = AsyncLLM(llm, **options)
        try:
            return await test(async_llm)
        finally:
            await async_llm.close()

    return asyncio.run(main())


async def settled(llm: LLM) -> None:
    deadline = time.monotonic() + 5
    while llm.request_loop.has_work:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.005)


async def read(async_llm: AsyncLLM, prompt: Any, params: SamplingParams) -> tuple[list[RequestEvent], Any]:
    events = [event async for event in async_llm.generate(prompt, params)]
    return events, events[-1].output


def test_events_add_up_to_the_result_of_generate(llm: LLM) -> None:
    params = SamplingParams(max_tokens=30, temperature=1, seed=5, n=3, logprobs=2)
    prompts = [f"question {index}" for index in range(12)]
    expected = llm.generate(prompts, params, progress=False)

    async def test(async_llm: AsyncLLM) -> list[Any]:
        return await asyncio.gather(*(read(async_llm, prompt, params) for prompt in prompts))

    for (events, output), result in zip(run(llm, test), expected, strict=True):
        assert [(one.text, one.token_ids) for one in output.completions] == [
            (one.text, one.token_ids) for one in result.completions
        ]
        for index, completion in enumerate(output.completions):
            mine = [event for event in events if event.completion_index == index]
            assert "".join(event.text for event in mine) == completion.text
            assert [token for event in mine for token in event.token_ids] == completion.token_ids
            assert [token for event in mine for token in event.logprobs or ()] == completion.logprobs


def test_bad_prompts_are_errors_of_the_call(llm: LLM) -> None:
    async def test(async_llm: AsyncLLM) -> None:
        for prompt, message in (("", "empty"), ("x" * 5000, "context holds 4096"), ([99999], "vocabulary")):
            with pytest.raises(YalisError, match=message):
                await async_llm.submit([prompt])
        with pytest.raises(YalisError, match="prompt 1: token id"):
            await async_llm.submit([[1], [99999]], LONG)
        await settled(llm)  # the first of the two was cancelled
        assert async_llm.num_open == 0

    run(llm, test)
    assert llm.num_unfinished == 0


def test_leaving_the_loop_cancels_the_request_and_frees_its_blocks(llm: LLM) -> None:
    done: list[FinishedCompletion] = []

    async def test(async_llm: AsyncLLM) -> None:
        events = async_llm.generate("hello", ENDLESS)
        await anext(events)
        steps = llm.stats.steps
        await events.aclose()
        await settled(llm)
        assert llm.stats.steps - steps <= 2
        assert llm.stats.used_blocks == 0

    run(llm, test, on_finished=done.append)
    assert [one.finish_reason for one in done] == ["cancelled"]


@pytest.mark.parametrize("size", [20, 3000])
def test_a_cancelled_task_leaves_no_request(llm: LLM, size: int) -> None:
    """Also while its prompt is tokenized in a thread."""

    async def test(async_llm: AsyncLLM) -> None:
        for delay in (0, 0, 0.001, 0.01, 0.05):
            task = asyncio.create_task(read(async_llm, "x" * size, ENDLESS))
            await asyncio.sleep(delay)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        await asyncio.sleep(0.1)
        await settled(llm)
        assert async_llm.num_open == 0

    run(llm, test)
    assert llm.num_unfinished == llm.stats.used_blocks == 0


def test_a_slow_reader_gets_longer_deltas(llm: LLM) -> None:
    async def test(async_llm: AsyncLLM) -> list[int]:
        sizes = []
        async for event in async_llm.generate("hello", LONG):
            sizes.append(len(event.token_ids))
            await asyncio.sleep(0.02)
        return sizes

    sizes = run(llm, test)
    assert sum(sizes) == 200
    assert len(sizes) < 150


def test_other_threads_may_use_the_llm_meanwhile(llm: LLM) -> None:
    expected = llm.generate(["one", "two"], LONG, progress=False)
    other: list[Any] = []

    async def test(async_llm: AsyncLLM) -> Any:
        thread = threading.Thread(target=lambda: other.extend(llm.generate(["two"], LONG, progress=False)))
        thread.start()
        output = await read(async_llm, "one", LONG)
        await asyncio.to_thread(thread.join)
        return output[1]

    assert run(llm, test).token_ids == expected[0].token_ids
    assert other[0].token_ids == expected[1].token_ids


def test_a_failure_ends_every_open_request(tmp_path_factory: pytest.TempPathFactory, monkeypatch: Any) -> None:
    folder = save_tiny_chat(tmp_path_factory.mktemp("model"))
    with LLM(str(folder), threads=1, kv_memory=0.05) as llm:
        engine = llm.request_loop.engine

        async def test(async_llm: AsyncLLM) -> None:
            tasks = [asyncio.create_task(read(async_llm, prompt, LONG)) for prompt in ("a", "b", "c" * 40)]
            await asyncio.sleep(0.05)
            monkeypatch.setattr(engine.ranks, "launch", lambda plan: 1 / 0)
            for task in tasks:
                with pytest.raises(YalisFailure, match="division by zero"):
                    await task
            assert async_llm.failure is not None
            with pytest.raises(YalisFailure):
                await async_llm.submit(["d"])

        run(llm, test)
