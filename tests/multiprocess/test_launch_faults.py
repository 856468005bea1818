"""A rank that dies ends the job within seconds, with a message, and leaves no process behind."""

from __future__ import annotations

import os
import signal
import socket
import time

import pytest

from tests.multiprocess.launch_job import HOST, Job

LAUNCHED = pytest.mark.parametrize("launched", [False, True], ids=["self-started", "launched"])
DEADLINE = 10.0


def ranks(launched: bool, size: int) -> list[int] | None:
    return list(range(size)) if launched else None


def kill(job: Job, rank: int) -> int:
    pid = int(job.read()["pids"][rank])
    os.kill(pid, signal.SIGKILL)
    return pid


@LAUNCHED
def test_a_killed_rank_is_named_by_rank_0(launched: bool) -> None:
    with Job("wait", 4, ranks=ranks(launched, 4)) as job:
        pid = kill(job, 2)
        statuses, _, errors = job.finish(DEADLINE)
    assert statuses == ([1, 1, -signal.SIGKILL, 1] if launched else [1])
    process = f"pid {pid}" if launched else f"pid {pid}, killed by SIGKILL"
    message = f"rank 2 on {HOST} ({process}) died while loading the model"
    printed = {line for line in errors.splitlines() if message in line}
    # Under a launcher the liveness monitor prints at once, before the launcher can kill rank 0 too.
    assert printed == {f"yalis[0]: {message}"} | ({f"yalis: {message}"} if launched else set())


@LAUNCHED
def test_a_stuck_rank_0_is_killed_after_printing_the_message(launched: bool) -> None:
    """Rank 0 hangs as in a collective that never returns."""
    with Job("serve", 3, ranks=ranks(launched, 3)) as job:
        begin = time.monotonic()
        kill(job, 1)
        statuses, _, errors = job.finish(DEADLINE)
    assert time.monotonic() - begin < 8
    assert statuses[0] == 1
    assert errors.count(f"rank 1 on {HOST}") == 1
    assert "died while running" in errors


@LAUNCHED
@pytest.mark.parametrize("scenario", ["wait", "serve"])
def test_all_ranks_end_when_rank_0_is_killed(launched: bool, scenario: str) -> None:
    with Job(scenario, 4, ranks=ranks(launched, 4)) as job:
        pid = kill(job, 0)
        statuses, _, errors = job.finish(DEADLINE)
        assert statuses == [-signal.SIGKILL, 1, 1, 1][: len(statuses)]
        phase = "loading the model" if scenario == "wait" else "running"
        assert errors.splitlines() == [f"yalis: rank 0 on {HOST} (pid {pid}) died while {phase}"] * 3
        if launched:
            socket.create_server(("127.0.0.1", job.port)).close()  # the port is free again


def test_ranks_exit_if_rank_0_is_killed_before_they_join() -> None:
    """They would wait as orphans otherwise."""
    with Job("absent", 4) as job:
        while len(job.left()) < 4:
            time.sleep(0.02)
        job.rank0.kill()
        sleeper = 1  # rank 2 of this scenario sleeps before it joins
        deadline = time.monotonic() + DEADLINE
        while len(job.left()) > sleeper and time.monotonic() < deadline:
            time.sleep(0.05)
        assert len(job.left()) == sleeper


def test_an_idle_rank_0_sees_the_failure_at_its_next_call_and_can_rejoin() -> None:
    with Job("idle", 3) as job:
        pid = kill(job, 2)
        seen = job.read()
        assert seen["error"] == seen["failure"] == f"rank 2 on {HOST} (pid {pid}, killed by SIGKILL) died"
        assert seen["children"] == []  # neither running nor zombies
        assert job.read() == {"ranks": [0, 1, 2]}
        assert job.finish(DEADLINE)[0] == [0]


@pytest.mark.full
def test_a_stuck_serving_rank_is_killed_after_rank_0_left() -> None:
    with Job("stuck", 3, ranks=[0, 1, 2]) as job:
        assert job.finish(20)[0] == [0, 1, 1]


@LAUNCHED
@pytest.mark.parametrize(
    ("scenario", "message"),
    [("fail", "no memory left"), ("crash", "ValueError: a bug"), ("crash_serving", "ValueError: a bug")],
)
def test_a_failing_rank_ends_the_job_with_its_message(scenario: str, message: str, launched: bool) -> None:
    with Job(scenario, 4, ranks=ranks(launched, 4)) as job:
        statuses, _, errors = job.finish(DEADLINE)
    assert set(statuses) == {1}
    assert f"yalis[0]: rank 2 on {HOST}: {message}" in errors.splitlines()
    assert ('raise ValueError("a bug")' in errors) == (scenario == "crash")  # Python prints an uncaught error
    assert "died" not in errors
