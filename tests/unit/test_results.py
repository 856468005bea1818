"""Results: the schema, files of older versions, and what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from yalis.cli.main import main
from yalis.errors import YalisError, YalisFailure
from yalis.study import results
from yalis.study.results.card import Section
from yalis.study.results.column import Column, with_spread
from yalis.study.results.kind import ResultKind

ROW: dict[str, Any] = {
    "engine": "yalis", "version": "0", "status": "ok", "batch": 1, "prompt_len": 4, "output_len": 4,
    "first_token_ms": 1.0, "first_token_ms_low": None, "first_token_ms_high": None, "prefill_tokens_per_s": 2.0,
    "decode_ms": 3, "decode_ms_low": 3.0, "decode_ms_high": 3.0,
    "seconds": None, "seconds_low": None, "seconds_high": None, "tokens_per_s": 4.0, "host_ms": None,
    "prefill_floor_ms": None, "floor_ms": None, "share_of_floor": None, "ratio": None, "same_tokens": None,
}  # fmt: skip


def make(**changed: Any) -> results.Result:
    return results.new(
        "latency",
        {"engine": {"model": "m"}},
        [{**ROW, **changed}],
        "yalis bench latency",
        [{"type": "cpu", "name": "CPU"}],
    )


def test_written_and_read_back(tmp_path: Path) -> None:
    result = make()
    path, second = results.write(result, tmp_path / "new"), results.write(result, tmp_path / "new")
    assert path != second
    assert results.read(path) == results.read(second) == result
    assert result.versions["torch"]
    assert result.host["cores"] >= 1
    assert [p.suffix for p in (tmp_path / "new").iterdir()] == [".json", ".json"]  # no temporary file is left


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: d.update(schema="other"), "not a yalis result"),
        (lambda d: d.update(schema_version=0), "schema version 0, but this yalis reads versions 1 to 7"),
        (lambda d: d.pop("host"), "has no 'host'"),
        (lambda d: d.update(schema_version=8), "schema version 8, but this yalis reads versions 1 to 7"),
        (lambda d: d.update(rows={}), "'rows' of type dict"),
        (lambda d: d.update(rows=[]), "no rows: nothing was measured"),
        (lambda d: d.update(extra=1), "unknown field 'extra'"),
        (lambda d: d.update(kind="speed"), "kind 'speed'"),
        (lambda d: d["rows"][0].pop("decode_ms"), "row 1 .* lacks the column 'decode_ms'"),
        (lambda d: d["rows"][0].update(odd=1), "row 1 .* unknown column 'odd'"),
        (lambda d: d["rows"][0].update(batch="1"), "'1' as 'batch'"),
        (lambda d: d["rows"][0].update(engine=None), "None as 'engine'"),
        (lambda d: d["rows"][0].update(decode_ms=True), "True as 'decode_ms'"),
        (lambda d: d["rows"][0].update(decode_ms=10**400), "as 'decode_ms'; it should be a number"),
        (lambda d: d["rows"][0].update(batch=10**400), "as 'batch'; it should be an integer"),
        (lambda d: d["rows"][0].update(decode_ms=0), "0 as 'decode_ms'; it should be above 0"),
        (lambda d: d["rows"][0].update(first_token_ms=-1), "-1 as 'first_token_ms'; it should be above 0"),
        (lambda d: d["rows"][0].update(decode_ms=None), "no 'decode_ms', although its status is ok"),
        (lambda d: d["rows"][0].update(decode_ms_low=4), "3 as 'decode_ms', from 4 to 3.0"),
        (lambda d: d["rows"][0].update(decode_ms_high=2), "3 as 'decode_ms', from 3.0 to 2"),
        (lambda d: d["rows"][0].update(decode_ms_high=None), "3 as 'decode_ms', from 3.0 to None"),
        (lambda d: d.update(created="yesterday"), "created 'yesterday'; it should be a time such as"),
        (lambda d: d.update(created="2026-01-01T00:00:00"), "it should be a time such as"),
    ],
)
def test_an_invalid_file_is_refused(tmp_path: Path, change: Any, words: str) -> None:
    path = results.write(make(), tmp_path)
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))
    with pytest.raises(YalisError, match=words):
        results.read(path)


COMMITTED = Path(__file__).parents[2] / "benchmarks" / "results" / "cpu"
FILES = {
    "latency": "latency-smollm2-135m-fp32.json",
    "throughput": "scaling-smollm2-135m/tp2-mpi/throughput-20261115T125013.json",
    "scaling": "scaling-smollm2-135m/scaling.json",
    "profile": "profile-smollm2-135m-tp2.json",
    "pipeline": "pipeline-smollm2-135m-pp2.json",
    "allreduce": "allreduce-lab-4x2-1ms.json",
}


@pytest.mark.parametrize(
    ("kind", "place", "value", "words"),
    [
        ("latency", "parameters engine", 5, "5 as 'parameters.engine'; it should be an object"),
        ("latency", "parameters engine model", None, "None as 'parameters.engine.model'; it should be a string"),
        ("latency", "devices", [], "'devices'; it should be a non-empty list"),
        ("latency", "devices", [{"type": "cpu"}], "no 'devices[].name'"),
        ("latency", "devices 0 type", 1, "1 as 'devices[].type'"),
        ("latency", "devices 0 threads", "2", "'2' as 'devices[].threads'; it should be a positive integer"),
        ("latency", "devices", ["cpu"], "'cpu' as 'devices[]'; it should be an object"),
        ("latency", "host cores", 0, "0 as 'host.cores'; it should be a positive integer"),
        ("latency", "host", {}, "no 'host.cores'"),
        ("latency", "notes", [1], "1 as 'notes[]'"),
        ("latency", "versions torch", 2, "2 as 'versions.torch'"),
        ("throughput", "topology", {"ranks": 2}, "no 'topology.ranks_per_host'"),
        ("throughput", "topology ranks_per_host", [], "'topology.ranks_per_host'; it should be a non-empty"),
        ("throughput", "parameters answers", [], "'parameters.answers'"),
        ("throughput", "parameters dtype", 32, "32 as 'parameters.dtype'"),
        ("throughput", "parameters engine ranks_per_gpu", 0, "'parameters.engine.ranks_per_gpu'"),
        ("throughput", "rows 0 seconds", None, "no 'seconds', although its status is ok"),
        ("throughput", "rows 0 seconds_low", 1e9, "'seconds', from 1000000000.0 to"),
        ("scaling", "parameters machines", None, "'parameters.machines'; it should be a list"),
        ("scaling", "parameters baselines", [], "'parameters.baselines'"),
        ("scaling", "rows 0 seconds", None, "no 'seconds', although its status is ok"),
        ("scaling", "rows 0 ranks", 0, "0 as 'ranks'; it should be above 0"),
        ("profile", "parameters workload", "8x64x64", "'parameters.workload'; it should be an object"),
        ("profile", "parameters watching_costs", 10**400, "'parameters.profiling_overhead'; it should be a number"),
        ("profile", "rows 0 matmul_ms", None, "no 'matmul_ms'"),
        ("pipeline", "rows 0 seconds", None, "no 'seconds'"),
        ("allreduce", "parameters links", [{}], "no 'parameters.links[].delay_us'"),
        ("allreduce", "parameters nodes", [], "'parameters.nodes'"),
        ("allreduce", "parameters lab", 1, "'parameters.lab'; it should be an object"),
        ("allreduce", "rows 0 median_us", None, "no 'median_us', although its status is ok"),
        ("allreduce", "rows 0 low_us", None, "'median_us', from None to"),
        ("allreduce", "rows 0 delay_us", None, "a 'delay_us' in some rows and none in others"),
    ],
)
def test_a_malformed_file_is_one_error_for_every_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, place: str, value: Any, words: str
) -> None:
    data = json.loads((COMMITTED / FILES[kind]).read_text())
    *path, last = [int(step) if step.isdigit() else step for step in place.split()]
    inside = data
    for step in path:
        inside = inside[step]
    inside[last] = value
    broken = tmp_path / "broken.json"
    broken.write_text(json.dumps(data))
    for command in (["report", str(broken), "-o", str(tmp_path / "r.html")], ["bench", "compare", *[str(broken)] * 2]):
        assert main(command) == 2
        err = capsys.readouterr().err
        assert err.startswith("yalis: error: ")
        assert f"{broken} has " in err
        assert words in err
        assert err.count("\n") == 1


def test_older_versions_have_fewer_columns(tmp_path: Path) -> None:
    result = make()
    path = results.write(result, tmp_path)
    data = json.loads(path.read_text())
    for version, added in (2, ["first_token_ms_low", "first_token_ms_high"]), (1, ["host_ms"]):
        for name in added if version == 1 else [*added, "seconds", "seconds_low", "seconds_high"]:
            del data["rows"][0][name]
        path.write_text(json.dumps({**data, "schema_version": version}))
        assert results.read(path) == result
    del data["topology"]
    path.write_text(json.dumps({**data, "schema_version": 1}))
    assert results.read(path) == result
    path.write_text(json.dumps({**data, "schema_version": 2}))
    with pytest.raises(YalisError, match="lacks the column 'host_ms'"):
        results.read(path)


def test_names_of_version_4_are_upgraded() -> None:
    profile, scaling = (json.loads((COMMITTED / FILES[kind]).read_text()) for kind in ("profile", "scaling"))
    assert profile["schema_version"] < 5
    upgraded = results.read(COMMITTED / FILES["profile"]).parameters
    assert upgraded["profiling_overhead"] == profile["parameters"]["watching_costs"]
    assert "watching_costs" not in upgraded
    rows = results.read(COMMITTED / FILES["scaling"]).rows
    assert [row["oversubscribed"] for row in rows] == [row["crowded"] for row in scaling["rows"]]
    assert "crowded" not in rows[0]


def test_committed_results_can_be_read() -> None:
    found = sorted((Path(__file__).parents[2] / "benchmarks" / "results").rglob("*.json"))
    assert found
    for path in found:
        result = results.read(path)
        assert result.schema_version == results.VERSION
        results.check(asdict(result), str(path))
    contents = {path.read_bytes(): path for path in found}
    assert len(contents) == len(found), "a result was committed under two names"


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    for text, words in (("{", "not JSON"), ("[]", "not a yalis result"), ("{}", "not a yalis result")):
        path.write_text(text)
        with pytest.raises(YalisError, match=words):
            results.read(path)
    with pytest.raises(YalisError, match="cannot read"):
        results.read(tmp_path / "missing.json")


def test_results_are_checked_when_written(tmp_path: Path) -> None:
    with pytest.raises(YalisError, match="nan as 'decode_ms'"):
        make(decode_ms=float("nan"))
    with pytest.raises(YalisError, match="lacks the column"):
        results.write(replace(make(), rows=[{}]), tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(YalisFailure, match="give another folder"):
        results.write(make(), tmp_path / "file")
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_a_kind_needs_only_columns_to_be_shown() -> None:
    class Minimal(ResultKind):
        name = "minimal"
        columns = (Column("size", int), *with_spread(Column("wait_ms", float, "ms")), Column("host", str))
        section = Section("Minimal", "")

    kind, result = Minimal(), make()
    row = {**kind.empty_row(), "size": 8, "wait_ms": 2.5, "wait_ms_low": 2.0, "wait_ms_high": 3.0}
    assert list(row) == ["size", "wait_ms", "wait_ms_low", "wait_ms_high", "host"]
    kind.check_rows([row], "this result")
    lines = list(kind.text(replace(result, rows=[row], notes=["a note"])))
    assert lines == ["yalis bench latency", "size  wait ms", "   8  2.50 ms", "a note"]  # `host` is empty in all rows
    assert "minimal" not in results.KINDS  # only modules of `kinds` are registered


def test_reading_and_comparing_need_neither_torch_nor_matplotlib() -> None:
    code = (
        "import sys, yalis.study.compare, yalis.study.results\n"
        "sys.exit(bool({'torch', 'matplotlib'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
