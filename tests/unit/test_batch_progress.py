"""The progress line of a batch job and its estimate of the time left."""

from __future__ import annotations

from dataclasses import replace

import pytest

from yalis.batch.progress import JobProgress, ProgressEstimator
from yalis.cli.batch import _status


def submitted(total: int, limits: list[int]) -> tuple[ProgressEstimator, JobProgress]:
    estimator = ProgressEstimator()
    for request_id, limit in enumerate(limits):
        estimator.submit(request_id, limit)
    return estimator, JobProgress(total, 0, 0, 0, 0, 0.0)


def test_no_estimate_before_the_first_result() -> None:
    estimator, now = submitted(4, [100] * 4)
    assert (
        _status(estimator.update(now, 5.0, dict.fromkeys(range(4), 0))) == "0/4 (0%) \u00b7 reading the first prompts"
    )
    status = _status(estimator.update(now, 10.0, dict.fromkeys(range(4), 50)))
    assert status == "0/4 (0%) \u00b7 4 running \u00b7 200 tokens, 20.0/s"


def test_estimate_is_an_upper_bound_while_all_reach_their_limits() -> None:
    estimator, now = submitted(4, [10, 100, 100, 100])
    estimator.finish(0, 10)
    now = estimator.update(JobProgress(4, 1, 0, 0, 10, 0.0), 10.0, {1: 10, 2: 10, 3: 10})
    assert now.time_left is not None
    assert now.time_left.seconds == pytest.approx(270 / 4)  # 270 tokens at 4 tokens/s
    assert _status(now).endswith("\u00b7 0.1 requests/s \u00b7 at most 1m08s left")


def test_short_completions_shorten_the_estimate() -> None:
    estimator, _ = submitted(10, [1000] * 4)
    for request_id in range(2):
        estimator.finish(request_id, 50)
    now = estimator.update(JobProgress(10, 2, 0, 0, 100, 0.0), 10.0, {2: 10, 3: 0})
    assert now.time_left is not None
    assert now.time_left.seconds == pytest.approx((40 + 50 + 6 * 50) / 11.0)  # two in flight, six not read yet
    assert "about 35s left" in _status(now)


def test_one_long_completion_is_estimated_at_the_speed_of_one_request() -> None:
    """It is expected to double its length, at its own speed and not at the throughput of the requests before."""
    estimator, now = submitted(37, [1000] * 37)
    now = estimator.update(now, 2.0, dict.fromkeys(range(37), 10))  # 5 tokens/s each
    for request_id in range(36):
        estimator.finish(request_id, 10)
    now = estimator.update(replace(now, done=36, output_tokens=360), 21.0, {36: 200})  # and 10 alone
    assert now.time_left is not None
    assert 200 / 10 < now.time_left.seconds < 200 / 8
    near = estimator.update(now, 100.0, {36: 990})
    assert near.time_left is not None
    assert near.time_left.seconds < 2  # the limit is near
