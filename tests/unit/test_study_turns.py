"""Who runs when, and whose failure ends a benchmark."""

from __future__ import annotations

import pytest

from yalis.study.peers.interleaving import Report, take_turns


def run(engine: int, work: int, report: Report) -> int:
    report("at it")
    if work == engine:
        raise RuntimeError("no more")
    return engine * work


def test_all_run_in_each_turn_and_a_peer_that_fails_stops() -> None:
    heard: list[str] = []
    taken = take_turns([("ours", 10), ("theirs", 2), ("none", "not there")], [1, 2, 3], 1, run, heard.append)
    assert taken == [[20, 30], "RuntimeError: no more", "not there"]
    turns = [
        *("ours, warm-up", "theirs, warm-up"),
        *("ours, repeat 1/2", "theirs, repeat 1/2"),
        "ours, repeat 2/2",
    ]
    assert heard == [text for turn in turns for text in (turn, f"{turn}: at it")]


def test_our_own_failure_is_raised() -> None:
    with pytest.raises(RuntimeError, match="no more"):
        take_turns([("ours", 1), ("theirs", 2)], [1], 0, run, lambda text: None)
