"""Ranks on two hosts find each other under srun and mpirun."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launchers.slurm import Slurm
from tests.multihost.hosts import Hosts
from tests.system import needs
from tests.system.processes import ROOT

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
    assert json.loads(step.stdout) == [[first, 0, 0], [first, 0, 1], [second, 1, 0]]


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
    assert json.loads(out) == [[first, 0, 0], [first, 0, 1], [second, 1, 0]]
