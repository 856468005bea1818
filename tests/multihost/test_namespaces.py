"""The emulated hosts are isolated: own names and addresses, connected by a network, removed afterwards."""

from __future__ import annotations

import json
import subprocess
import sys
import time

from tests.multihost.hosts import Hosts
from tests.system import needs
from tests.system.processes import commands

SERVE = """
import json, socket, sys
server = socket.create_server((sys.argv[1], 5000))
with socket.create_server(("127.0.0.1", 5001)):
    print("ready", flush=True)
    one, (peer, _) = server.accept()
    one.sendall(json.dumps([socket.gethostname(), socket.gethostbyname(socket.gethostname()), peer]).encode())
    one.close()
"""
CONNECT = """
import json, socket, sys
try:
    socket.create_connection(("127.0.0.1", 5001), 5)
except ConnectionRefusedError:
    with socket.create_connection((sys.argv[1], 5000), 5) as one:
        print(json.dumps([socket.gethostname(), json.loads(one.makefile().read())]))
"""


def test_hosts_reach_each_other_and_share_no_loopback() -> None:
    with Hosts(3) as hosts:
        server = hosts.run(0, [sys.executable, "-c", SERVE, hosts.addresses[0]], stdout=subprocess.PIPE, text=True)
        assert server.stdout is not None
        assert server.stdout.readline() == "ready\n"
        client = hosts.run(2, [sys.executable, "-c", CONNECT, hosts.names[0]], stdout=subprocess.PIPE, text=True)
        answer, _ = client.communicate(timeout=30)
        assert json.loads(answer) == [hosts.names[2], [hosts.names[0], hosts.addresses[0], hosts.addresses[2]]]
        assert server.wait(30) == 0


def test_the_next_run_cleans_up_after_a_killed_one() -> None:
    needs.namespaces()
    crash = (
        "import os, signal, sys, time\n"
        "from tests.multihost.hosts import Hosts\n"
        "with Hosts(2) as hosts:\n"
        "    hosts.run(1, ['sleep', '1234.5'])\n"
        "    time.sleep(0.5)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert subprocess.run([sys.executable, "-c", crash]).returncode == -9
    assert "sleep 1234.5" in commands()
    start = time.monotonic()
    with Hosts(2) as hosts:
        assert "sleep 1234.5" not in commands()
        process = hosts.run(0, ["sleep", "1234.25"])
    assert process.returncode == -9
    assert time.monotonic() - start < 20
    left = subprocess.run([needs.program("ip"), "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert "yalis-" not in left
