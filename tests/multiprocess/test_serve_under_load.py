"""A server of two ranks under load: SIGTERM drains it, and the death of a rank ends every stream with an error."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.multiprocess.serve_job import ServeJob, serve
from tests.soak.serve_requests import Answer, Exchange, Spec, find_problem
from tests.tiny_chat import save_tiny_chat
from yalis import LLM, SamplingParams

STREAMS, TOKENS = 12, 150
TP = ("--tp", "2", "--threads", "1", "--kv-memory", "0.05")


@pytest.fixture(scope="module")
def specs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Spec]]:
    """A model, and requests that run for seconds."""
    model = save_tiny_chat(tmp_path_factory.mktemp("model"), max_position=512)
    sampling = {"max_tokens": TOKENS, "ignore_eos": True, "temperature": 0.0}
    prompts = [[number, 2 * number + 1, 7] for number in range(STREAMS)]
    with LLM(str(model), threads=1) as llm:
        outputs = llm.generate(prompts, SamplingParams(**sampling), progress=False)
    return model, [Spec(one, sampling, output.token_ids) for one, output in zip(prompts, outputs, strict=True)]


def run(server: ServeJob, specs: list[Spec], fault: Callable[[], None]) -> tuple[list[Answer], Answer | None]:
    """Start all streams, call `fault` once each has begun, send one more request, and read all answers to the end."""

    port = int(server.url.rpartition(":")[2])

    async def load() -> tuple[list[Answer], Answer | None]:
        exchanges = [Exchange(port, spec.body(stream=True)) for spec in specs]
        for exchange in exchanges:
            await exchange.open()
        for exchange in exchanges:
            await exchange.read(events=2)
        fault()
        reading = [asyncio.ensure_future(exchange.read()) for exchange in exchanges]
        await asyncio.sleep(0.1)
        late = Exchange(port, specs[0].body(stream=False))
        try:
            await late.open()
            last: Answer | None = await late.read()
        except (OSError, EOFError):
            last = None  # the server has ended
        answers = await asyncio.wait_for(asyncio.gather(*reading), 60)
        for exchange in exchanges:
            exchange.close()
        return answers, last

    return asyncio.run(load())


def test_sigterm_under_load_finishes_what_runs(specs: tuple[Path, list[Spec]], tmp_path: Path) -> None:
    model, requests = specs
    with serve(tmp_path, str(model), *TP, "--announce", str(tmp_path / "url")) as server:
        answers, late = run(server, requests, server.terminate)
        assert server.wait() == 0, server.log
        assert not (tmp_path / "url").exists()
        assert "error" not in server.log
    assert [find_problem(answer, spec) for answer, spec in zip(answers, requests, strict=True)] == [None] * STREAMS
    assert all(answer.complete and len(answer.tokens) == TOKENS for answer in answers)
    assert late is not None
    assert (late.status, late.error and late.error["code"]) == (503, "draining")


def test_a_rank_that_is_killed_under_load_ends_every_stream_with_an_error(
    specs: tuple[Path, list[Spec]], tmp_path: Path
) -> None:
    model, requests = specs
    with serve(tmp_path, str(model), *TP, "--announce", str(tmp_path / "url")) as server:
        (rank1,) = server.worker_pids()
        start = time.monotonic()
        answers, late = run(server, requests, lambda: os.kill(rank1, signal.SIGKILL))
        assert server.wait() == 1
        assert time.monotonic() - start < 30
        assert not (tmp_path / "url").exists()
    for answer, spec in zip(answers, requests, strict=True):
        assert answer.error is not None
        assert not answer.complete
        assert "rank 1" in answer.error["message"]
        assert answer.tokens == spec.expected[: len(answer.tokens)]  # nothing wrong was sent before
        assert 0 < len(answer.tokens) < TOKENS
    assert late is None or late.status == 503
    assert server.log.count("yalis: error") <= 1
