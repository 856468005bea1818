"""`yalis doctor` and `yalis models`."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from yalis.attention.base import BACKENDS
from yalis.cli.doctor import examine
from yalis.cli.main import main
from yalis.families import FAMILIES
from yalis.kernels import native


def test_doctor_finds_this_environment_usable(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    findings = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    by_name = {(finding["area"], finding["name"]): finding for finding in findings}
    assert by_name["software", "torch"]["detail"] == torch.__version__
    assert "float32" in by_name["devices", "cpu"]["detail"]
    for backend in BACKENDS.names():
        finding = by_name["attention on cpu", backend]
        assert finding["usable"] or finding["detail"]
    assert by_name["attention on cpu", "sdpa"]["usable"]
    assert by_name["communication on cpu", "torch"]["usable"]
    assert by_name["ranks", "launcher"]["usable"]
    assert main(["doctor"]) == 0
    assert "attention on cpu\n  ok  sdpa" in capsys.readouterr().out


def test_doctor_reports_a_torch_that_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.4.1")
    finding = next(finding for finding in examine() if finding.name == "torch")
    assert (finding.usable, finding.needed) == (False, True)
    assert finding.detail == "2.4.1 is too old; 2.11 or newer is needed: pip install -U torch"


def test_doctor_reports_missing_packages(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    missing = {"gguf", "jinja2", "accelerate", "triton"}
    monkeypatch.setattr("yalis.machine.package_version", lambda name: None if name in missing else "9")
    assert main(["doctor"]) == 0  # optional packages
    out = capsys.readouterr().out
    assert "--  gguf          not installed; only needed for GGUF files: pip install gguf\n" in out
    assert "--  jinja2        not installed; only needed for chat templates: pip install jinja2\n" in out
    assert "--  triton        not installed; only needed for the triton attention backend" in out
    assert "safetensors" not in out  # not needed: yalis reads safetensors itself
    missing.add("transformers")
    assert main(["doctor"]) == 1
    assert "--  transformers  not installed; pip install transformers\n" in capsys.readouterr().out


def test_doctor_gives_the_reason_for_missing_native_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    assert next(finding for finding in examine() if finding.name == "native").usable
    monkeypatch.setattr(native, "_loaded", native.Unavailable("no C compiler; install gcc"))
    findings = {(finding.area, finding.name): finding for finding in examine()}
    assert "using plain torch instead: no C compiler; install gcc" in findings["software", "native"].detail
    assert findings["attention on cpu", "native"].detail == "no C compiler; install gcc"


def test_doctor_checks_the_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def cache() -> SimpleNamespace:
        return next(finding for finding in examine() if finding.name == "cache")

    monkeypatch.setenv("YALIS_CACHE", str(tmp_path / "new" / "cache"))
    assert cache().usable
    assert "not created yet" in cache().detail
    (tmp_path / "new").write_text("a file")
    for impossible in (tmp_path / "new" / "cache", Path("/proc/new")):  # not writable, even for root
        monkeypatch.setenv("YALIS_CACHE", str(impossible))
        assert not cache().usable
        assert "set YALIS_CACHE" in cache().detail


def test_doctor_explains_the_variables_of_a_launcher(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "5")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["doctor"]) == 0
    assert "--  launcher      the environment of torchrun has rank 5 of 2" in capsys.readouterr().out


def test_models_lists_short_names_and_families(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models"]) == 0
    out = capsys.readouterr().out
    assert "smollm2-135m" in out
    assert all(architecture in out for architecture in FAMILIES)
    assert main(["models", "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {row["kind"] for row in rows} == {"model", "family"}
