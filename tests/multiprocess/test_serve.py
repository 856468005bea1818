"""`yalis serve` as a process on two ranks: drain, stop, dead ranks, and clients that disconnect."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.multiprocess.launch_job import HOST
from tests.multiprocess.serve_job import ServeJob, serve
from tests.tiny_chat import save_tiny_chat

LONG: dict[str, Any] = {"temperature": 0, "max_tokens": 4000, "extra_body": {"ignore_eos": True}}
TP = ("--tp", "2", "--threads", "1", "--kv-memory", "0.05")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_chat(tmp_path_factory.mktemp("model"), max_position=4096))


@pytest.fixture(scope="module")
def shared(tiny: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeJob]:
    """For tests that leave the server running."""
    with serve(tmp_path_factory.mktemp("serve"), tiny, "--served-model-name", "tiny", *TP) as running:
        yield running


@pytest.fixture
def job(tiny: str, tmp_path: Path) -> Iterator[ServeJob]:
    with serve(tmp_path, tiny, "--served-model-name", "tiny", *TP) as running:
        yield running


def stream(job: ServeJob, **changes: Any) -> Any:
    return job.openai.completions.create(model="tiny", prompt="hello", stream=True, **{**LONG, **changes})


def test_sigterm_finishes_what_runs_and_refuses_what_is_new(job: ServeJob) -> None:
    chunks = iter(stream(job, max_tokens=800))
    next(chunks)
    job.terminate()
    time_out = time.monotonic() + 10
    while httpx.get(f"{job.url}/health").status_code == 200:
        assert time.monotonic() < time_out
    with pytest.raises(openai.InternalServerError, match="shutting down") as error:
        job.openai.completions.create(model="tiny", prompt="hello", max_tokens=1)
    assert error.value.status_code == 503
    assert "retry-after" in error.value.response.headers
    assert list(chunks)[-1].choices[0].finish_reason == "length"
    assert job.wait() == 0, job.log


def test_a_second_sigterm_stops_at_once(job: ServeJob) -> None:
    chunks = iter(stream(job))
    next(chunks)
    job.terminate()
    while httpx.get(f"{job.url}/health").status_code == 200:
        pass
    job.terminate()
    with pytest.raises(openai.APIError, match="closed"):
        list(chunks)
    assert job.wait() == 128 + signal.SIGTERM
    assert "yalis: stopped" in job.log


@pytest.mark.parametrize("busy", [True, False])
def test_a_killed_rank_ends_streams_and_the_process(job: ServeJob, busy: bool) -> None:
    chunks = iter(stream(job)) if busy else None
    if chunks is not None:
        next(chunks)
    (worker,) = job.worker_pids()
    os.kill(worker, signal.SIGKILL)
    begin = time.monotonic()
    if chunks is not None:
        with pytest.raises(openai.APIError, match=f"rank 1 on {HOST}"):
            list(chunks)
    assert job.wait() == 1
    assert time.monotonic() - begin < 10
    assert f"rank 1 on {HOST} (pid {worker}" in job.log
    assert "died" in job.log


def test_a_client_that_disconnects_frees_its_blocks(shared: ServeJob) -> None:
    for _ in range(3):
        chunks = stream(shared)
        next(iter(chunks))
        assert shared.metric("num_requests_running") == 1
        chunks.response.close()
        shared.wait_for("num_requests_running", 0)
        shared.wait_for("kv_cache_usage_perc", 0)
    # without streaming nothing is sent until the end, but the connection is watched
    address = httpx.URL(shared.url)
    body = b'{"prompt":"hello","max_tokens":4000,"ignore_eos":true}'
    with socket.create_connection((address.host, address.port or 0)) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {address.host}\r\nContent-Type: application/json\r\n"
        connection.sendall(head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        shared.wait_for("num_requests_running", 1)
    shared.wait_for("num_requests_running", 0)
    shared.wait_for("kv_cache_usage_perc", 0)
    assert shared.metric("request_aborts_total") == 4


def test_an_idle_server_uses_no_cpu(shared: ServeJob) -> None:
    shared.openai.completions.create(model="tiny", prompt="hello", max_tokens=4)
    pids = [shared.process.pid, *shared.worker_pids()]
    time.sleep(1)
    before = [cpu_seconds(pid) for pid in pids]
    time.sleep(5)
    used = [cpu_seconds(pid) - one for pid, one in zip(pids, before, strict=True)]
    assert max(used) <= 0.1, used
    assert shared.openai.completions.create(model="tiny", prompt="hello", max_tokens=4).choices[0].finish_reason


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_parallel_clients_get_the_answers_of_one(shared: ServeJob) -> None:
    def ask(index: int) -> str:
        answer = shared.openai.completions.create(
            model="tiny", prompt=f"question {index}", temperature=1, seed=index, max_tokens=40
        )
        return answer.choices[0].text

    alone = [ask(index) for index in range(8)]
    together: dict[int, str] = {}
    threads = [threading.Thread(target=lambda i=i: together.__setitem__(i, ask(i))) for i in range(8)]  # type: ignore[misc]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [together[index] for index in range(8)] == alone
