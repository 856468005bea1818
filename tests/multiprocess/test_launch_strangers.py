"""Processes of other users can neither join a job, nor pose as its rank 0, nor end it."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import signal
import socket
import struct
import time
from pathlib import Path
from typing import Any

import pytest

from tests.multiprocess.launch_job import Job, free_port
from tests.multiprocess.test_launch_world import connect
from tests.system.strangers import as_nobody, call, nobody_running
from yalis.launch.acceptor import reserve_descriptors
from yalis.version import __version__

JOB = "torchrun - restart 0"  # the name of the jobs in these tests, which other users can guess
SECRET = "4b1d7c0e95f24a6d8e3f"


def frame(data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + data


def legacy_hello(channel: str = "control", **values: Any) -> bytes:
    """Return the hello of versions that had the job's name as their secret."""
    hello = {"secret": JOB, "job": JOB, "version": __version__, "rank": 1, "size": 2, "channel": channel}
    hello |= {"host": "evil", "pid": 1, "machine": "evil", "address": "127.0.0.1"}
    return frame(json.dumps({**hello, **values}).encode())


def send(port: int, data: bytes) -> bytes:
    """Send data to rank 0 and return what it answers within a second."""
    with socket.create_connection(("127.0.0.1", port)) as sock:
        sock.settimeout(1)
        with contextlib.suppress(OSError):
            sock.sendall(data)
            return sock.recv(1 << 16)
    return b""


def finish_with_rank_1(job: Job, **more: Any) -> None:
    with Job("gather", 2, 50, ranks=[1], port=job.port, **more) as late:
        assert job.read() == {"ranks": [0, 1]}
        assert job.finish(10)[0] == late.finish(10)[0] == [0]


def test_another_user_who_knows_the_job_cannot_join_it() -> None:
    """Finding V1."""

    def attack(port: int) -> list[Any]:
        answers: list[Any] = [send(port, frame(b"{}")), send(port, legacy_hello()), send(port, legacy_hello("watch"))]
        for path in Path("/tmp").glob("yalis-*"):
            try:
                answers.append(list(path.iterdir()))
            except PermissionError:
                answers.append(b"")
        return [answer for answer in answers if answer]

    with Job("gather", 2, 20, ranks=[0]) as job:
        connect(job.port).close()
        assert as_nobody(attack, job.port) == []
        finish_with_rank_1(job)


def test_a_guessed_secret_does_not_authenticate() -> None:
    from yalis.launch.auth import HandshakeError, Method, authenticate

    def attack(port: int, secret: bytes) -> str:
        with socket.create_connection(("127.0.0.1", port)) as sock:
            try:
                authenticate(sock, Method.HOST_FILE, JOB, secret, b"rendezvous")
            except HandshakeError as error:
                return str(error)
        return "accepted"

    with Job("gather", 2, 20, ranks=[0]) as job:
        connect(job.port).close()
        for secret in (b"", JOB.encode(), b"insecure"):
            assert as_nobody(attack, job.port, secret) == "does not know the job's secret"
        finish_with_rank_1(job)


def pose_as_rank_0(server: socket.socket, answer: bytes) -> None:
    """Accept connections and give each the same answer."""
    held = []
    while True:
        sock, _ = server.accept()
        held.append(sock)
        sock.sendall(answer)


def relay(server: socket.socket, port: int) -> None:
    """Pass the bytes of one connection to and from another port."""
    while True:
        near, _ = server.accept()
        with near, socket.create_connection(("127.0.0.1", port)) as far:
            ends = {near: far, far: near}
            while data := {sock: sock.recv(1 << 16) for sock in select.select(list(ends), [], [], 5)[0]}:
                for sock, received in data.items():
                    ends[sock].sendall(received)
                if not all(data.values()):
                    break


@pytest.mark.parametrize("version", ["old", "new"])
def test_an_impostor_on_the_port_of_rank_0_is_not_accepted(version: str) -> None:
    """Finding V2."""
    member = {"node": 0, "local_rank": 0, "address": "127.0.0.1", "host": "evil", "pid": 1}
    table = {"members": [{**member, "rank": rank} for rank in range(2)]}
    answers = [{"here": 1}, table]
    answer = b"".join(frame(json.dumps(answer).encode()) for answer in answers)
    if version == "new":
        answer = b"YALIS\0\0\1" + b"\0\1\0\0" + os.urandom(64) + answer
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        nobody_running(pose_as_rank_0, server, answer),
        Job("gather", 2, 2, ranks=[1], port=server.getsockname()[1], secret=SECRET) as job,
    ):
        statuses, _, errors = job.finish(20)
    assert statuses == [1]
    assert "did not reach rank 0" in errors
    assert "secret" in errors or "another program" in errors


def test_an_impostor_cannot_relay_the_handshake_of_the_real_rank_0() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        Job("gather", 2, 20, ranks=[0], secret=SECRET) as job,
    ):
        connect(job.port).close()
        with (
            nobody_running(relay, server, job.port),
            Job("gather", 2, 1, ranks=[1], port=server.getsockname()[1], secret=SECRET) as fooled,
        ):
            statuses, _, errors = fooled.finish(20)
        assert statuses == [1]
        assert "does not know the job's secret" in errors
        finish_with_rank_1(job, secret=SECRET)


def test_bytes_of_strangers_do_not_end_the_job() -> None:
    """Finding V3, and bytes of the handshake in every wrong form."""
    hello = b"YALIS\0\0\1" + struct.pack(">BxH32s", 3, 0, bytes(32))
    attacks = [
        frame(b"[" * 60_000),
        legacy_hello(secret="\ud800"),
        legacy_hello(secret="x", job="é" * 20_000),
        b"",
        b"\xff" * 100_000,
        hello,
        hello + bytes(32),
        hello + os.urandom(100_000),
        *(hello[:8] + struct.pack(">BxH32s", method, 0xFFFF, bytes(32)) + bytes(0xFFFF) for method in range(8)),
        *(hello[:length] for length in range(1, len(hello), 7)),
    ]

    def attack(port: int) -> None:
        for data in attacks:
            with contextlib.suppress(ConnectionError):  # rank 0 has ended, which the job shows
                send(port, data)

    with Job("gather", 2, 40, ranks=[0]) as job:
        connect(job.port).close()
        as_nobody(attack, job.port)
        finish_with_rank_1(job)


def hold_connections(port: int, count: int, ready: int) -> None:
    held = []
    for _ in range(count):
        with contextlib.suppress(OSError):  # timeout: the queue of the port is full
            held.append(socket.create_connection(("127.0.0.1", port), timeout=0.2))
    os.write(ready, b"x")
    time.sleep(60)


@pytest.mark.parametrize(("limit", "connections"), [(1024, 1500), (40, 200)])
def test_idle_connections_do_not_take_the_descriptors_of_ranks(limit: int, connections: int) -> None:
    """Finding V8."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard < 2000:
        pytest.skip("this process may not open 2000 connections")
    reader, writer = os.pipe()
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2000), hard))
    try:
        with Job("gather", 2, 30, ranks=[0]) as job:
            resource.prlimit(job.rank0.pid, resource.RLIMIT_NOFILE, (limit, limit))
            connect(job.port).close()
            with nobody_running(hold_connections, job.port, connections, writer):
                assert os.read(reader, 1) == b"x"
                finish_with_rank_1(job)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        os.close(reader)
        os.close(writer)


def flood(port: int) -> None:
    """Open connections as fast as possible, and close old ones."""
    held: list[socket.socket] = []
    while True:
        sock = socket.socket()
        sock.setblocking(False)
        with contextlib.suppress(OSError):
            sock.connect(("127.0.0.1", port))
        held.append(sock)
        if len(held) > 700:
            held.pop(0).close()


def test_a_flood_of_connections_does_not_keep_a_rank_out() -> None:
    with Job("gather", 2, 60, ranks=[0]) as job:
        connect(job.port).close()
        with nobody_running(flood, job.port):
            time.sleep(0.5)
            finish_with_rank_1(job)


def test_the_limit_on_open_files_is_raised_for_many_ranks() -> None:
    def raised(ranks: int) -> tuple[int, int]:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, 4096))
        reserve_descriptors(ranks)
        return resource.getrlimit(resource.RLIMIT_NOFILE)

    assert call(raised, 100) == (1184, 4096)
    assert call(raised, 10_000) == (4096, 4096)


HELLO = {"version": __version__, "rank": 1, "size": 2, "channel": "control", "host": "b", "pid": 5}
HELLO |= {"machine": "m", "address": "127.0.0.1"}


def introduce(port: int, hello: Any) -> Any:
    """Authenticate with the job's secret, send this hello and return the answer."""
    from yalis.launch.auth import Method, authenticate
    from yalis.launch.link import Link

    sock = socket.create_connection(("127.0.0.1", port))
    authenticate(sock, Method.GIVEN, JOB, SECRET.encode(), b"rendezvous")
    link = Link(sock, "rank 0")
    link.send(hello)
    return link.receive()


MALFORMED: list[Any] = [[], {}, "hello", None]
MALFORMED += [{**HELLO, "rank": rank} for rank in ([1], True, -1, 1e300, 7, 1 << 80)]
MALFORMED += [{**HELLO, "host": host} for host in ("\ud800", "x\nyalis: error", "h" * 1000)]
MALFORMED += [{**HELLO, "channel": channel} for channel in ([], "other")]
MALFORMED += [{**HELLO, "size": {"a": 1}}, {**HELLO, "version": ["1"]}, {**HELLO, "address": "somewhere"}]


def test_a_malformed_hello_is_refused_and_the_job_goes_on() -> None:
    """Finding V9: these ended the job, most of them with a traceback."""
    with Job("gather", 2, 30, ranks=[0], secret=SECRET) as job:
        connect(job.port).close()
        for hello in MALFORMED:
            assert list(introduce(job.port, hello)) == ["refused"], hello
        finish_with_rank_1(job, secret=SECRET)


@pytest.mark.parametrize(
    ("change", "reason"),
    [({"version": "0.0.0"}, "runs yalis 0.0.0 and rank 0"), ({"size": 3}, "was started as one of 3 ranks, and rank 0")],
    ids=["version", "size"],
)
def test_a_rank_that_does_not_match_ends_the_job_with_a_sentence(change: dict[str, Any], reason: str) -> None:
    with Job("gather", 2, 20, ranks=[0], secret=SECRET) as job:
        connect(job.port).close()
        refused = introduce(job.port, {**HELLO, **change})["refused"]
        statuses, _, errors = job.finish(15)
    assert reason in refused
    assert statuses == [1]
    assert errors == f"yalis[0]: {refused}\n"


def test_different_sources_of_the_secret_are_named_on_both_sides() -> None:
    with Job("gather", 2, 3, ranks=[0]) as job:
        connect(job.port).close()
        with Job("gather", 2, 2, ranks=[1], port=job.port, secret=SECRET) as other:
            errors = other.finish(10)[2] + job.finish(10)[2]
    assert "gets the job's secret from a file on the host, and this rank from YALIS_SECRET" in errors
    assert "gets the job's secret from YALIS_SECRET, and this rank from a file on the host" in errors


def test_the_death_of_rank_0_between_two_connections_is_seen_at_once() -> None:
    """Finding F3."""
    port = free_port()
    with Job("die", 2, 30, ranks=[0], port=port) as job, Job("gather", 2, 30, ranks=[1], port=port) as other:
        job.rank0.wait(20)
        begin = time.monotonic()
        statuses, _, errors = other.finish(20)
    assert time.monotonic() - begin < 5
    assert statuses == [1]
    assert "rank 0 on 127.0.0.1 ended before all ranks had joined" in errors


def listening_ports(pids: list[int]) -> dict[int, str]:
    """Return the ports on which these processes listen, with their addresses as the kernel writes them."""
    sockets = {os.readlink(path) for pid in pids for path in Path(f"/proc/{pid}/fd").iterdir()}
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    local = [row[1].split(":") for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in sockets]
    return {int(port, 16): address for address, port in local}


def test_nobody_can_write_into_a_store_of_the_ranks() -> None:
    """Finding V7: torch's TCPStore accepts everyone."""

    def attack(port: int) -> bool:
        def text(data: bytes) -> bytes:
            return struct.pack("<Q", len(data)) + data

        validate, set_value, get_value = (struct.pack("<BI", 0, 0x3C85F7CE), b"\1", b"\3")  # of torch's protocol
        value = b"written by a stranger"
        return value in send(port, validate + set_value + text(b"/key") + text(value) + get_value + text(b"/key"))

    with Job("reduce", 2) as job:
        pids = job.read()["pids"]
        ports = listening_ports(pids)
        assert set(ports.values()) == {"0100007F"}  # gloo's, on 127.0.0.1
        assert [port for port in ports if as_nobody(attack, port)] == []
        os.kill(pids[0], signal.SIGUSR1)
        assert job.read() == {"sums": [[3.0, 3.0], [3.0, 3.0]]}
        assert job.finish(10)[0] == [0]


@pytest.mark.parametrize("secret", ["short", ""])
def test_a_short_secret_is_refused(secret: str) -> None:
    with Job("gather", 2, 5, ranks=[0, 1], secret=secret) as job:
        statuses, _, errors = job.finish(10)
    assert statuses == [2, 2]
    assert f"YALIS_SECRET has {len(secret)} characters; give at least 16 random ones" in errors


def test_no_secret_is_in_an_argument_list_or_left_on_disk() -> None:
    folder = Path(f"/tmp/yalis-{os.geteuid()}")
    with Job("serve", 2) as job:
        pids = job.read()["pids"]
        variables = [Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") for pid in pids]
        arguments = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in pids]
        (secret,) = [one.partition(b"=")[2] for one in variables[1] if one.startswith(b"YALIS_SECRET=")]
        assert len(secret) == 32
        assert not any(secret in one for one in arguments)
    before = set(folder.glob("*"))
    with Job("gather", 2, 20, ranks=[0, 1]) as job:
        assert job.read() == {"ranks": [0, 1]}
        job.finish(10)
    assert set(folder.glob("*")) <= before
