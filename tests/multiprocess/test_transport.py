"""Real ranks agree on the transport between their GPUs."""

from __future__ import annotations

import json
from pathlib import Path

from tests.multiprocess.engine_job import ForkServer

SCRIPT = """
import json
import os

from yalis.comm.nvrar.transport import agree_on_transport
from yalis.errors import YalisError
from yalis.launch.join import join

world = join(2, [])
if world.rank in CHOOSERS:
    os.environ["NVSHMEM_REMOTE_TRANSPORT"] = "ibrc"
try:
    found = agree_on_transport(world, f"GPU-{world.rank}").name
except YalisError as error:
    found = str(error)
print(json.dumps(found), flush=True)
world.close()
"""


def answers(fork_server: ForkServer, tmp_path: Path, choosers: tuple[int, ...]) -> list[str]:
    script = tmp_path / "agree.py"
    script.write_text(SCRIPT.replace("CHOOSERS", repr(choosers)))
    ended = fork_server.run([str(script)], ranks=2)
    assert ended.statuses == [0, 0], ended.errors
    return [json.loads(output) for output in ended.outputs]


def test_all_ranks_have_the_transport_of_rank_0(fork_server: ForkServer, tmp_path: Path) -> None:
    assert answers(fork_server, tmp_path, ()) == ["nvlink"] * 2
    assert answers(fork_server, tmp_path, (0, 1)) == ["ibrc"] * 2


def test_a_variable_on_one_rank_only_is_an_error_on_all(fork_server: ForkServer, tmp_path: Path) -> None:
    first, second = answers(fork_server, tmp_path, (1,))
    assert first == second
    assert "has the transport nvlink (all ranks are on one host" in first
    assert "has ibrc (NVSHMEM_REMOTE_TRANSPORT=ibrc is set)" in first
