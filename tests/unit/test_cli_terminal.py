"""Progress: one redrawn line on a terminal, a line every 20 seconds in a log."""

from __future__ import annotations

import io

import pytest

from yalis.progress_line import ProgressLine


class FakeTerminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr("yalis.progress_line.time.monotonic", lambda: now[0])
    return now


def show_for(line: ProgressLine, clock: list[float], seconds: int) -> None:
    for second in range(seconds):
        line.show(f"at {second}")
        clock[0] += 1
    line.clear()


def test_a_log_gets_a_line_every_20_seconds(clock: list[float]) -> None:
    log = io.StringIO()
    show_for(ProgressLine(log), clock, 50)
    assert log.getvalue() == "yalis: at 20\nyalis: at 40\n"


def test_a_short_run_writes_nothing_to_a_log(clock: list[float]) -> None:
    log = io.StringIO()
    show_for(ProgressLine(log), clock, 15)
    assert not log.getvalue()


def test_a_terminal_keeps_one_line_and_clears_it(clock: list[float]) -> None:
    screen = FakeTerminal()
    show_for(ProgressLine(screen), clock, 3)
    assert screen.getvalue() == "\r\x1b[Kat 0\r\x1b[Kat 1\r\x1b[Kat 2\r\x1b[K"
