"""The search for attention launch configurations, in Triton's interpreter: candidates, rejections and tables."""

from __future__ import annotations

import importlib.util
import time
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")
from triton.runtime.errors import OutOfResources

CPU = torch.device("cpu")


@pytest.fixture
def tune(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Load the script, set to small heads on a CPU, without graph capture."""
    path = Path(__file__).parents[2] / "benchmarks" / "tune_attention.py"
    spec = importlib.util.spec_from_file_location("tune_attention", path)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    small = {"HEADS": 4, "KV_HEADS": 1, "DIM": 16, "_LAUNCHES": 1, "_REPLAYS": 1, "capture_graph": lambda work: work}
    for name, value in small.items():
        monkeypatch.setattr(script, name, value)
    return script


def test_every_candidate_is_tried_once_the_current_one_first(tune: Any) -> None:
    current = tune.current_candidate(CPU)
    for programs in (current.programs, 3):
        found = tune.list_candidates(current, (32, 64, 128, 256), (2, 4, 8), (1, 2, 3), (1, 2, 4, 8, programs))
        assert found[0] == current
        assert len({one.config for one in found}) == 36


def test_a_search_keeps_candidates_that_are_correct_and_fit(
    tune: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = [tune.make_step(sequences, keys, 1, CPU, 1, torch.float32) for sequences, keys in ((1, 200), (2, 40))]
    tried = [(32, 8), (64, 1), (64, 8), (128, 1), (256, 1)]
    candidates = [tune.Candidate(keys, 2, 2, programs) for keys, programs in tried]
    kernels, attend, original = tune.kernels, tune.kernels.paged_attention, tune.kernels.decode_config
    launches = []

    def recorded(*args: Any) -> torch.Tensor:
        config, programs = kernels.decode_config(), args[6].target_programs // tune.gpu_limits(CPU).num_sms
        launches.append((config.block_n, programs))
        if config.block_n == 128:
            raise OutOfResources(300_000, 232_448, "shared memory")
        out: torch.Tensor = attend(*args)
        return out * 1.1 if launches[-1] == (64, 8) else out

    monkeypatch.setattr(kernels, "paged_attention", recorded)
    found = tune.sweep(candidates, steps, time.monotonic() + 1000)
    assert list(dict.fromkeys(launches)) == tried
    assert [(one.keys, one.programs) for one in found] == [(32, 8), (64, 1), (256, 1)]
    assert all(len(times) == 2 and min(times) > 0 for times in found.values())
    assert (
        "Candidate(keys=64, warps=2, stages=2, programs=8) is wrong: relative error 1.0e-01" in capsys.readouterr().out
    )
    assert kernels.decode_config is original
    assert not tune.sweep(candidates, steps, time.monotonic() - 1)


def test_tables_are_sorted_and_mark_the_current_candidate(tune: Any) -> None:
    fast, even, current = (tune.Candidate(keys, 4, 2, 1) for keys in (32, 64, 128))
    found = {current: [4.0, 3.0], even: [2.0, 2.0], fast: [1.0, 5.0]}
    lines = list(tune.tabulate(found, [("1 x 200", 4_000_000), ("16 x 200", 8_000_000)], current, 1))
    assert [line.split() for line in lines if line[:20].isspace()] == [
        ["1", "32", "4", "2", "1", "1.00", "4.00"],
        ["3", "128", "4", "2", "1", "4.00", "1.00", "now"],
        ["1", "64", "4", "2", "1", "2.00", "4.00"],
        ["2", "128", "4", "2", "1", "3.00", "2.67", "now"],
        ["1", "64", "4", "2", "1", "1.41", "2.00", "1.00"],
        ["3", "128", "4", "2", "1", "2.45", "4.00", "1.50", "now"],
    ]
