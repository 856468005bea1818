"""`yalis accept --quick` on CPU ranks of two nodes under a real Slurm."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launchers.launch import YALIS
from tests.launchers.slurm import Slurm
from tests.multihost.hosts import Hosts
from tests.system.processes import ROOT


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with Hosts(2) as two:
        yield two


def test_two_nodes_are_examined_and_accepted(hosts: Hosts, tmp_path: Path) -> None:
    flags = ["--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=1", "--gpus-per-node=0", f"--chdir={tmp_path}"]
    path = {"PATH": f"{Path(YALIS).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    with Slurm(hosts) as slurm:
        arguments = ["--quick", "--device", "cpu"]
        log = slurm.batch(ROOT / "slurm/accept.sh", *flags, arguments=arguments, env=path, timeout=240)
    assert "srun, 2 ranks on 2 hosts" in log  # yalis doctor
    assert " 0 failed, " in log
    assert "srun: error" not in log
    (out,) = (folder for folder in tmp_path.glob("acceptance-*") if folder.is_dir())
    result = json.loads((out / "acceptance.json").read_text())
    rows = {(row["area"], row["check"]): row for row in result["rows"]}
    assert result["topology"]["ranks_per_host"] == [1, 1]
    assert {row["outcome"] for row in rows.values()} == {"passed", "not possible here"}
    assert rows["transport", "between CPUs"]["detail"].startswith("TCP between 2 hosts")
    for backend in ("torch", "hierarchical"):
        for check in (("contract", backend), ("storm", f"{backend}, eager"), ("decode", backend)):
            assert rows[check]["outcome"] == "passed"
    assert rows["backend", "nvrar"]["outcome"] == "not possible here"
    times = rows["all-reduce", "hierarchical, 16 KB"]
    assert times["measured_us"] > 0
    assert times["predicted_us"] > 0
    assert json.loads((out / "machine.json").read_text())["name"] == "accepted"
    for fault in ("kill", "stall"):
        for rank in (0, 1):
            assert rows["faults", f"{fault} a rank on the host of rank {rank}"]["outcome"] == "passed"
    assert out.with_name(f"{out.name}.tar.gz").exists()
