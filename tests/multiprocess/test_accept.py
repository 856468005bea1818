"""`yalis accept` on one machine: a failed line, an interrupted run, and the job whose rank dies."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from tests.multiprocess.engine_job import ForkServer, environment
from yalis.study.accept import child_job

# The stages up to the storms, with a backend whose rank 1 has other bits.
SCRIPT = """
import sys

from yalis.cli.main import main
from yalis.comm.base import BACKENDS
from yalis.comm.custom_allreduce import CustomAllReduceBackend, CustomAllReduceGroup
from yalis.study.accept.stages import STAGES

for name in ("all-reduce sweep", "decode", "faults"):
    del STAGES[name]


class Group(CustomAllReduceGroup):
    def all_reduce(self, x, out=None):
        total = self.torch_group.all_reduce(x, out)
        if self.rank == 1 and x.numel():
            total.view(-1)[-1] += 1
        return total


class Wrong(CustomAllReduceBackend):
    name = "hierarchical"

    def wrap_group(self, torch_group, name, ranks):
        return Group(torch_group)


BACKENDS._entries["hierarchical"] = "__main__:Wrong"
sys.argv[1:] = ["accept", "--quick", "--device", "cpu", "--backends", "torch,hierarchical,nvrar", "--out", OUT]
sys.exit(main(sys.argv[1:]))
"""


def test_wrong_sums_fail_their_lines_and_the_command(fork_server: ForkServer, tmp_path: Path) -> None:
    out, script = tmp_path / "acceptance", tmp_path / "accept.py"
    script.write_text(SCRIPT.replace("OUT", repr(str(out))))
    ended = fork_server.run([str(script)], ranks=2)
    assert ended.statuses == [1, 0], ended.errors
    rows = {(row["area"], row["check"]): row for row in json.loads((out / "acceptance.json").read_text())["rows"]}
    assert rows["storm", "torch, eager"]["outcome"] == rows["contract", "torch"]["outcome"] == "passed"
    assert rows["storm", "hierarchical, eager"]["outcome"] == "failed"
    assert "2 different results on the ranks" in rows["storm", "hierarchical, eager"]["detail"]
    assert "on rank 1" in rows["contract", "hierarchical"]["detail"]
    assert rows["backend", "nvrar"]["outcome"] == "not possible here"
    assert "2 failed" in ended.outputs[0].splitlines()[-1]
    assert "storm, hierarchical" not in ended.outputs[1]
    page = (out / "acceptance.html").read_text()
    assert "hierarchical, eager" in page
    with tarfile.open(tmp_path / "acceptance.tar.gz") as archive:
        assert set(archive.getnames()) >= {"acceptance/acceptance.html", "acceptance/acceptance.json"}


@pytest.mark.full
def test_a_stopped_run_keeps_what_was_done(tmp_path: Path) -> None:
    out = tmp_path / "stopped"
    argv = ["accept", "--ranks", "2", "--device", "cpu", "--backends", "torch", "--out", str(out)]
    process = subprocess.Popen(
        [sys.executable, "-m", "yalis", *argv], env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None
    for line in process.stdout:
        if "contract: torch" in line:  # the storm runs now
            break
    process.send_signal(signal.SIGTERM)  # which is handled as Ctrl-C
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 143, errors
    assert f"stopped: {out / 'acceptance.html'} has what was done" in errors
    result = json.loads((out / "acceptance.json").read_text())
    assert result["parameters"]["stopped"] == "stopped during 'contract and storms'"
    outcomes = {(row["area"], row["check"]): row["outcome"] for row in result["rows"]}
    assert outcomes["contract", "torch"] == "passed"
    assert outcomes["decode", "all"] == "not possible here"
    assert "Incomplete" in (out / "acceptance.html").read_text()


def test_a_killed_rank_of_the_child_job_is_named() -> None:
    outcome = child_job.finish(child_job.start("kill"))
    assert outcome["error"].startswith("rank 1 on ")
    assert "SIGKILL" in outcome["error"]
    assert outcome["seconds"] < child_job.LIMIT_S
