"""The schema of measurements."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from yalis import results
from yalis.errors import YalisError, YalisFailure

ROW: dict[str, Any] = {
    "engine": "yalis", "version": "0", "status": "ok", "batch": 1, "prompt_len": 4, "output_len": 4,
    "first_token_ms": 1.0, "prefill_tokens_per_s": 2.0, "decode_ms": 3, "decode_ms_low": 3.0, "decode_ms_high": 3.0,
    "tokens_per_s": 4.0, "host_ms": None,
    "prefill_floor_ms": None, "floor_ms": None, "share_of_floor": None, "ratio": None, "same_tokens": None,
}  # fmt: skip


def make(**changed: Any) -> results.Result:
    return results.new("latency", {"seed": 0}, [{**ROW, **changed}], "yalis bench latency", [{"type": "cpu"}])


def test_written_and_read_back(tmp_path: Path) -> None:
    result = make()
    path, second = results.write(result, tmp_path / "new"), results.write(result, tmp_path / "new")
    assert path != second
    assert results.read(path) == results.read(second) == result
    assert result.versions["torch"]
    assert result.host["cores"] >= 1
    assert [p.suffix for p in (tmp_path / "new").iterdir()] == [".json", ".json"]  # no temporary file stays


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: d.update(schema="other"), "not a yalis result"),
        (lambda d: d.update(schema_version=0), "schema version 0, and this yalis reads versions 1 to 2"),
        (lambda d: d.pop("host"), "has no 'host'"),
        (lambda d: d.update(schema_version=3), "schema version 3, and this yalis reads versions 1 to 2"),
        (lambda d: d.update(rows={}), "'rows' of type dict"),
        (lambda d: d.update(rows=[]), "no rows: nothing was measured"),
        (lambda d: d.update(extra=1), "field 'extra'"),
        (lambda d: d.update(kind="speed"), "kind 'speed'"),
        (lambda d: d["rows"][0].pop("decode_ms"), "row 1 .* lacks the column 'decode_ms'"),
        (lambda d: d["rows"][0].update(odd=1), "row 1 .* unknown column 'odd'"),
        (lambda d: d["rows"][0].update(batch="1"), "'1' as 'batch'"),
        (lambda d: d["rows"][0].update(engine=None), "None as 'engine'"),
        (lambda d: d["rows"][0].update(decode_ms=True), "True as 'decode_ms'"),
    ],
)
def test_a_changed_file_is_refused(tmp_path: Path, change: Any, words: str) -> None:
    path = results.write(make(), tmp_path)
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))
    with pytest.raises(YalisError, match=words):
        results.read(path)


def test_version_1_had_no_topology(tmp_path: Path) -> None:
    result = make()
    path = results.write(result, tmp_path)
    data = json.loads(path.read_text())
    del data["topology"]
    path.write_text(json.dumps({**data, "schema_version": 1}))
    assert results.read(path) == result


def test_committed_results_can_be_read() -> None:
    found = sorted((Path(__file__).parents[2] / "benchmarks" / "results").rglob("*.json"))
    assert found
    for path in found:
        results.read(path)


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    for text, words in (("{", "not JSON"), ("[]", "not a yalis result"), ("{}", "not a yalis result")):
        path.write_text(text)
        with pytest.raises(YalisError, match=words):
            results.read(path)
    with pytest.raises(YalisError, match="cannot read"):
        results.read(tmp_path / "missing.json")


def test_checked_on_writing_too(tmp_path: Path) -> None:
    with pytest.raises(YalisError, match="nan as 'decode_ms'"):
        make(decode_ms=float("nan"))
    with pytest.raises(YalisError, match="lacks the column"):
        results.write(replace(make(), rows=[{}]), tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(YalisFailure, match="give another folder"):
        results.write(make(), tmp_path / "file")
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
