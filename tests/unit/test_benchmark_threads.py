"""benchmarks/threads.py with a tiny model."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest

from tests.pages import ROOT
from tests.tiny_chat import save_tiny_chat


@pytest.mark.parametrize("calls", [[], ["--per-call", "1"]], ids=["one call per thread", "one call per prompt"])
def test_threads_get_the_tokens_of_one_batch(calls: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, out = save_tiny_chat(tmp_path / "model"), tmp_path / "result.json"
    argv = [
        "threads.py", "--model", str(model), "--prompts", "7", "--threads", "3", "--prompt-len", "8",
        "--max-tokens", "4", "--repeats", "2", "--out", str(out), *calls,
    ]  # fmt: skip
    monkeypatch.setattr(sys, "argv", argv)
    runpy.run_path(str(ROOT / "benchmarks" / "threads.py"), run_name="__main__")  # exits if tokens differ
    result = json.loads(out.read_text())
    assert {name: len(values) for name, values in result["seconds"].items()} == {"batch": 2, "threads": 2}
    assert 0 < result["ratio"]["min"] <= result["ratio"]["median"] <= result["ratio"]["max"]
