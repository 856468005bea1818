"""Which rank the heartbeats show to hold up the job, and how a stopped process is described."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time

import pytest

from yalis.launch import heartbeat
from yalis.launch.heartbeat import Progress, RankState, StoppedTimer, describe_silence, find_culprit, silence_limit
from yalis.launch.rank_info import RankInfo

IDLE, COMPUTING, WAITING = (5, 5, 40, 40, 0), (6, 5, 41, 41, 0), (6, 5, 42, 41, 0)


def make_states(*counters: tuple[int, ...]) -> list[RankState]:
    """Return the states of ranks that have had these counters for 9 s."""
    states = [RankState() for _ in counters]
    for state, values in zip(states, counters, strict=True):
        state.update(values)
        state.advance(9)
        state.update(values)
    return states


@pytest.mark.parametrize(
    ("counters", "culprit"),
    [
        ((WAITING, COMPUTING), 1),  # tensor parallelism: rank 0 waits in a collective
        ((COMPUTING, WAITING, WAITING), 0),
        ((IDLE, IDLE, WAITING, COMPUTING), 3),  # data parallelism: the first replica has no work
        ((WAITING, WAITING), None),
        ((COMPUTING, COMPUTING), None),
        ((IDLE, IDLE), None),
    ],
)
def test_the_rank_that_computes_while_others_wait_holds_up_the_step(counters, culprit) -> None:
    assert find_culprit(make_states(*counters)) == culprit


def test_a_rank_without_heartbeats_is_the_culprit() -> None:
    states = make_states(COMPUTING, WAITING, WAITING)
    states[2].silent_s = 5.0
    assert find_culprit(states) == 2


def test_a_rank_that_makes_progress_is_not_the_culprit() -> None:
    states = make_states(COMPUTING, COMPUTING)
    states[0].update((7, 6, 50, 50, 0))
    assert find_culprit(states) == 1


def test_a_step_has_the_timeout_since_its_last_progress() -> None:
    state, progress = RankState(), Progress()
    state.advance(100)
    assert state.step_s == 0.0
    with progress.step():
        state.update(progress.counters())
        state.advance(2.0)
        assert state.step_s == 2.0
        with progress.waiting():
            state.update(progress.counters())  # it entered a collective
            state.advance(1.0)
            assert (state.step_s, state.waiting) == (1.0, True)
        with progress.reading(lambda: 4096):
            state.update(progress.counters())
            assert (state.step_s, state.waiting) == (0.0, False)
        state.advance(1.0)
    state.update(progress.counters())
    state.advance(1.0)
    assert (state.step_s, state.silent_s) == (0.0, 1.0)


def test_the_silence_limit() -> None:
    assert [silence_limit(seconds) for seconds in (0, 1, 10, 600, 3600)] == [math.inf, 3, 10, 60, 360]


def test_a_stopped_process_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "JOIN_STOPPED_S", 0.2)
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        member, timer = RankInfo(1, "a", 0, 1, "127.0.0.1", process.pid), StoppedTimer(process.pid)
        assert not timer.expired()
        name = f"rank 1 on a (pid {process.pid}) has not answered for 3 s"
        unknown = "its process is stopped, or its host or network is down"
        runs = "its process runs, but hangs or does not release Python's GIL"
        assert describe_silence(member, 3.2, "idle", same_host=True) == f"{name}: {runs}"
        assert describe_silence(member, 3.2, "idle", same_host=False) == f"{name}: {unknown}"
        os.kill(process.pid, signal.SIGSTOP)
        time.sleep(0.1)
        assert not timer.expired()
        time.sleep(0.3)
        assert timer.expired()
        assert describe_silence(member, 3.2, "running", True) == f"{name} while running: it is stopped (SIGSTOP)"
        assert describe_silence(member, 3.2, "running", False) == f"{name} while running: {unknown}"
    finally:
        process.kill()
        process.wait()
