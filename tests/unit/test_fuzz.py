"""A part of `make fuzz`: seeded mutated inputs of every target, and that the limits of the harness are enforced."""

from __future__ import annotations

import pytest

from tests.fuzz import child
from tests.fuzz.__main__ import main
from tests.fuzz.runner import run_inputs
from tests.fuzz.targets import TARGETS, make_input


def test_mutated_inputs_are_accepted_or_refused(tmp_path, capsys):
    arguments = ["--count", "210", "--seed", "3", "--processes", "1", "--failed", str(tmp_path)]
    assert main(arguments) == 0, capsys.readouterr().out


def test_an_input_depends_on_seed_and_index_alone():
    for target in TARGETS:
        assert make_input(target, 1, 5) == make_input(target, 1, 5)
        assert len({make_input(target, 1, index) for index in range(20)}) > 10


class _Failing:
    """A target that does what no input may do."""

    name = "failing"

    def run(self, data, folder):
        if data == b"exception":
            raise KeyError(data)
        assert len(bytearray(b"\1") * (1100 << 20))


@pytest.mark.parametrize("outcome", ["exception", "memory"])
def test_failures_are_reported(monkeypatch, outcome):
    monkeypatch.setitem(TARGETS, "failing", _Failing())
    assert child.run_input("failing", outcome.encode())["outcome"] == outcome


def test_a_child_that_dies_is_replaced(monkeypatch, tmp_path):
    """The first input ends its process; the others still run."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys\n"
        "if 'tests.fuzz.child' in sys.orig_argv:\n"
        "    from pathlib import Path\n"
        "    real = Path.symlink_to\n"
        f"    flag = Path({str(tmp_path / 'died')!r})\n"
        "    def die(self, target):\n"
        "        if not flag.exists():\n"
        "            flag.touch()\n"
        "            os.abort()\n"
        "        real(self, target)\n"
        "    Path.symlink_to = die\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    outcomes = []
    run_inputs([("safetensors index", index) for index in range(3)], 1, 1, outcomes.append)
    assert [one.outcome == "crash" for one in outcomes] == [True, False, False]
    assert "SIGABRT" in outcomes[0].message
