"""Comparing two results: what counts as a change, and what cannot be compared."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from yalis.cli.main import main
from yalis.errors import YalisError
from yalis.study import results
from yalis.study.compare import compare
from yalis.study.results import Result

ENGINE = {"model": "m", "load": "auto", "load_seed": 0, "tokenizer": None, "threads": 2}
DEVICE = {"type": "cpu", "name": "CPU, AVX2", "threads": 2}


def latency(*rows: dict[str, Any], engine: dict[str, Any] = ENGINE, **parameters: Any) -> Result:
    facts = {"seed": 0, "prompt_len": 8, "dtype": "float32", "engine": engine, **parameters}
    return results.new("latency", facts, [_row(**row) for row in rows], "yalis bench latency", [dict(DEVICE)])


def kernels(**parameters: Any) -> Result:
    row = {**results.empty_row("kernels"), "kernel": "down", "shape": "8x8", "rows": 1, "status": "ok", "us": 1.0}
    return results.new("kernels", {"dtype": "float32", **parameters}, [row], "yalis bench kernels", [dict(DEVICE)])


def _row(**values: Any) -> dict[str, Any]:
    row: dict[str, Any] = results.empty_row("latency")
    row.update(engine="yalis", version="0", status="ok", batch=1, prompt_len=8, output_len=8, tokens_per_s=1.0)
    return {**row, **values}


def step(middle: float | None, low: float | None = None, high: float | None = None, **more: Any) -> dict[str, Any]:
    return {"decode_ms": middle, "decode_ms_low": low, "decode_ms_high": high, **more}


@pytest.mark.parametrize(
    ("before", "after", "verdict", "sure"),
    [
        (step(10, 9, 11), step(12, 11.5, 13), "slower", True),
        (step(12, 11.5, 13), step(10, 9, 11), "faster", True),
        (step(10, 9, 11), step(10.9, 10.8, 11.2), "the same", True),  # within the spread of the first
        (step(10, 9.9, 10.1), step(11, 9, 12), "the same", True),  # the first is within the spread of the second
        (step(10, 10, 10), step(10.4, 10.4, 10.4), "the same", False),  # one repeat
        (step(10, 10, 10), step(10.6, 10.6, 10.6), "slower", False),
        (step(10), step(9), "faster", False),
    ],
)
def test_a_metric_changed_if_it_is_outside_both_spreads(
    before: dict[str, Any], after: dict[str, Any], verdict: str, sure: bool
) -> None:
    (change,) = compare(latency(before), latency(after), 0.05).changes
    assert (change.verdict, change.sure) == (verdict, sure)
    assert change.ratio == pytest.approx(after["decode_ms"] / before["decode_ms"])


def test_the_spread_of_few_repeats_is_ignored() -> None:
    """The spread of a decode step is over many steps, and is used."""
    rows = [
        step(10 * k, 9.9 * k, 10.1 * k, first_token_ms=k, first_token_ms_low=k - 0.001, first_token_ms_high=k + 0.001)
        for k in (1, 1.03)
    ]
    for repeats, sure in ((2, [True, False]), (5, [True, True])):
        found = compare(*(latency(row, repeats=repeats) for row in rows), 0.05).changes
        assert [change.verdict for change in found] == ["slower", "slower" if repeats == 5 else "the same"]
        assert [change.sure for change in found] == sure


def test_a_metric_that_an_older_version_did_not_record_is_skipped() -> None:
    new = step(10, first_token_ms=2.0, first_token_ms_low=1.9, first_token_ms_high=2.1, seconds=1.0)
    for before, after in (step(10), new), (new, step(10)):
        assert [change.metric for change in compare(latency(before), latency(after), 0.05).changes] == ["decode_ms"]
    slow = {**new, "first_token_ms": 3.0, "first_token_ms_low": 2.5, "first_token_ms_high": 3.5}
    changes = compare(latency(new), latency(slow), 0.05).changes
    assert [(change.verdict, change.sure) for change in changes] == [
        ("the same", False), ("slower", True), ("the same", False),
    ]  # fmt: skip


def test_more_tokens_per_second_are_better() -> None:
    row: dict[str, Any] = results.empty_row("throughput")
    row.update(engine="yalis", version="0", status="ok", requests=1, prompt_tokens=1, output_tokens=1)
    row.update(seconds=1.0, seconds_low=1.0, seconds_high=1.0, first_token_ms=1.0)
    facts = {"engine": {**ENGINE, "ranks_per_gpu": 1}, "dtype": "float32", "answers": ["a"]}
    old, new = (
        results.new("throughput", facts, [{**row, "tokens_per_s": speed}], "", [dict(DEVICE)]) for speed in (10.0, 20.0)
    )
    assert [change.verdict for change in compare(old, new, 0.05).changes] == ["faster", "the same", "the same"]
    assert [change.verdict for change in compare(new, old, 0.05).changes] == ["slower", "the same", "the same"]


def test_rows_are_matched_by_their_identity() -> None:
    old = latency(step(1, batch=1), step(2, batch=2), step(None, batch=4, status="failed"), step(8, batch=8))
    new = latency(step(16, batch=16), step(4, batch=4), step(None, batch=2, status="failed"), step(1, batch=1))
    verdicts = {change.setting.split(", ")[1]: change.verdict for change in compare(old, new, 0.05).changes}
    assert verdicts == {
        "batch 1": "the same", "batch 2": "failed", "batch 4": "fixed", "batch 8": "gone", "batch 16": "new",
    }  # fmt: skip
    with pytest.raises(YalisError, match="no setting in common that both measured"):
        compare(latency(step(8, batch=8)), new, 0.05)


def test_a_failed_row_has_no_value_even_if_it_has_a_time() -> None:
    good, wrong = step(10, batch=2), step(1, batch=2, status="wrong tokens: 0% of its answers equal those of tp1")
    broken = compare(latency(step(1), good), latency(step(1), wrong), 0.05)
    assert [(change.before, change.after, change.verdict) for change in broken.slower] == [(10, None, "failed")]
    fixed = compare(latency(step(1), wrong), latency(step(1), good), 0.05).changes[1]
    assert (fixed.before, fixed.after, fixed.verdict) == (None, 10, "fixed")


def test_machines_and_work_must_be_the_same() -> None:
    result = latency(step(1))
    other_cpu = replace(result, host={**result.host, "cpu": "another"})
    other_cores = replace(result, host={**result.host, "cores": 99})
    for changed in (other_cpu, other_cores, replace(result, devices=[{**DEVICE, "name": "H200"}])):
        with pytest.raises(YalisError, match="from different machines"):
            compare(result, changed, 0.05)
    gpu = replace(result, devices=[{"type": "cuda", "name": "H200"}])
    assert compare(
        gpu, replace(gpu, host={**gpu.host, "cores": 99}), 0.05
    ).changes  # the cores of a GPU job do not matter
    for changed in (
        latency(step(1), prompt_len=9),
        latency(step(1), dtype="bfloat16"),
        latency(step(1), engine={**ENGINE, "model": "n"}),
    ):
        with pytest.raises(YalisError, match="not of the same work"):
            compare(result, changed, 0.05)
    with pytest.raises(YalisError, match="not of the same work: prompts_digest is a and b"):
        compare(latency(step(1), prompts_digest="a"), latency(step(1), prompts_digest="b"), 0.05)
    assert compare(latency(step(1)), latency(step(1), prompts_digest="b"), 0.05).changes
    assert compare(latency(step(1), read_by="torch.sum"), latency(step(1), read_by="linear, one row"), 0.05).changes
    assert compare(kernels(), kernels(prompts=4), 0.05).changes  # an older version did not measure prompts
    with pytest.raises(YalisError, match="not of the same work: prompts is 2 and 4"):
        compare(kernels(prompts=2), kernels(prompts=4), 0.05)
    with_dataset = latency(step(1), dataset="in.jsonl"), latency(step(1), dataset="in.jsonl", prompts_digest="b")
    with pytest.raises(YalisError, match="not of the same work: prompts_digest"):
        compare(*with_dataset, 0.05)
    allreduce = replace(result, kind="allreduce")
    with pytest.raises(YalisError, match="one result is of kind latency and one of allreduce"):
        compare(result, allreduce, 0.05)
    with pytest.raises(YalisError, match="noise is 1"):
        compare(result, result, 1)


def test_settings_that_differ_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = latency(step(10, 9, 11), repeats=3)
    new = latency(step(20, 19, 21), step(3, batch=3), engine={**ENGINE, "threads": 1}, repeats=5)
    new = replace(new, revision="abc", versions={**new.versions, "torch": "9"}, devices=[{**DEVICE, "card": "8f1c"}])
    first, second = (str(results.write(one, tmp_path)) for one in (old, new))
    assert main(["bench", "compare", first, second]) == 0
    out, err = capsys.readouterr()
    assert "slower  engine yalis, batch 1, prompt_len 8, output_len 8: decode_ms 10 -> 20 ms (2.000x)\n" in out
    assert "new  engine yalis, batch 3" in out
    assert "the same within noise: 0 of 2 metrics" in out
    for words in (
        "repeats: 3 and 5",
        "engine's threads: 2 and 1",
        "card: [None] and ['8f1c']",
        "torch: ",
        "revision: ",
    ):
        assert f"yalis: the results differ in {words}" in err
    assert main(["bench", "compare", first, second, "--fail-if-slower", "--json"]) == 1
    assert [json.loads(line)["verdict"] for line in capsys.readouterr().out.splitlines()] == ["slower", "new"]
    assert main(["bench", "compare", second, first, "--fail-if-slower"]) == 0
    assert main(["bench", "compare", first, first, "--all"]) == 0
    assert "the same  engine yalis" in capsys.readouterr().out


def test_compared_columns_exist() -> None:
    for kind in results.KINDS.values():
        names = {column.name for column in kind.columns}
        assert names.issuperset(kind.identity)
        assert names.issuperset(metric.column for metric in kind.metrics)
        for column in kind.columns:
            assert names.issuperset(filter(None, (column.low, column.high)))
