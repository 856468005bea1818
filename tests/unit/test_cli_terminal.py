"""Progress: drawn over on a terminal, a line now and then in a log."""

from __future__ import annotations

import io

import pytest

from yalis.cli.terminal import ProgressLine


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr("yalis.cli.terminal.time.monotonic", lambda: now[0])
    return now


def walk(line: ProgressLine, clock: list[float], seconds: int) -> None:
    for second in range(seconds):
        line.show(f"at {second}")
        clock[0] += 1
    line.clear()


def test_a_log_gets_a_line_now_and_then(clock: list[float]) -> None:
    log = io.StringIO()
    walk(ProgressLine(log), clock, 50)
    assert log.getvalue() == "yalis: at 20\nyalis: at 40\n"


def test_short_work_leaves_nothing_in_a_log(clock: list[float]) -> None:
    log = io.StringIO()
    walk(ProgressLine(log), clock, 15)
    assert not log.getvalue()


def test_a_terminal_keeps_one_line_and_clears_it(clock: list[float]) -> None:
    screen = Screen()
    walk(ProgressLine(screen), clock, 3)
    assert screen.getvalue() == "\r\x1b[Kat 0\r\x1b[Kat 1\r\x1b[Kat 2\r\x1b[K"
