"""Ranks on two hosts find each other under srun and mpirun."""

from __future__ import annotations

import json
import os
import shlex
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.launchers.launch import YALIS
from tests.launchers.slurm import Slurm
from tests.multihost.hosts import Hosts
from tests.system import needs
from tests.system.processes import ROOT
from tests.system.strangers import become_nobody, call, enter_namespace, running
from yalis.launch import endpoint
from yalis.launch.auth import HandshakeError, Method, authenticate
from yalis.launch.endpoint import derive_ports, open_endpoint
from yalis.launch.launchers import LaunchInfo
from yalis.planner.machine import load_machine
from yalis.version import __version__

JOIN = [sys.executable, str(ROOT / "tests/launchers/join_job.py")]


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with Hosts(2) as two:
        yield two


def test_srun_over_two_nodes(hosts: Hosts) -> None:
    with Slurm(hosts) as slurm:
        step = slurm.run(["srun", "--nodes=2", "--ntasks=3", *JOIN, "3"], timeout=60)
    assert step.returncode == 0, step.stderr
    first, second = hosts.names
    assert json.loads(step.stdout) == ["MUNGE", [[first, 0, 0], [first, 0, 1], [second, 1, 0]]]


def test_calibrate_under_srun_over_two_nodes(hosts: Hosts, tmp_path: Path) -> None:
    flags = [YALIS, "calibrate", "--device", "cpu", "--out", str(tmp_path / "two.json")]
    with Slurm(hosts) as slurm:
        uneven = slurm.run(["srun", "--nodes=2", "--ntasks=3", *flags])
        assert (uneven.returncode, (tmp_path / "two.json").exists()) == (2, False)
        assert "there are nodes with 1 and 2 ranks; start the same number on every node" in uneven.stderr
        step = slurm.run(["srun", "--nodes=2", "--ntasks=2", *flags])
    assert step.returncode == 0, step.stderr
    machine = load_machine(str(tmp_path / "two.json"))
    assert (machine.gpus_per_node, machine.max_nodes) == (1, 128)
    assert machine.nic_bytes_per_s.origin == "measured"
    measured = {name for name, one in machine.libraries.items() if one["net_hop_s"].origin == "measured"}
    assert measured >= {"gloo", "hierarchical"}


def legacy_answer(value: object) -> bytes:
    data = json.dumps(value).encode()
    return struct.pack(">I", len(data)) + data


def pose_as_rank_0(namespace: str, address: str, port: int) -> None:
    """Take the port of rank 0 before it starts, and accept every rank as older versions did."""
    enter_namespace(namespace)
    become_nobody()
    table = [{"rank": r, "node": r, "local_rank": 0, "host": "x", "address": address, "pid": 1} for r in range(2)]
    server = socket.create_server((address, port))
    held = []
    while True:
        held.append(server.accept()[0])
        held[-1].sendall(legacy_answer({"here": 1}) + legacy_answer({"members": table}))


def try_to_join(namespace: str, address: str, port: int, job: str) -> list[str]:
    """Send rank 0 the hello of older versions, whose secret was the job's name, and a MUNGE credential of nobody."""
    enter_namespace(namespace)
    become_nobody()
    hello: dict[str, object] = {"secret": job, "job": job, "version": __version__, "rank": 1, "size": 2, "pid": 1}
    hello |= {"channel": "control", "host": "x", "machine": "x", "address": address}
    answers = []
    for attempt in ("old", "new"):
        try:
            with socket.create_connection((address, port), timeout=3) as sock:
                if attempt == "old":
                    sock.sendall(legacy_answer(hello))
                    answers.append(sock.recv(1000).decode() or "closed the connection")
                else:
                    authenticate(sock, Method.MUNGE, job, None, b"rendezvous")
                    answers.append("accepted")
        except ConnectionResetError:
            answers.append("closed the connection")
        except (OSError, HandshakeError) as error:
            answers.append(str(error))
    return answers


def test_another_user_can_neither_join_a_job_of_srun_nor_pose_as_its_rank_0(hosts: Hosts, tmp_path: Path) -> None:
    """Findings V1 and V2: the other user knows the job id, on a cluster whose nodes have MUNGE."""
    go = tmp_path / "go"
    wait = f"test $SLURM_PROCID = 0 || while ! test -e {go}; do sleep 0.1; done; exec {shlex.join(JOIN)} 2"
    job, address = "srun 1.0", hosts.addresses[0]  # the first job of a new Slurm
    first_port, second_port = derive_ports(job)[:2]
    with (
        Slurm(hosts) as slurm,
        running(pose_as_rank_0, hosts.names[0], address, first_port),
        ThreadPoolExecutor() as pool,
    ):
        os.environ["YALIS_MUNGE_SOCKET"] = str(slurm.folder / "munge.socket")
        try:
            step = pool.submit(slurm.run, ["srun", "--nodes=2", "--ntasks=2", "sh", "-c", wait], timeout=60)
            answers: list[str] = []
            deadline = time.monotonic() + 20
            while not answers or "Connection refused" in answers[0]:
                assert time.monotonic() < deadline
                answers = call(try_to_join, hosts.names[1], address, second_port, job)
                time.sleep(0.1)
        finally:
            del os.environ["YALIS_MUNGE_SOCKET"]
            go.touch()
        done = step.result()
    assert answers == ["closed the connection"] * 2
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == ["MUNGE", [[hosts.names[0], 0, 0], [hosts.names[1], 1, 0]]]


def test_mpirun_over_two_hosts(hosts: Hosts, tmp_path: Path) -> None:
    needs.program("mpirun")
    agent = tmp_path / "agent.sh"
    enter = shlex.join(hosts.command(1, ["sh", "-c"]))
    agent.write_text(f'#!/bin/sh\nshift\nexec {enter} "$*"\n')  # in place of ssh: agent.sh HOST COMMAND...
    agent.chmod(0o755)
    first, second = hosts.names
    flags = ["--allow-run-as-root", "--bind-to", "none", "--mca", "plm_rsh_agent", str(agent)]
    network = ["--mca", "btl", "tcp,self", "--mca", "btl_tcp_if_include", "eth0", "--mca", "oob_tcp_if_include", "eth0"]
    start = ["mpirun", *flags, *network, "--host", f"{first}:2,{second}:1", "-x", "PYTHONPATH", *JOIN, "3"]
    process = hosts.run(0, start, stdout=subprocess.PIPE, text=True)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert json.loads(out) == ["MPI broadcast", [[first, 0, 0], [first, 0, 1], [second, 1, 0]]]


def run_by_hand(hosts: Hosts, *arguments: str) -> list[tuple[int, str, str]]:
    """Run a rank on each host, without MUNGE and without a home directory. Returns statuses and outputs."""
    variables = {"WORLD_SIZE": "2", "MASTER_ADDR": hosts.addresses[0], "MASTER_PORT": "29777"}
    variables |= {"HOME": "/proc", "YALIS_MUNGE_SOCKET": "/proc/none"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    ranks = [hosts.run(host, [*JOIN, "2", *arguments], {**variables, "RANK": str(host)}, **pipes) for host in range(2)]
    outputs = [rank.communicate(timeout=30) for rank in ranks]
    return [(rank.returncode, *output) for rank, output in zip(ranks, outputs, strict=True)]


def test_without_a_secret_a_job_starts_only_if_the_user_insists(hosts: Hosts) -> None:
    for status, out, errors in run_by_hand(hosts):
        assert (status, out) == (1, "")
        assert "/proc/.yalis cannot be created" in errors
        assert "set YALIS_SECRET to the same random text" in errors
    (rank0, rank1) = run_by_hand(hosts, "insecure")
    assert json.loads(rank0[1])[0] == "insecure_rendezvous=True"
    assert (rank0[0], rank1) == (0, (0, "", ""))
    assert rank0[2].count("\n") == 1
    assert "the ranks of this job are not authenticated" in rank0[2]


def test_rank_0_listens_on_the_network_of_the_job_only(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the host's own name is a loopback address, and torchrun's variables were set by hand."""
    info = LaunchInfo("srun", 0, 2, 0, 1, hosts.names[0], job="srun 9.9", peer=hosts.addresses[1])

    def addresses(info: LaunchInfo, name: str) -> str:
        enter_namespace(hosts.names[0])
        monkeypatch.setattr(endpoint, "resolve", lambda host: [name])
        with open_endpoint(info, b"", 1)[0] as server:
            return str(server.getsockname()[0])

    assert call(addresses, info, hosts.addresses[0]) == hosts.addresses[0]
    assert call(addresses, info, "127.0.1.1") == hosts.addresses[0]
    with pytest.raises(AssertionError, match=r"does not have the address 10.77.0.2 of .*; set MASTER_ADDR"):
        call(addresses, info, hosts.addresses[1])
