"""Interleaved engines: their order, and which failures end a benchmark."""

from __future__ import annotations

import pytest

from yalis.study.peers.interleaving import Report, run_interleaved


def run(engine: int, work: int, report: Report) -> int:
    report("running")
    if work == engine:
        raise RuntimeError("no more")
    return engine * work


def test_engines_alternate_and_a_failed_peer_runs_no_more() -> None:
    messages: list[str] = []
    outputs = run_interleaved([("ours", 10), ("theirs", 2), ("none", "not there")], [1, 2, 3], 1, run, messages.append)
    assert outputs == [[20, 30], "RuntimeError: no more", "not there"]
    turns = [
        *("ours, warm-up", "theirs, warm-up"),
        *("ours, repeat 1/2", "theirs, repeat 1/2"),
        "ours, repeat 2/2",
    ]
    assert messages == [text for turn in turns for text in (turn, f"{turn}: running")]


def test_a_failure_of_yalis_is_raised() -> None:
    with pytest.raises(RuntimeError, match="no more"):
        run_interleaved([("ours", 1), ("theirs", 2)], [1], 0, run, lambda text: None)
