"""The command line under Open MPI."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launchers.launch import GREEDY, MPIRUN, PROMPTS, YALIS, objects, run
from tests.system import needs


@pytest.mark.parametrize("allreduce", ["mpi", "torch"])
def test_mpirun_prints_the_tokens_of_one_rank_once(
    allreduce: str, model: str, tokens: list[list[int]], tmp_path: Path
) -> None:
    needs.program("mpirun")
    generate = [YALIS, "generate", "--tp", "2", "--allreduce", allreduce, "--model", model, "--dtype", "float32"]
    prompt = ["--prompt-ids", ",".join(map(str, PROMPTS[0])), "--max-tokens", str(GREEDY["max_tokens"]), "--ignore-eos"]
    (answer,) = objects(run([*MPIRUN, "-n", "2", *generate, *prompt, "--json"], tmp_path))
    assert answer["token_ids"] == tokens[0]


@pytest.mark.full
def test_a_wrong_number_of_ranks_is_reported_once(model: str, tmp_path: Path) -> None:
    needs.program("mpirun")
    done = run([*MPIRUN, "-n", "3", YALIS, "generate", "--tp", "2", "--model", model, "--prompt-ids", "1"], tmp_path)
    assert done.returncode == 2
    assert done.stderr.count("mpirun -n 2") == 1, done.stderr
