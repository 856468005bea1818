"""`yalis doctor` under a launcher: one table of all ranks."""

from __future__ import annotations

import json
from pathlib import Path

from tests import fabric_trees
from tests.multiprocess.engine_job import ForkServer

SCRIPT = """
import os
import sys

from yalis.cli.main import main
from yalis.launch.launchers import process_rank

if process_rank() == 1:
    os.environ["NVSHMEM_HOME"] = HOME_OF_RANK_1
sys.exit(main(["doctor", "--json"]))
"""


def test_ranks_that_differ_are_shown_in_one_table(fork_server: ForkServer, tmp_path: Path) -> None:
    nvshmem, script = fabric_trees.add_nvshmem(tmp_path / "nvshmem"), tmp_path / "doctor.py"
    script.write_text(SCRIPT.replace("HOME_OF_RANK_1", repr(str(nvshmem))))
    ended = fork_server.run([str(script)], ranks=2)
    assert ended.statuses == [0, 0], ended.errors
    assert ended.outputs[1] == ""
    findings = [json.loads(line) for line in ended.outputs[0].splitlines()]
    by_name = {(one["area"], one["name"], *one["ranks"]): one for one in findings}
    assert by_name["software", "torch", 0, 1]["status"] == "ok"
    assert by_name["ranks", "launcher", 0, 1]["detail"].endswith("2 ranks on 1 host")
    first, second = by_name["cluster", "nvshmem", 0], by_name["cluster", "nvshmem", 1]
    assert first["detail"] != second["detail"]
    assert second["detail"].startswith("3.4.5 ")
    assert len(by_name) == len(findings)
