"""`yalis profile` on one rank, and that profiling changes no tokens. Several ranks: tests/multiprocess."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tiny_chat import save_tiny_chat
from yalis import LLM, SamplingParams
from yalis.cli.main import main
from yalis.engine.engine import Engine
from yalis.kernels import native
from yalis.study import results
from yalis.study.results.kinds.profile import CATEGORIES, summarize_ranks


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_chat(tmp_path_factory.mktemp("model")))


def test_a_profile_is_printed_plotted_and_written(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = f"profile --workload 3x20x24 --steps 6 --repeats 2 --threads 1 --device cpu --model {model}"
    args += f" --out {tmp_path / 'out'} --plot {tmp_path / 'bars'}"
    assert main(args.split()) == 0
    out, err = capsys.readouterr()
    (path,) = (tmp_path / "out").iterdir()
    assert err == f"yalis: wrote {path}\nyalis: wrote {tmp_path / 'bars.png'} and {tmp_path / 'bars.svg'}\n"
    assert (tmp_path / "bars.png").stat().st_size > 5000
    result = results.read(path)
    prefill, decode = result.rows
    assert (prefill["phase"], prefill["steps"], decode["phase"], decode["steps"]) == ("prefill", 2, "decode", 12)
    for row in result.rows:
        assert row["ms"] == pytest.approx(sum(row[f"{category}_ms"] for category in CATEGORIES))
        assert row["matmul_ms"] > 0
        assert row["attention_ms"] > 0
        assert row["idle_ms"] > 0
        assert row["communication_ms"] == 0
        off = abs(row["accounted"] - 1) > 0.02  # possible for a tiny model on a busy machine
        assert off == any(note.startswith(row["phase"]) for note in result.notes)
        assert 0.5 < row["accounted"] < 1.1
    assert result.parameters["split"] == "tp1"
    assert result.parameters["unprofiled_decode_ms"] > 0
    names = {one["name"]: one for one in result.parameters["names"]["decode"][0]}
    if native.load() is not None:  # calls of replayed steps are recorded too
        # Two layers of four linears each, and the LM head, in each of 7 profiled steps.
        assert names["native::linear"]["count"] == 7 * (2 * 4 + 1)
        assert names["native::attend"]["count"] == 7 * 2
    assert "matmul" in out
    assert "the categories add up to" in out


def test_profiling_changes_no_tokens(model: str) -> None:
    prompts, sampling = [[5, 6, 7], [8, 9]], SamplingParams(max_tokens=12, ignore_eos=True)
    with LLM(model, threads=1, device="cpu") as llm:
        expected = [output.token_ids for output in llm.generate(prompts, sampling)]
        engine = llm._engine
        assert isinstance(engine, Engine)
        ids = [llm.submit(prompt, sampling) for prompt in prompts]
        done: dict[int, list[int]] = {}
        profiles = []
        for step in range(40):
            if step in (1, 5):
                engine.start_profiling()
            if step in (3, 8):
                profiles.append(engine.stop_profiling())
            done.update((id, output.token_ids) for id, output in llm.poll())
        replays = engine.runner.executor.replays
        assert [done[id] for id in ids] == expected
        assert [[step.info.step_id for step in ranks[0].steps] for ranks in profiles] == [
            list(range(first := profiles[0][0].steps[0].info.step_id, first + 2)),
            list(range(first + 4, first + 7)),
        ]
        assert native.current_listener() is None
        if native.load() is not None:
            assert replays > 0
        with pytest.raises(ValueError, match="the profiler is not running"):
            engine.stop_profiling()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("--workload 3x20x2", "too few decode steps"),
        ("--workload sometimes", "unknown workload"),
        ("--steps 0", "steps is 0"),
        ("--workload 2x400x9", "the context length is 256"),
        ("--dp 2", "omit --dp"),
    ],
)
def test_invalid_workloads_are_refused(model: str, args: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(f"profile {args} --model {model} --device cpu".split()) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1


def test_times_are_summarized_over_ranks() -> None:
    rows = [
        {
            "phase": "decode",
            "rank": rank,
            "ms": 4.0,
            **{f"{category}_ms": 0.0 for category in CATEGORIES},
            "matmul_ms": matmul,
        }
        for rank, matmul in ((0, 1.0), (1, 3.0))
    ]
    summary = {one["part"]: (one["max_ms"], one["mean_ms"], one["imbalance"]) for one in summarize_ranks(rows)}
    assert summary["matmul"] == (3.0, 2.0, 1.5)
    assert summary["all"] == (4.0, 4.0, 1.0)
    assert summary["idle"] == (0.0, 0.0, 1.0)
