"""Checks of --out before a benchmark runs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from yalis.cli.bench import check_folder
from yalis.cli.main import main
from yalis.errors import YalisError


@pytest.mark.parametrize(
    "args",
    [
        "bench latency --output-len 1",
        "bench latency --model /no/such/model",
        "bench throughput --requests 0",
        "bench pipeline --cuts 3",
        "bench slice --tp 2 --rank 2",
        "bench serve --url http://127.0.0.1:1 --rate 0",
        "bench allreduce --ranks 1",
        "bench kernels --rows 0",
        "profile --workload 1x1x1",
    ],
)
def test_a_refused_command_leaves_no_folder(args: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*args.split(), "--out", str(tmp_path / "deep" / "out")]) == 2
    assert "--out" not in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_created_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    check_folder(Path("."))
    check_folder(Path("to/come"))
    (tmp_path / "file").write_text("")
    (tmp_path / "nowhere").symlink_to("no-such-folder")
    for odd in ("file", "file/under", "nowhere", "nowhere/under"):
        with pytest.raises(YalisError, match=f"--out is {odd}, which"):
            check_folder(Path(odd))
    assert sorted(os.listdir()) == ["file", "nowhere"]
