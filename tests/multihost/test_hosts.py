"""A model on two hosts: under torchrun, without a launcher and under mpirun, with every CPU all-reduce."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.launchers.launch import GREEDY, PROMPTS, SAMPLED, YALIS, make_model, one_rank_tokens
from tests.multihost.hosts import Hosts
from tests.system import needs
from tests.system.processes import environment

SPLITS: list[dict[str, Any]] = [
    {"tp": 4},
    {"tp": "2x2"},
    {"tp": 2, "pp": 2},
    {"tp": 4, "allreduce": "hierarchical"},
    {"tp": "2x2", "allreduce": "hierarchical"},
]
SCRIPT = """
import json
import socket
from pathlib import Path
from yalis import LLM, SamplingParams

counter = Path("/sys/class/net/eth0/statistics/tx_bytes")
for split in {splits}:
    with LLM({model!r}, dtype="float32", **split) as llm:
        before = int(counter.read_text())
        outputs = llm.generate({prompts}, [SamplingParams(**{greedy}), SamplingParams(**{sampled})])
        sent_bytes = int(counter.read_text()) - before
        if llm.rank == 0:
            print(json.dumps([socket.gethostname(), [output.token_ids for output in outputs], sent_bytes]), flush=True)
        else:
            assert outputs == []
"""


def save_script(folder: Path, model: str, splits: list[dict[str, Any]]) -> Path:
    script = folder / "script.py"
    script.write_text(SCRIPT.format(splits=splits, model=model, prompts=PROMPTS, greedy=GREEDY, sampled=SAMPLED))
    return script


def test_two_hosts_produce_the_tokens_of_one_rank(tmp_path: Path) -> None:
    with Hosts(2) as hosts:
        model = make_model(tmp_path)
        script = save_script(tmp_path, model, SPLITS)
        rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{hosts.names[0]}:29500", "--rdzv-id", "two-hosts"]
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2"]
        agents = [
            hosts.run(host, [*torchrun, *rendezvous, str(script)], stdout=subprocess.PIPE, text=True, cwd=tmp_path)
            for host in range(2)
        ]
        tokens = one_rank_tokens(model)
        printed = [agent.communicate(timeout=150)[0] for agent in agents]
        assert [agent.returncode for agent in agents] == [0, 0]
    # torchrun numbers hosts in the order they join, so rank 0 may be on either.
    lines = [json.loads(line) for output in printed for line in output.splitlines()]
    assert len({host for host, _, _ in lines}) == 1
    assert [answer for _, answer, _ in lines] == [tokens] * len(SPLITS)
    # The all-reduces of every step crossed the network: 24 steps of several messages.
    assert all(sent_bytes > 24 * 1000 for _, _, sent_bytes in lines), lines


@pytest.mark.parametrize(
    ("per_host", "launcher", "splits"),
    [
        (1, [], [{"tp": 2, "allreduce": name} for name in ("torch", "hierarchical", "auto")]),
        (2, ["--mpirun"], [{"tp": tp, "allreduce": "mpi"} for tp in (4, "2x2")]),
    ],
    ids=["one rank each", "mpirun"],
)
def test_the_lab_runs_a_script(
    per_host: int, launcher: list[str], splits: list[dict[str, Any]], tmp_path: Path
) -> None:
    with Hosts(1):
        pass  # skips if hosts cannot be created
    if launcher:
        needs.program("mpirun")
    model = make_model(tmp_path)
    script = save_script(tmp_path, model, splits)
    lab = [YALIS, "lab", "--hosts", "2", "--ranks-per-host", str(per_host), "--delay", "0.2ms", *launcher]
    done = subprocess.run(
        [*lab, "--", sys.executable, str(script)], env=environment(), capture_output=True, text=True, timeout=150
    )
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [answer for _, answer, _ in lines] == [one_rank_tokens(model)] * len(splits)
    assert all(sent_bytes > 24 * 1000 for _, _, sent_bytes in lines), lines
