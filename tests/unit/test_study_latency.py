"""The latency benchmark on a tiny model, with peers in the same run."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tiny_chat import save_tiny_chat
from yalis.cli.main import main
from yalis.config import EngineConfig
from yalis.engine.llm import LLM
from yalis.errors import YalisError, YalisFailure
from yalis.study import bandwidth, results
from yalis.study.latency import Floors, LatencyPlan, YalisEngine, _run_case, _tabulate, size_engine
from yalis.study.peers import engines as peer_engines
from yalis.study.peers.peer import Peer, PeerSetup, Timing
from yalis.study.peers.process import PEERS, start_peer
from yalis.study.topology import has_floor, note_peer_devices
from yalis.workloads import Workload


class Broken:
    """A peer that loads and then fails."""

    name, version = "broken", "1"

    def __init__(self, setup: PeerSetup) -> None:
        pass

    def run(self, prompts: list[list[int]], output_len: int) -> Timing:
        raise RuntimeError("out of\nluck")


class Missing:
    def __init__(self, setup: PeerSetup) -> None:
        import a_package_that_is_not_there  # noqa: F401


@pytest.fixture
def small_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(bandwidth._READ_BYTES, "cpu", 2**22)
    monkeypatch.setitem(bandwidth._MATMUL_SIZE, "cpu", 128)
    own = {**PEERS._entries, "broken": f"{__name__}:Broken", "missing": f"{__name__}:Missing"}
    monkeypatch.setattr(PEERS, "_entries", own)


@pytest.mark.usefixtures("small_measurements")
def test_yalis_and_its_peers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(save_tiny_chat(tmp_path / "model"))
    capsys.readouterr()  # saving draws a progress bar
    args = "bench latency --batch 1,3 --prompt-len 9 --output-len 5 --repeats 2 --threads 1"
    args += f" --peer transformers --peer broken --peer missing --model {model} --out {tmp_path / 'out'}"
    assert main(args.split()) == 0
    out, err = capsys.readouterr()
    (path,) = (tmp_path / "out").iterdir()
    assert err == f"yalis: wrote {path}\n"
    result = results.read(path)
    assert [(row["engine"], row["batch"]) for row in result.rows] == [
        (engine, batch) for batch in (1, 3) for engine in ("yalis", "transformers", "broken", "missing")
    ]
    for row in result.rows[0], result.rows[1], result.rows[4], result.rows[5]:
        _check(row)
    ours, theirs, broken, missing = result.rows[4:]
    assert (ours["ratio"], ours["same_tokens"]) == (1.0, None)
    assert theirs["ratio"] == pytest.approx(theirs["decode_ms"] / ours["decode_ms"])
    assert theirs["same_tokens"] == 1.0
    assert broken["status"] == "RuntimeError: out of luck"
    name = "a_package_that_is_not_there"
    assert missing["status"] == f"{name} is not installed: make peers, or pip install {name}"
    assert broken["decode_ms"] is missing["decode_ms"] is None
    assert "batch 3: decode step of transformers: " in out
    assert "x the time of yalis; same tokens\n" in out
    assert f"not installed: make peers, or pip install {name}" in out


class FixedLengths:
    """An engine whose answers have the given numbers of tokens."""

    name, version = "fixed", "1"

    def __init__(self, *counts: int) -> None:
        self._counts = counts

    def run(self, prompts: list[list[int]], output_len: int) -> Timing:
        return Timing(1.0, [1.0], 2.0, [[7] * count for count in self._counts])


def test_answers_of_the_wrong_length_are_refused() -> None:
    case, plan = Workload(2, 3, 4), LatencyPlan(warmup=0, repeats=1)
    why = "2 requests for 4 tokens returned {} tokens in {} answers, so the times are not valid"
    engines: list[tuple[str, Peer | str]] = [
        ("good", FixedLengths(4, 4)),
        ("short", FixedLengths(4, 3)),
        ("none", FixedLengths()),
    ]
    good, *bad = _run_case(case, plan, engines, 10, lambda text: None)
    assert len(good) == 1
    assert bad == [why.format(7, 2), why.format(0, 0)]
    with pytest.raises(YalisFailure, match="returned 7 tokens in 2 answers"):
        _run_case(case, plan, engines[1:], 10, lambda text: None)  # YALIS is the first


def test_the_floor_of_an_engine_counts_its_own_devices() -> None:
    engines: list[tuple[str, Peer | str]] = [("yalis", FixedLengths()), ("transformers", FixedLengths())]
    timings: list[list[Timing] | str] = [[FixedLengths(4).run([], 4)], [FixedLengths(4).run([], 4)]]
    case = Workload(1, 3, 4)
    ours, theirs = _tabulate(case, engines, timings, Floors(0.8, 0.4), 2, comparable=True)
    assert (ours["prefill_floor_ms"], ours["floor_ms"], ours["share_of_floor"]) == (400.0, 200.0, 0.2)
    assert (theirs["prefill_floor_ms"], theirs["floor_ms"], theirs["share_of_floor"]) == (800.0, 400.0, 0.4)
    ours, theirs = _tabulate(case, engines, timings, None, 2, comparable=True)
    assert ours["floor_ms"] is theirs["share_of_floor"] is None

    one, two = EngineConfig("m"), EngineConfig("m", tp=(2, 1))
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert has_floor(one, cpu)
    assert has_floor(two, cuda)
    assert not has_floor(two, cpu)  # its ranks share the memory bandwidth
    assert not has_floor(replace(two, ranks_per_gpu=2), cuda)
    assert note_peer_devices(one, ["vllm"]) == note_peer_devices(two, []) == []
    assert note_peer_devices(two, ["vllm"]) == ["yalis ran on 2 ranks and vllm on one device"]


def _check(row: dict[str, Any]) -> None:
    assert row["status"] == "ok"
    assert 0 < row["decode_ms_low"] <= row["decode_ms"] <= row["decode_ms_high"]
    assert 0 < row["first_token_ms_low"] <= row["first_token_ms"] <= row["first_token_ms_high"]
    assert row["first_token_ms_low"] / 1e3 < row["seconds_high"]
    assert 0 < row["seconds_low"] <= row["seconds"] <= row["seconds_high"]
    assert row["tokens_per_s"] == pytest.approx(row["batch"] * row["output_len"] / row["seconds"])
    assert row["tokens_per_s"] > 0
    assert row["share_of_floor"] == pytest.approx(row["floor_ms"] / row["decode_ms"])


@pytest.mark.usefixtures("small_measurements")
def test_tokens_of_random_weights_are_not_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(save_tiny_chat(tmp_path / "model"))
    args = "bench latency --batch 2 --prompt-len 4 --output-len 3 --repeats 1 --warmup 0 --threads 1 --json"
    assert main([*args.split(), "--peer", "transformers", "--load", "random", "--model", model]) == 0
    data = json.loads(capsys.readouterr().out)
    results.check(data, "printed")
    assert [row["same_tokens"] for row in data["rows"]] == [None, None]


@pytest.mark.usefixtures("small_measurements")
def test_workloads_share_one_engine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(save_tiny_chat(tmp_path / "model"))
    args = "bench latency --workload 2x5x3 --workload 1x9x4 --repeats 1 --warmup 0 --threads 1 --json --model"
    assert main([*args.split(), model]) == 0
    data = json.loads(capsys.readouterr().out)
    assert [(row["batch"], row["prompt_len"], row["output_len"]) for row in data["rows"]] == [(2, 5, 3), (1, 9, 4)]
    assert all(0 < row["host_ms"] < row["decode_ms"] for row in data["rows"])
    assert data["parameters"]["load_seconds"] > 0
    assert data["parameters"]["graph_bytes"] == 0
    assert main([*args.replace("2x5x3", "2x5x1").split(), model]) == 2
    assert "has no decode step" in capsys.readouterr().err


def test_graph_memory_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    kept = Path(__file__).parents[2] / "benchmarks" / "results" / "h200" / "latency-llama-3.1-8b-before-tuning.json"
    read = results.read(kept)
    old = replace(read, rows=[{**row, "seconds": 1.0, "seconds_low": 1.0, "seconds_high": 1.0} for row in read.rows])
    print("\n".join(results.kind_of(old).text(old)))
    assert "CUDA graphs" not in capsys.readouterr().out
    new = replace(old, parameters={**old.parameters, "graph_bytes": 321 << 20})
    results.check(asdict(new), "this")
    print("\n".join(results.kind_of(new).text(new)))
    assert "\nCUDA graphs use 321.0 MiB of GPU memory\n" in capsys.readouterr().out
    with pytest.raises(YalisError, match=r"'parameters\.graph_bytes'; it should be an integer"):
        results.check(asdict(replace(old, parameters={**old.parameters, "graph_bytes": "much"})), "this")


def test_vllm_gets_a_model_folder(tmp_path: Path) -> None:
    config = tmp_path / "shape.json"
    config.write_text("{}")
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    setup = PeerSetup(config, True, torch.float32, torch.device("cpu"))
    assert (peer_engines._model_folder(setup, scratch) / "config.json").read_text() == "{}"
    assert peer_engines._model_folder(replace(setup, path=scratch), tmp_path) == scratch


@pytest.mark.usefixtures("small_measurements")
def test_a_prompt_longer_than_the_context_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(save_tiny_chat(tmp_path / "model", max_position=64))
    assert (
        main(["bench", "latency", "--prompt-len", "60", "--output-len", "5", "--threads", "1", "--model", model]) == 2
    )
    assert "prompt_len + output_len is 65, but the context length is 64" in capsys.readouterr().err


def test_max_num_seqs_is_raised_to_the_largest_batch(tmp_path: Path) -> None:
    model = str(save_tiny_chat(tmp_path / "model"))
    cases = LatencyPlan(batch=(2, 5), prompt_len=9, output_len=5).cases
    config = size_engine(EngineConfig(model, max_num_seqs=2, threads=1), cases)
    assert (config.max_num_seqs, config.kv_blocks) == (5, 10)
    assert size_engine(EngineConfig(max_num_seqs=64), cases).max_num_seqs == 64
    assert size_engine(EngineConfig(kv_memory=0.5), cases).kv_blocks is None
    assert size_engine(EngineConfig(kv_blocks=3), cases).kv_blocks == 3
    assert size_engine(EngineConfig(max_model_len=1000), cases).kv_blocks == 63
    with LLM(model, max_num_seqs=5, kv_blocks=config.kv_blocks, threads=1) as llm:
        timing = YalisEngine(llm).run([[7, number] * 4 for number in range(5)], 5)
        assert llm.stats.steps == 5
        assert len(timing.steps) == 4
        assert [len(tokens) for tokens in timing.tokens] == [5] * 5


def test_only_steps_that_decode_the_whole_batch_count(tmp_path: Path) -> None:
    model = str(save_tiny_chat(tmp_path / "model"))
    with LLM(model, max_num_seqs=2, max_batch_tokens=8, threads=1) as llm:
        # 8 tokens per step: the second prompt is computed while the first sequence decodes, and finishes a step later.
        timing = YalisEngine(llm).run([[1] * 8, [2] * 7], 6)
        assert llm.stats.steps == 7
        assert len(timing.steps) == 4
        assert timing.first_token < timing.total


@pytest.mark.parametrize("engine", [{"max_num_seqs": 2}, {"max_num_seqs": 3, "kv_blocks": 5}])
def test_a_batch_that_never_decodes_together_has_no_step_time(tmp_path: Path, engine: dict[str, int]) -> None:
    model = str(save_tiny_chat(tmp_path / "model"))
    with (
        LLM(model, threads=1, **engine) as llm,
        pytest.raises(YalisFailure, match="the batch of 3 never decoded in one step"),
    ):
        YalisEngine(llm).run([[1] * 8, [2] * 8, [3] * 8], 30)


@pytest.mark.usefixtures("small_measurements")
def test_a_peer_without_a_package_names_the_package_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "accelerate", None)
    setup = PeerSetup(tmp_path / "model.gguf", False, torch.float32, torch.device("cpu"))
    assert start_peer("transformers", setup) == "accelerate is not installed: make peers, or pip install accelerate"
