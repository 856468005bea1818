"""The throughput benchmark on a tiny model: its requests, its figures and its input checks."""

from __future__ import annotations

import json
import time
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch

from tests.tiny_chat import save_tiny_chat
from yalis.cli.main import main
from yalis.config import EngineConfig
from yalis.engine.llm import LLM
from yalis.errors import YalisError, YalisFailure
from yalis.perfmodel.floors import ModelDims, decode_work
from yalis.spec import read_spec
from yalis.study import bandwidth, results
from yalis.study.peers.engines import even_steps
from yalis.study.requests import ThroughputPlan, TimedRequest, digest_requests, make_requests, read_dataset
from yalis.study.spread import percentiles
from yalis.study.throughput import Run, YalisEngine, find_floor, least_weight_bytes
from yalis.types import SamplingParams
from yalis.workloads import NAMED, Workload, parse_workload


@pytest.fixture(autouse=True)
def small_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(bandwidth._READ_BYTES, "cpu", 2**22)
    monkeypatch.setitem(bandwidth._MATMUL_SIZE, "cpu", 128)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_chat(tmp_path_factory.mktemp("model")))


def run(model: str, *args: str) -> int:
    return main(["bench", "throughput", "--model", model, "--threads", "1", "--repeats", "2", *args])


def test_a_workload_is_a_name_or_three_numbers() -> None:
    assert parse_workload("poster") == Workload(16, 2480, 2048) == parse_workload("16x2480x2048")
    assert NAMED["prefill-heavy"].prompt_len > 8 * NAMED["prefill-heavy"].output_len
    assert NAMED["decode-heavy"].output_len > 8 * NAMED["decode-heavy"].prompt_len
    for text in ("posters", "16x4", "16x4x", "-1x2x3", "1x2x3x4"):
        with pytest.raises(YalisError, match="accepted: poster, prefill-heavy, decode-heavy, or batch x prompt"):
            parse_workload(text)
    with pytest.raises(YalisError, match="workload 0x4x4 has a number below 1"):
        parse_workload("0x4x4")


def test_sampled_work(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same seeds in every run, so that the tokens do not change; the sampling is recorded and printed."""
    answers = []
    for name in ("one", "two"):
        args = ("--temperature", "0.8", "--top-k", "40", "--top-p", "0.9", "--warmup", "0", "--repeats", "1")
        assert run(model, "--workload", "3x9x5", *args, "--out", str(tmp_path / name)) == 0
        (path,) = (tmp_path / name).iterdir()
        result = results.read(path)
        facts = result.parameters
        assert (facts["temperature"], facts["top_k"], facts["top_p"]) == (0.8, 40, 0.9)
        answers.append(facts["answers"])
        out = capsys.readouterr().out
        assert " · temperature 0.8, top_k 40, top_p 0.9\n" in out
        assert f"floor {result.rows[0]['floor_s']:.3f} s: " in out
    assert answers[0] == answers[1]
    requests = make_requests(ThroughputPlan((Workload(3, 9, 5),), temperature=0.8, seed=4), None, 100, 0)
    assert [request.sampling.seed for request in requests] == [4, 5, 6]
    assert make_requests(ThroughputPlan((Workload(1, 9, 5),)), None, 100, 0)[0].sampling.seed is None
    for args, message in (
        (("--top-p", "0.9"), "have no effect on greedy sampling; give --temperature too"),
        (("--temperature", "0.8", "--top-p", "1.5"), "top_p is 1.5; give a number above 0 and at most 1"),
        (("--temperature", "0.8", "--dataset", "x.jsonl"), "have their own sampling parameters; omit --temperature"),
    ):
        assert run(model, *args) == 2
        assert message in capsys.readouterr().err


def test_a_workload_all_at_once(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(model, "--workload", "3x9x5", "--out", str(tmp_path)) == 0
    out, err = capsys.readouterr()
    (path,) = tmp_path.iterdir()
    assert err == f"yalis: wrote {path}\n"
    assert "3 requests all at once, 27 + 15 tokens" in out
    result = results.read(path)
    (row,) = result.rows
    assert (row["requests"], row["prompt_tokens"], row["output_tokens"], row["rate"]) == (3, 27, 15, None)
    assert 0 < row["seconds_low"] <= row["seconds"] <= row["seconds_high"]
    assert row["tokens_per_s_low"] <= row["tokens_per_s"] <= row["tokens_per_s_high"]
    # Medians over repeats, which differ on a busy machine.
    assert 0.999 * row["tokens_per_s_low"] <= 15 / row["seconds"] <= 1.001 * row["tokens_per_s_high"]
    assert 0 < row["first_token_ms"] <= row["first_token_ms_p90"] <= row["first_token_ms_p99"]
    assert row["first_token_ms"] <= 1e3 * row["seconds_high"]
    assert 0 < row["token_ms"] <= row["token_ms_p90"] <= row["token_ms_p99"]
    assert row["share_of_floor"] == pytest.approx(row["floor_s"] / row["seconds"])
    assert 0 < row["share_of_floor"] < 1
    assert (row["cached_tokens"], row["preemptions"]) == (0, 0)
    assert result.topology == {"ranks": 1, "ranks_per_host": [1], "launcher": ""}
    assert len(set(result.parameters["answers"])) == 3
    vocabulary = json.loads((Path(model) / "config.json").read_text())["vocab_size"]
    counted = make_requests(ThroughputPlan((Workload(3, 9, 5),)), None, vocabulary, 1)
    assert result.parameters["prompts_digest"] == digest_requests(counted)


def test_yalis_and_its_peer(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(model, "--workload", "3x9x5", "--peer", "transformers", "--json") == 0
    ours, theirs = json.loads(capsys.readouterr().out)["rows"]
    assert (ours["ratio"], ours["same_tokens"]) == (1.0, None)
    assert (theirs["engine"], theirs["status"], theirs["same_tokens"]) == ("transformers", "ok", 1.0)
    assert theirs["ratio"] == pytest.approx(theirs["seconds"] / ours["seconds"])
    assert 0 < theirs["token_ms"] < theirs["first_token_ms"] + 1e3 * theirs["seconds"]


def test_an_answer_of_one_token_has_no_time_per_token(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(model, "--workload", "2x4x1", "--peer", "transformers", "--temperature", "0.8", "--top-p", "0.9") == 0
    out = capsys.readouterr().out
    assert "tokens not compared" in out  # each engine has its own noise
    assert "time to first token, transformers" in out
    assert "time per output token" not in out
    # vLLM gives only the time to first token and the total time.
    assert even_steps(2.0, 2.0, 0) == []
    assert even_steps(2.0, 5.0, 3) == [1.0, 1.0, 1.0]
    with pytest.raises(ValueError, match="3 tokens took no longer than the first of them; give more output tokens"):
        even_steps(2.0, 1.9, 2)


def test_a_dataset_arriving_at_random(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "in.jsonl"
    lines = [{"prompt": "abcdefghijklmnopqrstuvwxyz", "max_tokens": 4, "ignore_eos": True}] * 3
    file.write_text("".join(f"{json.dumps(line)}\n" for line in [*lines, {"prompt": "left out"}]))
    args = ["--dataset", str(file), "--requests", "3", "--rate", "20", "--json"]
    assert run(model, *args) == 0
    plain = json.loads(capsys.readouterr().out)
    results.check(plain, "printed")
    (row,) = plain["rows"]
    assert (row["requests"], row["output_tokens"], row["rate"], row["cached_tokens"]) == (3, 12, 20, 0)
    # The run cannot end before the last request arrives and its tokens are generated.
    assert row["floor_s"] > 0.01
    assert row["seconds"] > row["floor_s"]
    assert run(model, *args, "--prefix-reuse") == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert row["cached_tokens"] == 3 * 16  # a block of each, from the repeat before


def test_first_token_time_includes_the_wait_for_a_running_step(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(model, threads=1) as llm:
        poll = llm.poll
        monkeypatch.setattr(llm, "poll", lambda: (time.sleep(0.05), poll())[1])
        sampling = SamplingParams(max_tokens=3, ignore_eos=True)
        requests = [TimedRequest([1, 2], sampling, 0.0), TimedRequest([3, 4], sampling, 0.01)]
        done = YalisEngine(llm).run(requests, lambda text: None)
    # The second request arrives at 10 ms, during a step that sleeps until 50 ms. Its first token takes another 50 ms.
    assert done.first_token[1] > 0.085
    assert done.seconds > 0.2
    assert [len(tokens) for tokens in done.tokens] == [3, 3]


def test_repeats_differ_only_in_tokens() -> None:
    plan = ThroughputPlan((Workload(3, 8, 20), Workload(5, 40, 4)), requests=400, vary=0.25, rate=10)
    first, second = (make_requests(plan, None, 100, turn) for turn in (0, 1))
    assert [(len(request.prompt), request.sampling, request.arrival) for request in first] == [
        (len(request.prompt), request.sampling, request.arrival) for request in second
    ]
    assert all(a.prompt != b.prompt for a, b in zip(first, second, strict=True))
    lengths = {(len(request.prompt), request.sampling.max_tokens) for request in first}
    assert {prompt for prompt, _ in lengths} == {*range(6, 11), *range(30, 51)}
    assert {output for prompt, output in lengths if prompt < 20} == set(range(15, 26))
    gaps = [after.arrival - before.arrival for before, after in pairwise(first)]
    assert first[0].arrival == 0
    assert mean(gaps) == pytest.approx(0.1, rel=0.15)
    assert sum(gap > 0.1 for gap in gaps) / len(gaps) == pytest.approx(0.368, abs=0.08)  # 1/e, of a Poisson process
    mixed = make_requests(ThroughputPlan((Workload(3, 8, 2), Workload(5, 4, 2))), None, 100, 0)
    assert sorted(len(request.prompt) for request in mixed) == [4] * 5 + [8] * 3


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--workload", "2x200x100"], "take 300 tokens, but the context length is 256"),
        (["--workload", "2x100x100", "--vary", "0.5"], "take 300 tokens, but the context length is 256"),
        (["--workload", "2x60x60", "--kv-blocks", "4"], "take 120 tokens, but the context length is 64"),
        (["--workload", "2x2x2", "--dataset", "x"], "give one of them"),
        (["--dataset", "missing.jsonl"], "cannot read missing.jsonl"),
        (["--rate", "0"], "rate is 0"),
        (["--vary", "1"], "vary is 1"),
        (["--requests", "0"], "requests is 0"),
        (["--repeats", "0"], "repeats is 0"),
        (["--workload", "999999999x8x8"], "the workload has 999999999 requests; give at most 1000000"),
        (["--requests", "1000001"], "the workload has 1000001 requests; give at most 1000000"),
        (["--peer", "nobody"], "unknown peer 'nobody'; accepted: "),
        (["--peer", "transformers", "--rate", "3"], "peers run one batch of equal requests"),
    ],
)
def test_invalid_workloads_are_refused(
    model: str, args: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(model, *args) == 2
    assert message in capsys.readouterr().err


def test_an_invalid_dataset_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "in.jsonl"
    file.write_text('{"prompt": "a"}\n{"prompt": 5}\n')
    with pytest.raises(YalisError, match=r"line 2 of .* is invalid: prompt is neither"):
        read_dataset(file, None)
    assert len(read_dataset(file, 1)) == 1
    file.write_text('{"prompt": "a"}\n')
    with pytest.raises(YalisError, match="has 1 request; give a file with at least 2"):
        read_dataset(file, 2)


def test_an_answer_that_is_too_short_is_refused(model: str) -> None:
    with LLM(model, threads=1, max_model_len=16) as llm:
        request = TimedRequest([1] * 10, SamplingParams(max_tokens=9, ignore_eos=True), 0.0)
        with pytest.raises(YalisFailure, match=r"for 9 tokens returned 6, so the times are not valid"):
            YalisEngine(llm).run([request], lambda text: None)


def test_the_floor_counts_every_step_and_every_operation(model: str) -> None:
    with LLM(model, threads=1) as llm:
        spec = llm.spec
    rates = bandwidth.DeviceRates(1e9, 1e12)

    def floor(answers: list[int], **engine: Any) -> float:
        done = Run(len(answers), 1.0, [], [], [[0] * n for n in answers], 8 * len(answers))
        return find_floor(done, EngineConfig(**engine), spec, torch.float32, rates)

    weights = 4 * (2 * 64 * (64 * 2 + 32 * 2 + 3 * 96) + 5 * 64 + 257 * 64) / 1e9  # seconds to read them once
    assert floor([10]) == pytest.approx(10 * weights, rel=0.02)
    assert floor([10] * 4) == pytest.approx(10 * weights, rel=0.1)
    assert floor([10] * 4, max_num_seqs=2) == pytest.approx(20 * weights, rel=0.1)
    assert floor([10], tp=2) == pytest.approx(5 * weights, rel=0.02)
    assert floor([10] * 4, dp=2, max_num_seqs=2) == pytest.approx(10 * weights, rel=0.1)


def test_the_floor_counts_the_experts_of_each_step() -> None:
    spec = read_spec(json.loads((Path(__file__).parents[2] / "benchmarks/shapes/qwen3-30b-a3b.json").read_text()))
    dims = ModelDims.of(spec, 2, 2)
    one, sixteen = (decode_work(dims, [0.0] * batch).weight_bytes for batch in (1, 16))
    assert sixteen > 5 * one
    assert least_weight_bytes(dims, 10, 160, 16) == pytest.approx(10 * sixteen)
    assert least_weight_bytes(dims, 10, 10, 16) == pytest.approx(10 * one)
    mixed = sum(decode_work(dims, [0.0] * batch).weight_bytes for batch in (16, 12, 3, 1))
    assert 4 * one < least_weight_bytes(dims, 4, 32, 16) < mixed
    assert least_weight_bytes(dims, 3, 3, 1) == pytest.approx(3 * one)


def test_percentiles() -> None:
    assert percentiles([5.0], 50, 99) == [5.0, 5.0]
    assert percentiles([float(n) for n in range(101)], 50, 90, 99) == [50.0, 90.0, 99.0]


def test_digests_do_not_change_with_new_sampling_fields() -> None:
    """Results of earlier versions have this digest, so they can be compared and studies can be resumed."""
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    assert digest_requests([TimedRequest([1, 2, 3], params, 0.0)]) == "7daf2f555e45b58f"
