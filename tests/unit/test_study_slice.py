"""The slice benchmark on tiny shapes: its rows, floors, report, refusals and failures."""

from __future__ import annotations

import gc
import json
import re
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.unit.test_engine_slice_rank import CONFIG
from yalis.checkpoint.resolve import open_checkpoint
from yalis.cli.main import main
from yalis.config import EngineConfig
from yalis.engine.interrupts import Stopped
from yalis.errors import YalisFailure
from yalis.parallel.dims import rank_dims
from yalis.parallel.memory import rank_memory
from yalis.parallel.plan import Split
from yalis.perfmodel.floors import decode_work
from yalis.spec import ModelSpec, read_spec
from yalis.study import bandwidth, results, slice
from yalis.study.slice import Slice, SlicePlan, measure
from yalis.workloads import Workload

SHAPES = Path(__file__).parents[2] / "benchmarks" / "shapes"


@pytest.fixture(autouse=True)
def small_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(bandwidth._READ_BYTES, "cpu", 2**22)
    monkeypatch.setitem(bandwidth._MATMUL_SIZE, "cpu", 128)


@pytest.fixture
def shape(tmp_path: Path) -> str:
    path = tmp_path / "tiny.json"
    path.write_text(json.dumps(CONFIG))
    return str(path)


def run(shape: str, *args: str) -> int:
    return main(["bench", "slice", "--model", shape, "--device", "cpu", "--threads", "1", "--repeats", "2", *args])


def read_shape(name: str) -> ModelSpec:
    return read_spec(open_checkpoint(str(SHAPES / f"{name}.json"), "random").config, name)


def test_several_splits_and_batches_in_one_call(shape: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    args = ("--batch", "1,3", "--prompt-len", "20", "--output-len", "6", "--out", str(out))
    assert run(shape, "--tp", "1,3,2x2", "--rank", "0", *args) == 0
    printed, _ = capsys.readouterr()
    (path,) = out.iterdir()
    result = results.read(path)
    assert [(row["tp"], row["columns"], row["batch"]) for row in result.rows] == [
        (1, 1, 1), (1, 1, 3), (3, 1, 1), (3, 1, 3), (4, 2, 1), (4, 2, 3)
    ]  # fmt: skip
    for row in result.rows:
        assert row["status"] == "ok"
        assert 0 < row["decode_ms_low"] <= row["decode_ms"] <= row["decode_ms_high"] < row["prefill_ms"] * 100
        assert row["share_of_floor"] == pytest.approx(row["floor_ms"] / row["decode_ms"])
        assert 0 < row["prefill_floor_ms"] < row["prefill_ms"]
    whole, third = result.rows[1], result.rows[3]
    assert (whole["all_reduces"], third["all_reduces"]) == (0, 7)
    assert third["all_reduce_bytes"] == 7 * 3 * 64 * 4
    assert whole["replays"] > third["replays"] == 0  # on a CPU, steps with collectives are not recorded
    assert third["weight_bytes"] < whole["weight_bytes"]
    assert third["floor_ms"] < whole["floor_ms"]
    assert "rank 0 of tp 1, 3, 2x2" in printed
    assert "7 x 0.75 KiB" in printed

    page = tmp_path / "page.html"
    assert main(["report", str(path), "-o", str(page)]) == 0
    assert "<svg" in page.read_text()
    assert "Slices" in page.read_text()
    assert main(["bench", "compare", str(path), str(path)]) == 0
    assert "12 of 12 metrics" in capsys.readouterr().out


def test_workloads_and_the_rank_of_a_pipeline(shape: str, capsys: pytest.CaptureFixture[str]) -> None:
    args = ("--tp", "2", "--pp", "3", "--rank", "5", "--workload", "2x9x4", "--workload", "1x33x3", "--json")
    assert run(shape, *args) == 0
    data = json.loads(capsys.readouterr().out)
    results.check(data, "printed")
    rows: list[dict[str, Any]] = data["rows"]
    assert [(row["batch"], row["prompt_len"], row["pp"], row["rank"]) for row in rows] == [(2, 9, 3, 5), (1, 33, 3, 5)]
    assert rows[0]["all_reduces"] == 2  # of one layer, without the embedding
    assert data["parameters"]["engine"]["load"] == "random"


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ("--tp 0", "tp is '0'; give a number of ranks, such as 4"),
        ("--tp 10", "tp 10 leaves ranks without a shard: .* give tp 1 to 9"),
        ("--tp 2,4 --rank 2", "rank is 2, but tp 2 has ranks 0 to 1; give one of them"),
        ("--tp 2 --pp 4", "pp 4 leaves stages without a layer"),
        ("--tp 2 --rank -1", "rank is -1; give a whole number of at least 0"),
        ("--tp 2 --output-len 1", "one output token has no decode step"),
        ("--tp 2 --batch 0", "workload 0x128x33 has a number below 1"),
        ("--tp 2 --prompt-len 250", "prompt_len .* output_len is 283, but the context length is 256"),
        ("--tp 2 --batch x", "'x' is not a list of whole numbers"),
        ("--tp 2 --repeats 0", "repeats is 0"),
        ("--tp 2 --allreduce torch", "unknown argument '--allreduce'"),
        ("--batch 1", "required: --tp"),
    ],
)
def test_what_is_refused(shape: str, args: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:

    assert run(shape, *args.split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert re.search(words, err), err
    assert err.count("\n") == 1


def test_under_a_launcher(shape: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2",
                        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    assert run(shape, "--tp", "2") == 2
    assert "bench slice runs one rank alone; run it without" in capsys.readouterr().err


def test_a_slice_that_does_not_fit_is_refused_before_it_is_loaded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(slice, "free_bytes", lambda device: 139 << 30)
    monkeypatch.setattr(slice.bandwidth, "measure_rates", lambda *_: pytest.fail("measured before the check"))
    large = str(SHAPES / "llama-3.1-405b.json")
    assert run(large, "--dtype", "bfloat16", "--tp", "8,4") == 2
    words = "rank 0 of .*405b.json with tp 4 does not fit cpu: it needs 189.0 GiB for weights and .* for the KV cache "
    words += "in bfloat16, and 139.0 GiB are free; give --tp 6 or more"

    err = capsys.readouterr().err
    assert re.search(words, err), err


@pytest.mark.parametrize("name", ["llama-3.1-70b", "llama-3.1-405b", "qwen3-32b"])
@pytest.mark.parametrize("split", [Split(), Split(4), Split(16), Split(7, stages=3), Split(4, 2)], ids=str)
def test_the_floor_reads_the_weights_of_the_slice(name: str, split: Split) -> None:
    spec = read_shape(name)
    for rank in {0, split.size - 1}:
        dims, memory = rank_dims(spec, split, rank, 2, 2), rank_memory(spec, split, rank, 2, 64)
        assert dims.params * 2 == memory.weight_bytes
        assert dims.kv_bytes_per_token == memory.kv_token_bytes
        embedding = sum(part.bytes for part in memory.weights if part.name == "embedding")
        looked_up = 2 * spec.hidden_size if memory.coords.stage == 0 else 0
        assert decode_work(dims, [0]).weight_bytes == memory.weight_bytes - embedding + looked_up


def test_the_shapes_have_the_published_sizes() -> None:
    for name, size in (("llama-3.1-70b", 141.1e9), ("llama-3.1-405b", 811.7e9), ("qwen3-32b", 65.5e9)):
        assert rank_memory(read_shape(name), Split(), 0, 2, 64).weight_bytes == pytest.approx(size, rel=1e-3)
    # KV heads past their number are repeated: 16 ranks share 8.
    assert rank_memory(read_shape("llama-3.1-70b"), Split(16), 5, 2, 64).kv_heads == range(2, 3)
    # 405B on 8 ranks: about 101 GB each.
    assert rank_memory(read_shape("llama-3.1-405b"), Split(8), 0, 2, 64).weight_bytes == pytest.approx(
        101.5e9, rel=2e-3
    )


def test_a_slice_that_fails_becomes_rows(
    shape: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_batch = Slice._run

    def fail_at_tp_3(part: Slice, prompts: list[list[int]], *args: Any) -> Any:
        if part.split.rows == 3 and len(prompts) == 2:
            raise RuntimeError("no kernel\nfor this shape")
        return run_batch(part, prompts, *args)

    monkeypatch.setattr(Slice, "_run", fail_at_tp_3)
    args = ("--batch", "1,2", "--prompt-len", "9", "--output-len", "4", "--out", str(tmp_path / "out"))
    assert run(shape, "--tp", "2,3", *args) == 1
    out, err = capsys.readouterr()
    assert "RuntimeError: no kernel for this shape" in out
    assert "1 of 4 workloads failed; the first: RuntimeError: no kernel for this shape" in err
    (path,) = (tmp_path / "out").iterdir()
    assert [row["status"] == "ok" for row in results.read(path).rows] == [True, True, True, False]
    with pytest.raises(YalisFailure, match="no kernel"):
        measure(EngineConfig(shape, device="cpu"), SlicePlan(((3, 1),), (Workload(2, 9, 4),)), "yalis bench slice")


def test_ctrl_c_keeps_the_finished_slices(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(text: str) -> None:
        if text == "tp 3: loading":
            raise KeyboardInterrupt

    plan = SlicePlan(((2, 1), (3, 1)), (Workload(1, 9, 4),), repeats=1)
    with pytest.raises(Stopped, match="1 of 2 slices done") as stopped:
        measure(EngineConfig(shape, device="cpu", threads=1), plan, "yalis bench slice", stop)
    result = stopped.value.done
    assert [row["tp"] for row in result.rows] == [2]
    assert result.notes == ["stopped after 1 of 2 slices"]
    assert result.parameters["tp"] == ((2, 1),)
    with pytest.raises(KeyboardInterrupt):
        measure(EngineConfig(shape, device="cpu", threads=1), replace(plan, tp=((3, 1),)), "yalis bench slice", stop)


def test_memory_of_a_slice_is_released(shape: str) -> None:
    """The next slice of a call gets the memory of the one before."""

    checkpoint = open_checkpoint(shape, "random")
    spec = read_spec(checkpoint.config, "tiny")
    config = EngineConfig(shape, load="random", device="cpu", kv_blocks=8, max_model_len=64, tp=(3, 1))
    part = Slice(config, 1, spec, checkpoint)
    model = weakref.ref(part._ranks.runner.model)
    part.close()
    del part
    gc.collect()
    assert model() is None
