"""When the liveness monitors end a job, and with which message. Time passes by calls of `_tick`."""

from __future__ import annotations

import json
import math
import os
import signal
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from yalis.launch import heartbeat, liveness
from yalis.launch.heartbeat import CLOSING, IDLE, LOADING, OPENING, RankState, find_culprit
from yalis.launch.link import LinkLost
from yalis.launch.liveness import WorkerMonitor, print_error
from yalis.launch.rank0_monitor import Rank0Monitor
from yalis.launch.rank_info import RankInfo

COMPUTING, WAITING = (6, 5, 41, 41, 0), (6, 5, 42, 41, 0)


class SentMessages:
    """A link that records what is sent."""

    def __init__(self) -> None:
        self.messages: list[Any] = []
        self.keepalive_s: float | None = None

    def set_keepalive(self, seconds: float) -> None:
        self.keepalive_s = seconds

    def send_frame(self, frame: bytes) -> None:
        self.messages.append(json.loads(frame[frame.index(b"{") :]))


def make_members(*nodes: int) -> tuple[RankInfo, ...]:
    return tuple(RankInfo(rank, f"host{node}", node, 0, "127.0.0.1", os.getpid()) for rank, node in enumerate(nodes))


class Monitored(Rank0Monitor):
    """Rank 0 of two ranks, without a thread. `ended` has the reasons why the job would have ended."""

    def __init__(self, node: int) -> None:
        self.link = SentMessages()
        super().__init__(make_members(0, node), {1: self.link}, None, launched=False)  # type: ignore[dict-item]
        self.ended: list[tuple[str, int]] = []

    def _end_job(self, message: str, traceback: str | None = None, kill: int | None = None, status: int = 1) -> None:
        self.ended.append((message, status))

    def run(self, seconds: int, rank1: tuple[int, ...] | None = None) -> None:
        """Let time pass until the job ends. `rank1`: the counters in the heartbeats of rank 1; None: it is silent."""
        for _ in range(seconds):
            if rank1 is not None:
                self._states[1].update(rank1)
                self._unheard.discard(1)
            self._note_stop(1.0, self._idle_state())
            self._tick(1.0)
            if self.ended:
                return


@pytest.fixture
def here() -> Iterator[Monitored]:
    monitor = Monitored(node=0)
    yield monitor
    monitor._wakeup.close()


@pytest.fixture
def elsewhere() -> Iterator[Monitored]:
    monitor = Monitored(node=1)
    yield monitor
    monitor._wakeup.close()


def test_a_silent_process_that_runs_on_this_host_has_the_step_timeout(here: Monitored) -> None:
    here.set_phase("running")
    here.run(1, COMPUTING)
    here.run(590)
    assert not here.ended
    here.run(20)
    assert "rank 1 on host0" in here.ended[0][0]
    assert "its process runs, but hangs or does not release Python's GIL" in here.ended[0][0]


def test_a_stopped_process_on_this_host_ends_the_job(here: Monitored, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "_process_state", lambda pid: "T")
    here.run(70)
    assert here.ended[0][0].endswith("has not answered for 61 s: it is stopped (SIGSTOP)")


@pytest.mark.parametrize(("step_timeout", "seconds"), [(600, 61), (10, 11), (3600, 361), (0, math.inf)])
def test_a_silent_rank_on_another_host(elsewhere: Monitored, step_timeout: float, seconds: float) -> None:
    elsewhere.set_step_timeout(step_timeout)
    elsewhere.run(1000)
    assert [f"for {seconds} s" in message for message, _ in elsewhere.ended] == [True] * (seconds < math.inf)


@pytest.mark.parametrize(
    ("idle", "state", "node", "silent_s", "lost"),
    [
        (True, "T", 0, 1e6, False),  # Ctrl-Z between two calls of generate()
        (True, "", 1, 1e6, False),
        (False, "S", 0, 500, False),  # holds Python's GIL
        (False, "S", 0, 601, True),
        (False, "T", 0, 59, False),
        (False, "T", 0, 61, True),
        (False, "", 0, 61, True),
        (False, "S", 1, 61, True),
    ],
)
def test_when_other_ranks_give_up_a_silent_rank_0(monkeypatch, idle, state, node, silent_s, lost) -> None:
    monkeypatch.setattr(heartbeat, "_process_state", lambda pid: state)
    monitor = WorkerMonitor(make_members(node, 0), 1, SentMessages())  # type: ignore[arg-type]
    monitor._handle({"beat": [600.0, idle, False]})
    assert monitor._is_rank0_lost(silent_s) == lost
    monitor._handle({"beat": [0, idle, False]})
    assert not monitor._is_rank0_lost(silent_s)


def test_tcp_notices_that_the_host_of_an_idle_rank_0_is_down() -> None:
    monitor = WorkerMonitor(make_members(1, 0), 1, SentMessages())  # type: ignore[arg-type]
    for step_timeout, keepalive_s in ((10.0, 10.0), (3600.0, 60.0), (0, 60.0)):
        monitor._handle({"beat": [step_timeout, True, False]})
        assert monitor._link.keepalive_s == keepalive_s  # type: ignore[attr-defined]


def test_a_stop_counts_unless_rank_0_was_idle_all_the_time(here: Monitored) -> None:
    """The phase may change within a second before the stop, or after it and before the monitor thread goes on."""
    here.set_phase("running")
    busy = here._idle_state()
    here.set_phase(IDLE)
    here.set_idle()
    idle = here._idle_state()
    here._note_stop(100.0, idle)
    assert here._stopped_s == 0.0
    here._note_stop(100.0, busy)
    assert here._stopped_s == 100.0
    here._stopped_s = 0.0
    here.set_phase("running")
    here._note_stop(100.0, idle)
    assert here._stopped_s == 100.0


def test_rank_0_announces_at_once_that_it_is_idle(here: Monitored) -> None:
    sent = here.link.messages
    here.set_phase("running")
    here.set_idle()  # has no effect during a step
    here.set_phase(IDLE)
    assert sent == []
    here.set_idle()
    here.set_idle()
    assert sent == [{"beat": [600.0, True, False]}]
    here.set_phase(CLOSING)
    assert sent[1:] == [{"beat": [600.0, False, False]}]


# Ctrl-C and SIGTERM


@pytest.mark.parametrize(("number", "seconds"), [(signal.SIGINT, 600), (signal.SIGTERM, 20)])
def test_a_long_step_of_healthy_ranks_continues_after_a_signal(
    elsewhere: Monitored, number: signal.Signals, seconds: int
) -> None:
    elsewhere.set_phase("running")
    elsewhere.run(100, COMPUTING)
    elsewhere._handle_signals(bytes([number]))
    elsewhere.run(min(seconds, 400), COMPUTING)
    assert not elsewhere.ended
    assert elsewhere.link.messages[-1]["beat"][2]  # so that the other ranks wait too
    elsewhere.run(300, COMPUTING)
    assert elsewhere.ended[0][1] == (1 if number == signal.SIGINT else 143)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_job_with_a_silent_rank(elsewhere: Monitored, number: signal.Signals) -> None:
    elsewhere.set_phase("running")
    elsewhere.run(1, COMPUTING)
    elsewhere._handle_signals(bytes([number]))
    elsewhere.run(8)
    assert not elsewhere.ended
    elsewhere.run(2)
    assert elsewhere.ended[0][1] == 128 + number
    assert "rank 1 on host1" in elsewhere.ended[0][0]


def test_a_long_step_at_the_end_is_completed(here: Monitored) -> None:
    """After Ctrl-C another replica may be in a step when rank 0 closes the engine."""
    here.set_phase(CLOSING)
    here.run(500, COMPUTING)
    assert not here.ended
    here.run(200, (6, 6, 41, 41, 0))
    assert "the end of the job for 60 s" in here.ended[0][0]


# Rank 0 was stopped itself


def test_a_death_long_after_rank_0_was_stopped_is_a_death(here: Monitored) -> None:
    lost = LinkLost("closed", "rank 1 on host0")
    here._note_stop(100.0, here._idle_state())
    here._handle_death(1, lost)
    here._tick(100.0)
    here._tick(1.0)  # rank 1 has sent no heartbeat since
    here._handle_death(1, lost)
    here.run(1, COMPUTING)
    assert len(here.ended) == 2
    here.ended.clear()
    assert here._stopped_s == 0.0
    here._handle_death(1, lost)
    assert " died" in here.ended[0][0]


def test_a_stop_while_rank_0_ends_is_a_stop(here: Monitored, caplog: pytest.LogCaptureFixture) -> None:
    here.set_phase(CLOSING)
    here._local = SimpleNamespace(exit_status=lambda *_: "exit status 1")  # type: ignore[assignment]
    here.closing = True
    here._note_stop(100.0, here._idle_state())
    here._handle_death(1, LinkLost("closed", "rank 1 on host0"))
    assert "was stopped for 100 s" in caplog.text
    assert "died" not in caplog.text


def test_a_death_while_the_user_held_the_gil_is_a_death(here: Monitored) -> None:
    here.set_phase(IDLE)
    here.set_idle()
    here._note_stop(100.0, here._idle_state())
    here._handle_death(1, LinkLost("closed", "rank 1 on host0"))
    assert " died" in here.ended[0][0]


# Steps


def test_progress_restarts_the_step_timeout(elsewhere: Monitored) -> None:
    for entered in range(20):
        elsewhere.run(100, (6, 5, entered, entered, 0))
    assert not elsewhere.ended
    elsewhere.run(700, (6, 5, 19, 19, 0))
    assert "rank 1 on host1" in elsewhere.ended[0][0]
    assert "holds up a step for 600 s" in elsewhere.ended[0][0]


def test_a_rank_that_opens_the_model_may_download_it(elsewhere: Monitored) -> None:
    elsewhere.set_phase(LOADING)
    elsewhere._phases[1] = OPENING
    with elsewhere.progress.step():
        elsewhere.run(2000, (5, 5, 41, 41, 0))
        assert not elsewhere.ended
        elsewhere._phases[1] = LOADING
        elsewhere.run(590, COMPUTING)
        assert not elsewhere.ended


def test_nobody_is_blamed_for_a_device_that_hangs() -> None:
    """Rank 0 waits for the tokens of its GPU, and the other ranks for the next plan."""
    states = [RankState(), RankState()]
    for state, counters in zip(states, (WAITING, (6, 6, 42, 41, 0)), strict=True):
        state.update(counters)
        state.advance(9)
        state.update(counters)
    assert find_culprit(states) is None


# Messages


def test_a_message_that_is_not_utf8_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    print_error("cannot read models/\udcff")
    assert capfd.readouterr().err == "yalis: cannot read models/\\udcff\n"


def test_printing_to_a_full_pipe_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liveness, "PRINT_S", 0.3)
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    while True:
        try:
            os.write(writer, b"x" * 4096)
        except BlockingIOError:
            break
    os.set_blocking(writer, True)
    stderr = os.dup(2)
    os.dup2(writer, 2)
    begin = time.monotonic()
    try:
        print_error("rank 1 died")
    finally:
        os.dup2(stderr, 2)
        for fd in (reader, writer, stderr):
            os.close(fd)
    assert time.monotonic() - begin < 5


def test_an_error_in_the_monitor_ends_the_job(monkeypatch: pytest.MonkeyPatch, capfd: Any, here: Monitored) -> None:
    statuses: list[int] = []
    monkeypatch.setattr(os, "_exit", statuses.append)
    monkeypatch.setattr(here, "_run", lambda: [][1])
    here._run_or_exit()
    message = "rank 0 on host0: the liveness monitor failed (IndexError: list index out of range)"
    assert (statuses, here.failure, here.link.messages) == ([1], message, [{"failed": message}])
    assert capfd.readouterr().err == f"yalis: {message}\n"


def test_ranks_are_notified_before_the_message_is_printed(monkeypatch: pytest.MonkeyPatch, here: Monitored) -> None:
    printed: list[Any] = []
    monkeypatch.setattr("yalis.launch.rank0_monitor.print_error", lambda text: printed.append(here.link.messages[:]))
    here._broadcast_failure("rank 1 died", print_it=True)
    assert printed == [[{"failed": "rank 1 died"}]]
    assert here.failure_printed
