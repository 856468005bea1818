"""Workloads that draw their lengths, and traces."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from statistics import median

import pytest

from yalis.cli.main import main
from yalis.errors import YalisError
from yalis.study.requests import ThroughputPlan, make_requests
from yalis.workloads import ChatWorkload, RequestSize, draw_sizes, parse_any_workload, read_trace


def test_chat_lengths() -> None:
    assert parse_any_workload("chat") == ChatWorkload(768)
    assert parse_any_workload("chat:200") == ChatWorkload(200)
    assert str(ChatWorkload(200)) == "chat:200"
    sizes = draw_sizes([ChatWorkload(20_000)], seed=0)
    prompts, outputs = ([getattr(size, name) for size in sizes] for name in ("prompt_len", "output_len"))
    # e^5.3 = 200 and e^5.2 = 181 are the medians of the distributions before 8 is added.
    assert median(prompts) == pytest.approx(208, rel=0.03)
    assert median(outputs) == pytest.approx(189, rel=0.03)
    # One standard deviation above: e^6.2 and e^5.9.
    assert sorted(prompts)[int(0.8413 * 20_000)] == pytest.approx(501, rel=0.05)
    assert sorted(outputs)[int(0.8413 * 20_000)] == pytest.approx(373, rel=0.05)
    assert (max(prompts), max(outputs)) == (2000, 1000)
    assert min(prompts) > 8 <= min(outputs)
    assert draw_sizes([ChatWorkload(5)], 0) == sizes[:5] != draw_sizes([ChatWorkload(5)], 1)
    plan = ThroughputPlan((ChatWorkload(5),))
    first, second = (make_requests(plan, None, 100, turn) for turn in (0, 1))
    for requests in (first, second):
        assert [(len(one.prompt), one.sampling.max_tokens) for one in requests] == [
            (size.prompt_len, size.output_len) for size in sizes[:5]
        ]
        assert all(one.sampling.ignore_eos and one.sampling.greedy for one in requests)
    assert first[0].prompt != second[0].prompt
    for text in ("chat:", "chat:x", "chatty", "1x2"):
        with pytest.raises(YalisError, match="accepted: poster, prefill-heavy, decode-heavy, chat, chat:N"):
            parse_any_workload(text)
    with pytest.raises(YalisError, match=r"give a number of at least 1, such as chat:200"):
        parse_any_workload("chat:0")


def test_a_trace_is_sorted_by_arrival(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(
        '{"prompt_len": 3, "output_len": 4, "arrival": 1.5}\n\n{"prompt_len": 5, "output_len": 6}\n'
        '{"prompt_len": 7, "output_len": 8, "arrival": 1}\n'
    )
    assert read_trace(path) == [RequestSize(5, 6, 0.0), RequestSize(7, 8, 1.0), RequestSize(3, 4, 1.5)]
    assert len(read_trace(path, 2)) == 2
    requests = make_requests(ThroughputPlan((), trace=str(path)), None, 100, 0)
    assert [(len(one.prompt), one.sampling.max_tokens, one.arrival) for one in requests] == [
        (5, 6, 0.0), (7, 8, 1.0), (3, 4, 1.5)
    ]  # fmt: skip
    assert all(before.arrival <= after.arrival for before, after in pairwise(requests))
    with pytest.raises(YalisError, match="has 3 requests; give a trace with at least 4"):
        read_trace(path, 4)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2 of .* is not valid JSON"),
        ("[1, 2]", "line 2 of .* is not an object; give lines such as"),
        ('{"prompt_len": 3}', "line 2 of .* has no output_len; give a whole number"),
        ('{"prompt_len": 0, "output_len": 1}', "line 2 of .* has 0 as prompt_len"),
        ('{"prompt_len": true, "output_len": 1}', "line 2 of .* has True as prompt_len"),
        ('{"prompt_len": 2.5, "output_len": 1}', "line 2 of .* has 2.5 as prompt_len"),
        ('{"prompt_len": 2, "output_len": 1, "arrival": -1}', "line 2 of .* has -1 as arrival; give seconds"),
        ('{"prompt_len": 2, "output_len": 1, "arrival": NaN}', "line 2 of .* has nan as arrival"),
        ('{"prompt_len": 2, "output_len": 1, "time": 1}', "line 2 of .* has an unknown field 'time'"),
    ],
)
def test_a_bad_line_of_a_trace(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(f'{{"prompt_len": 1, "output_len": 1}}\n{line}\n')
    with pytest.raises(YalisError, match=message):
        read_trace(path)


def test_bad_combinations_with_a_trace_or_chat(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for args, message in (
        (["--trace", "missing.jsonl"], "cannot read missing.jsonl: No such file"),
        (["--trace", "x", "--workload", "chat"], "--workload and --trace exclude each other"),
        (["--trace", "x", "--dataset", "y"], "--dataset and --trace exclude each other"),
        (["--trace", "x", "--rate", "2"], "a trace has its own; omit --rate"),
        (["--workload", "chat", "--vary", "0.5"], "chat has its own lengths; omit --vary"),
        (["--workload", "chat", "--peer", "vllm"], "peers run one batch of equal requests"),
    ):
        assert main(["bench", "throughput", *args]) == 2
        assert message in capsys.readouterr().err
