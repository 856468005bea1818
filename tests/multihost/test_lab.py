"""The lab: its links have the given delay and rate, the benchmark runs on it, and nothing is left behind."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from statistics import median

import pytest

from tests.launchers.launch import YALIS
from tests.multihost.hosts import Hosts
from tests.system import needs
from tests.system.processes import commands, environment
from yalis.study import results

ECHO = """
import socket
server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
server.bind(("", 5000))
print("ready", flush=True)
while True:
    server.sendto(*server.recvfrom(100))
"""
PING = """
import json, socket, sys, time
client = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
client.settimeout(5)
times = []
for _ in range(21):
    begin = time.perf_counter()
    client.sendto(b"ping", (sys.argv[1], 5000))
    client.recvfrom(100)
    times.append(time.perf_counter() - begin)
print(json.dumps(times))
"""
RECEIVE = """
import socket, time
server = socket.create_server(("", 5001))
print("ready", flush=True)
one, _ = server.accept()
begin = time.perf_counter()
while one.recv(1 << 20):
    pass
print(time.perf_counter() - begin)
"""
SEND = """
import socket, sys
with socket.create_connection((sys.argv[1], 5001)) as one:
    one.sendall(bytes(2_500_000))
"""
BENCH = [YALIS, "bench", "allreduce", "--hosts", "2", "--ranks-per-host", "2", "--delay", "1ms", "--repeats", "6"]


def serve(hosts: Hosts, script: str) -> subprocess.Popen[str]:
    server = hosts.run(0, [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    assert server.stdout.readline() == "ready\n"
    return server


def run_client(hosts: Hosts, script: str) -> str:
    command = [sys.executable, "-c", script, hosts.addresses[0]]
    output, _ = hosts.run(1, command, stdout=subprocess.PIPE, text=True).communicate(timeout=30)
    return str(output)


def list_namespaces() -> str:
    return subprocess.run([needs.program("ip"), "netns", "list"], capture_output=True, text=True, check=True).stdout


def test_links_have_the_given_delay_and_rate() -> None:
    with Hosts(3, "1ms", "100mbit") as hosts:
        serve(hosts, ECHO)
        assert 2e-3 <= median(json.loads(run_client(hosts, PING))) < 8e-3
        server = serve(hosts, RECEIVE)
        run_client(hosts, SEND)  # 20 million bits
        seconds = float(server.communicate(timeout=30)[0])
        assert 0.19 < seconds < 1
    assert hosts.network in ("netem", "switch")
    assert hosts.dropped == 0


@pytest.mark.parametrize(
    ("backends", "rows"),
    [
        ("gloo,hierarchical", ["gloo", "hierarchical"]),
        pytest.param(
            "gloo,mpi",
            [
                "gloo",
                "mpi",
                *(f"mpi {kind}" for kind in ("recursive doubling", "ring", "segmented ring", "Rabenseifner")),
            ],
            marks=pytest.mark.full,
        ),
    ],
)
def test_the_benchmark_over_hosts(backends: str, rows: list[str]) -> None:
    with Hosts(1):
        pass  # or skip
    command = [*BENCH, "--sizes", "16K", "--backends", backends, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=200)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    results.check(result, "what was printed")
    labels = [" ".join([row["backend"], *row["options"].values()]) for row in result["rows"]]
    assert labels == rows
    assert {(row["status"], row["delay_us"]) for row in result["rows"]} == {("ok", 1000.0)}
    # A sum over both hosts needs at least one message between them.
    assert all(row["median_us"] > 1000 for row in result["rows"])
    assert (result["parameters"]["shape"], result["parameters"]["start"]) == ("2x2", "clock")
    assert (result["topology"]["ranks"], result["topology"]["ranks_per_host"]) == (4, [2, 2])
    assert "yalis-" not in list_namespaces()


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.full)]
)
def test_an_interrupted_run_leaves_nothing_behind(number: signal.Signals, status: int) -> None:
    with Hosts(1):
        pass
    process = subprocess.Popen(
        [*BENCH, "--repeats", "100000", "--backends", "gloo"],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    module = "yalis.study.allreduce.in_lab"
    deadline = time.monotonic() + 30
    while sum(module in command for command in commands()) < 4 and time.monotonic() < deadline:
        time.sleep(0.1)
    assert "yalis-host1" in list_namespaces()
    process.send_signal(number)
    out, err = process.communicate(timeout=20)
    message = "yalis: stopped: nothing was written\n" if number == signal.SIGINT else ""
    assert (process.returncode, out, err) == (status, "", message)
    assert "yalis-" not in list_namespaces()
    assert not [command for command in commands() if module in command]


def test_the_switch_of_a_killed_lab_ends_and_the_next_lab_cleans_up() -> None:
    crash = (
        "import os, signal\n"
        "from yalis.study.lab.hosts import Lab\n"
        "with Lab(2, '1ms') as lab:\n"
        "    lab.run(1, ['sleep', '2345.5'], stdout=2)\n"
        "    print(lab.network, flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    with Hosts(1):
        pass
    done = subprocess.run([sys.executable, "-c", crash], env=environment(), stdout=subprocess.PIPE, text=True)
    assert done.returncode == -9
    if done.stdout == "switch\n":
        deadline = time.monotonic() + 5
        while any("/switch/" in command and " 1000000 " in command for command in commands()):
            assert time.monotonic() < deadline, "the switch outlives its lab"
            time.sleep(0.05)
    assert "yalis-host0" in list_namespaces()
    with Hosts(1, "1ms"):
        assert "sleep 2345.5" not in commands()
    assert "yalis-" not in list_namespaces()


def test_a_lab_waits_until_the_previous_one_ends() -> None:
    hold = (
        "import time\n"
        "from yalis.study.lab.hosts import Lab\n"
        "with Lab(2) as lab:\n"
        "    print('ready', flush=True)\n"
        "    time.sleep(1)\n"
        "    assert lab.run(1, ['true']).wait() == 0\n"
    )
    with Hosts(1):
        pass
    other = subprocess.Popen([sys.executable, "-c", hold], env=environment(), stdout=subprocess.PIPE, text=True)
    assert other.stdout is not None
    assert other.stdout.readline() == "ready\n"
    with Hosts(1):
        assert other.wait(10) == 0
