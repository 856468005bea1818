"""Parts of `yalis accept`: that the contract and storms notice wrong sums, its lines, and its invalid commands."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ranks import Memory, run_ranks
from tests.unit.test_comm_auto import ThreadWorld
from yalis.cli.main import main
from yalis.errors import YalisError
from yalis.study import results
from yalis.study.accept.line import Line, summarize
from yalis.study.accept.storms import Inputs, Storm, check_contract

CPU = torch.device("cpu")
RANKS = 3


class Broken(Memory):
    """Goes wrong on one rank, in the way that `fault` names."""

    def __init__(self, comm: Memory, fault: str) -> None:
        super().__init__(comm.board, comm.rank)
        self._fault, self._calls = fault, 0

    def all_reduce(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        self._calls += 1
        kept = x.clone()
        total = super().all_reduce(x, out)
        if self.rank != 1 or not x.numel():
            return total
        if self._fault == "one element":
            total[-1] += 1
        elif self._fault == "not in place" and out is None:
            return kept
        elif self._fault == "sometimes" and self._calls == 17:
            total[0] = 99
        elif self._fault == "writes its input" and out is not None:
            x[0] = 7
        return total

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        sent = super().broadcast(x.clone(), source)
        return x if self._fault == "no broadcast" and self.rank == 1 else x.copy_(sent)


def run_on_threads(fault: str) -> list[tuple[dict[str, int], tuple[int, list[str]]]]:
    values: list[Any] = [None] * RANKS

    def rank(number: int, comm: Memory) -> tuple[dict[str, int], tuple[int, list[str]]]:
        world, broken = ThreadWorld(comm, values), Broken(comm, fault)
        inputs = Inputs(world, CPU)
        storm = Storm(world, broken, inputs, CPU, seed=1).run(30)
        return storm, check_contract(world, broken, inputs, CPU)

    return run_ranks(RANKS, rank)


def test_a_correct_communicator_passes() -> None:
    for storm, (checks, problems) in run_on_threads(""):
        assert storm == {"wrong": 0, "digests": 1}
        assert problems == []
        assert checks > 50


@pytest.mark.parametrize("fault", ["one element", "not in place", "sometimes"])
def test_a_storm_notices_wrong_sums(fault: str) -> None:
    for storm, _ in run_on_threads(fault):
        assert storm["wrong"] > 0
        assert storm["digests"] == 2


@pytest.mark.parametrize(
    ("fault", "problem"),
    [
        ("one element", "the sum of 1 elements of torch.float32 in another tensor on rank 1"),
        ("not in place", "the sum of 1000 elements of torch.float32 in place on rank 1"),
        ("writes its input", "the sum of 3 elements of torch.float32: the input on rank 1"),
        ("no broadcast", "a broadcast from rank 0 on rank 1"),
    ],
)
def test_the_contract_names_what_is_wrong(fault: str, problem: str) -> None:
    for _, (_, problems) in run_on_threads(fault):
        assert problem in problems


def test_lines_are_a_result(tmp_path: Path) -> None:
    lines = [
        Line("storm", "torch, eager", "passed", "150 operations"),
        Line("all-reduce", "torch, 64 KB", "passed", "torch, eager", 100.25, 90.0),
        Line("backend", "nvrar", "not possible here", "no GPU"),
    ]
    assert str(lines[1]) == "passed            all-reduce: torch, 64 KB: 100.2 us, predicted 90.0 us; torch, eager"
    assert summarize([line.outcome for line in lines]) == "2 passed, 0 failed, 1 not possible here"
    facts = {"ranks": 2, "shape": "1 node x 2 ranks", "quick": True, "stopped": "stopped during 'decode'"}
    result = results.new(
        "acceptance", facts, [line.to_row() for line in lines], "yalis accept", [{"type": "cpu", "name": "CPU"}]
    )
    assert results.read(results.write(result, tmp_path)) == result
    kind = results.kind_of(result)
    assert kind.notes(result) == ["2 passed, 0 failed, 1 not possible here.", "Incomplete: stopped during 'decode'."]
    assert list(kind.text(result))[1] == str(lines[0])
    data = json.loads(results.write(result, tmp_path, "wrong").read_text())
    data["rows"][0]["outcome"] = "fine"
    (tmp_path / "wrong.json").write_text(json.dumps(data))
    with pytest.raises(YalisError, match=r"row 1 of .* has the outcome 'fine'"):
        results.read(tmp_path / "wrong.json")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--ranks 1", "--ranks is 1; give at least 2"),
        ("--backends torch,tree", "unknown backend 'tree'; accepted: torch, hierarchical, mpi, nvrar"),
        ("--machine nowhere", "nowhere"),
        ("--out FILE", "which is a file; give a folder, such as acceptance"),
    ],
)
def test_invalid_commands(words: str, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert main(["accept", *words.replace("FILE", str(tmp_path / "file")).split()]) == 2
    assert sentence in capsys.readouterr().err
