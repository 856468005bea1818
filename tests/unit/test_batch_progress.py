"""What a job says of its pace and of the time it may still take."""

from __future__ import annotations

from dataclasses import replace

import pytest

from yalis.batch.progress import JobProgress, Pace
from yalis.cli.batch import _status


def begun(total: int, limits: list[int]) -> tuple[Pace, JobProgress]:
    pace = Pace()
    for number, limit in enumerate(limits):
        pace.submit(number, limit)
    return pace, JobProgress(total, 0, 0, 0, 0, 0.0)


def test_nothing_is_said_before_a_first_result() -> None:
    pace, now = begun(4, [100] * 4)
    assert _status(pace.look(now, 5.0, dict.fromkeys(range(4), 0))) == "0/4 (0%) \u00b7 reading the first prompts"
    told = _status(pace.look(now, 10.0, dict.fromkeys(range(4), 50)))
    assert told == "0/4 (0%) \u00b7 4 running \u00b7 200 tokens, 20.0/s"


def test_limits_bound_the_time_where_all_ran_to_them() -> None:
    pace, now = begun(4, [10, 100, 100, 100])
    pace.finish(0, 10)
    now = pace.look(JobProgress(4, 1, 0, 0, 10, 0.0), 10.0, {1: 10, 2: 10, 3: 10})
    assert now.left is not None
    assert now.left.seconds == pytest.approx(270 / 4)  # 270 tokens at 4 tokens/s
    assert _status(now).endswith("\u00b7 0.1 requests/s \u00b7 at most 1m08s left")


def test_short_answers_make_the_rest_short() -> None:
    pace, _ = begun(10, [1000] * 4)
    for number in range(2):
        pace.finish(number, 50)
    now = pace.look(JobProgress(10, 2, 0, 0, 100, 0.0), 10.0, {2: 10, 3: 0})
    assert now.left is not None
    assert now.left.seconds == pytest.approx((40 + 50 + 6 * 50) / 11.0)  # two in flight, six not read yet
    assert "about 35s left" in _status(now)


def test_one_long_answer_is_not_done_in_a_second() -> None:
    """At the speed of one, and for as long again as it has gone: not at that of the crowd that has left."""
    pace, now = begun(37, [1000] * 37)
    now = pace.look(now, 2.0, dict.fromkeys(range(37), 10))  # 5 tokens/s each
    for number in range(36):
        pace.finish(number, 10)
    now = pace.look(replace(now, done=36, output_tokens=360), 21.0, {36: 200})  # and 10 alone
    assert now.left is not None
    assert 200 / 10 < now.left.seconds < 200 / 8
    near = pace.look(now, 100.0, {36: 990})
    assert near.left is not None
    assert near.left.seconds < 2  # the limit is near
