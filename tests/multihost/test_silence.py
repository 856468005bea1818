"""A host whose network goes down closes no connection; keepalive detects it."""

from __future__ import annotations

import subprocess
import sys
import time

from tests.multihost.hosts import Hosts

RANK = """
import sys, time
from yalis.errors import YalisFailure
from yalis.launch import link
link.KEEPALIVE_S = 6  # a tenth of the real one
from yalis.launch.join import join
world = join(2, ["unused"])
world.phase = "running"
world.all_gather_object(None)
print("joined", flush=True)
if world.rank == 0:
    world.all_gather_object(None)
time.sleep(60)
"""


def test_a_host_without_network_is_named() -> None:
    with Hosts(2) as hosts:
        variables = {"WORLD_SIZE": "2", "MASTER_ADDR": hosts.addresses[0], "MASTER_PORT": "29501"}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        ranks = [
            hosts.run(host, [sys.executable, "-c", RANK], {**variables, "RANK": str(host)}, **pipes)
            for host in range(2)
        ]
        for rank in ranks:
            assert rank.stdout.readline() == "joined\n"
        subprocess.run(["ip", "-n", hosts.names[1], "link", "set", "eth0", "down"], check=True)
        begin = time.monotonic()
        errors = [rank.communicate(timeout=30)[1] for rank in ranks]
        assert 3 < time.monotonic() - begin < 15
        for mine, other in ((0, 1), (1, 0)):
            assert ranks[mine].returncode == 1
            assert f"yalis: rank {other} on {hosts.names[other]} (pid " in errors[mine]
            assert "cannot be reached while running: its host or network is down" in errors[mine]
