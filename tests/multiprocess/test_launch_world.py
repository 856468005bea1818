"""Ranks join, communicate and leave."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import time
from typing import Any

import pytest

from tests.multiprocess.launch_job import HOST, Job, free_port

LAUNCHED = pytest.mark.parametrize("launched", [False, True], ids=["self-started", "launched"])


def run(*args: Any, within: float, **more: Any) -> tuple[list[int], str, str]:
    with Job(*args, **more) as job:
        return job.finish(within)


def ranks(launched: bool, size: int) -> list[int] | None:
    return list(range(size)) if launched else None


@LAUNCHED
def test_four_ranks_gather_values_and_communicate_over_links(launched: bool) -> None:
    with Job("communicate", 4, ranks=ranks(launched, 4)) as job:
        statuses, output, errors = job.finish(20)
        assert set(statuses) == {0}
        # output of other ranks does not mix with results
        assert output.splitlines()[0] == "printed by rank 0"
        assert len(output.splitlines()) == 2
        if not launched:
            assert sorted(errors.splitlines()) == [f"printed by rank {rank}" for rank in (1, 2, 3)]
        shown = json.loads(output.splitlines()[1])
        assert shown["ranks"] == [0, 1, 2, 3]
        assert shown["answers"] == [[[1, [1, 300_000, [0]]]] * 2, [], [[3, [3, 300_000, [2]]]] * 2, []]
        assert shown["members"] == [[rank, HOST, 0, rank, "127.0.0.1"] for rank in range(4)]
        assert shown["empty"] == {}


def test_a_second_join_under_a_launcher_returns_the_same_world() -> None:
    with Job("rejoin", 3, ranks=[0, 1, 2]) as job:
        assert job.read() == {"ranks": [0, 1, 2]}
        assert job.finish(10)[0] == [0, 0, 0]


@LAUNCHED
def test_rank_0_exits_cleanly_without_close(launched: bool) -> None:
    statuses, _, errors = run("unclosed", 3, ranks=ranks(launched, 3), within=10)
    assert set(statuses) == {0}
    assert errors == ""


def test_a_rank_that_left_without_error_did_not_die() -> None:
    statuses, _, errors = run("leave", 3, within=15)
    assert statuses == [1]
    assert f"rank 2 on {HOST} has already ended" in errors
    assert "died" not in errors


@LAUNCHED
def test_a_rank_that_never_arrives_is_named_by_all(launched: bool) -> None:
    begin = time.monotonic()
    statuses, _, errors = run("absent", 4, 3, ranks=[0, 1, 3] if launched else None, within=12)
    assert 3 < time.monotonic() - begin < 10
    assert set(statuses) == {1}
    lines = [line for line in errors.splitlines() if "rank 2 of 4 did not arrive" in line and "within 3 s" in line]
    assert [line.split(":")[0] for line in sorted(lines)] == ["yalis[0]", "yalis[1]", "yalis[3]"]


def test_a_rank_that_exits_before_joining_is_detected_at_once() -> None:
    begin = time.monotonic()
    statuses, _, errors = run("early", 4, within=10)
    assert time.monotonic() - begin < 5
    assert statuses == [1]
    assert f"rank 2 on {HOST} ended before it joined (exit status 3)" in errors


def test_a_rank_without_rank_0_times_out_with_its_address() -> None:
    with Job("gather", 2, 1, ranks=[1]) as job:
        statuses, _, errors = job.finish(10)
        assert statuses == [1]
        assert f"did not reach rank 0 at 127.0.0.1, port {job.port}, within 1 s (rank 0 has not written" in errors


@LAUNCHED
def test_a_different_version_is_refused_naming_both(launched: bool) -> None:
    statuses, _, errors = run("version", 3, ranks=ranks(launched, 3), within=10)
    assert set(statuses) == {1}
    assert f"rank 2 on {HOST}" in errors
    assert "runs yalis 0.0.0.other and rank 0" in errors


def test_a_second_process_for_a_rank_is_refused() -> None:
    with Job("gather", 3, 20, ranks=[0, 1]) as job:
        wait_for_connections(job.port, 2)
        with Job("gather", 3, 20, ranks=[1], port=job.port) as duplicate:
            statuses, _, errors = duplicate.finish(10)
        assert statuses == [1]
        assert f"is a duplicate: pid {job.processes[1].pid} on {HOST} is rank 1 already" in errors
        with Job("gather", 3, 20, ranks=[2], port=job.port) as rest:
            assert job.read() == {"ranks": [0, 1, 2]}
            assert job.finish(10)[0] + rest.finish(10)[0] == [0, 0, 0]


def test_a_rank_that_dies_during_the_rendezvous_is_named_to_late_ranks() -> None:
    with Job("gather", 3, 20, ranks=[0, 1]) as job:
        wait_for_connections(job.port, 2)
        job.processes[1].kill()
        job.processes[1].wait()
        statuses, _, late = run("gather", 3, 20, ranks=[2], port=job.port, within=10)
        statuses += job.finish(10)[0]
        assert statuses == [1, 1, -signal.SIGKILL]
        assert f"rank 1 on {HOST} (pid {job.processes[1].pid}) died before all ranks had joined" in late


def wait_for_connections(port: int, count: int) -> None:
    """Wait until rank 0 has this many connections; each rank opens two."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        with open("/proc/net/tcp") as file:
            rows = [line.split() for line in file][1:]
        if sum(row[2].endswith(f":{port:04X}") and row[3] == "01" for row in rows) >= count:
            break
        time.sleep(0.05)
    time.sleep(0.2)


def test_unrelated_clients_do_not_disturb_the_rendezvous() -> None:
    with Job("gather", 2, 20, ranks=[0]) as job:
        silent = connect(job.port)
        for data in (b"GET / HTTP/1.0\r\n\r\n" + b"x" * 100, b"\0\0\0\x02{}" + b"y" * 100, b"YALIS\0\0\1" + b"z" * 100):
            with connect(job.port) as client:
                client.sendall(data)
                client.settimeout(5)
                with contextlib.suppress(ConnectionResetError):
                    assert client.recv(1000) == b""  # rank 0 tells a stranger nothing
        with silent, Job("gather", 2, 20, ranks=[1], port=job.port) as late:
            assert job.read() == {"ranks": [0, 1]}
            assert job.finish(10)[0] == late.finish(10)[0] == [0]


def connect(port: int) -> socket.socket:
    deadline = time.monotonic() + 10
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port))
        except ConnectionRefusedError:
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_a_rank_of_another_job_is_refused() -> None:
    with Job("gather", 2, 20, ranks=[0], secret="a" * 16) as job:
        connect(job.port).close()
        statuses, _, errors = run("gather", 2, 1, ranks=[1], port=job.port, restart=7, secret="a" * 16, within=10)
        assert statuses == [1]
        assert f"the process at 127.0.0.1, port {job.port} does not know the job's secret" in errors


def test_a_wrong_number_of_ranks_is_refused() -> None:
    statuses, _, errors = run("gather", 3, ranks=[0, 1], world=2, within=10)
    assert statuses == [2, 2]
    assert "this model is split over 3 ranks and torchrun started 2; type torchrun --nproc-per-node 3" in errors


def test_ctrl_c_reaches_only_rank_0_and_ends_all_ranks() -> None:
    with Job("serve", 3) as job:
        job.read()
        os.killpg(job.rank0.pid, signal.SIGINT)
        statuses, _, errors = job.finish(10)
        assert statuses == [-signal.SIGINT]
        assert errors.count("KeyboardInterrupt") == 1
        assert "died" not in errors


def test_ctrl_c_under_a_launcher_is_handled_by_rank_0() -> None:
    with Job("serve", 3, ranks=[0, 1, 2]) as job:
        job.read()
        for process in reversed(job.processes):
            os.kill(process.pid, signal.SIGINT)
        statuses, _, errors = job.finish(10)
        assert statuses == [-signal.SIGINT, 0, 0]
        assert errors.count("KeyboardInterrupt") == 1


def test_sigterm_under_a_launcher_gives_rank_0_time_to_close() -> None:
    with Job("terminated", 3, ranks=[0, 1, 2]) as job:
        job.read()
        for process in reversed(job.processes):
            os.kill(process.pid, signal.SIGTERM)
            time.sleep(0.1)
        statuses, _, errors = job.finish(10)
        assert statuses == [143, 143, 143]
        assert "died" not in errors


def test_the_port_is_free_after_the_job() -> None:
    with Job("communicate", 2, ranks=[0, 1]) as job:
        job.finish(10)
        socket.create_server(("127.0.0.1", job.port)).close()
        assert free_port()
