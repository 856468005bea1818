"""A leader's messages reach many followers through a tree, and a rank inside it that ends or hangs is named."""

from __future__ import annotations

import os
import signal
import time

from tests.multiprocess.launch_job import HOST, Job
from yalis.launch.fan_out import tree_parents

SIZE = 14
INNER = max(tree_parents(SIZE - 1))  # the last follower that forwards


def test_followers_receive_every_message_in_order_until_one_inside_the_tree_dies() -> None:
    assert INNER > 0
    with Job("fan_out", SIZE) as job:
        received = job.read()["received"]
        pid = int(job.read()["pids"][INNER])
        assert received == [list(range(40))] * (SIZE - 1)
        begin = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        statuses, _, errors = job.finish(20)
    assert time.monotonic() - begin < 10
    assert statuses == [1]
    message = f"rank {INNER} on {HOST} (pid {pid}, killed by SIGKILL) died while running"
    assert errors.splitlines() == [f"yalis[0]: {message}"]


def test_a_rank_inside_the_tree_that_is_stopped_is_named_and_does_not_block_the_leader() -> None:
    with Job("fan_out", SIZE) as job:
        job.read()
        pid = int(job.read()["pids"][INNER])
        os.kill(pid, signal.SIGSTOP)
        sent = job.read()["sent"]
        statuses, _, errors = job.finish(25)
    assert sent >= 100
    assert statuses == [1]
    assert len(errors.splitlines()) == 1
    assert f"yalis[0]: rank {INNER} on {HOST} (pid {pid}) has not answered for" in errors
    assert errors.rstrip().endswith("while running: it is stopped (SIGSTOP)")
