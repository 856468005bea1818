"""`yalis bench scaling` with real ranks: interrupted, continued, and with a setting that fails."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.system.processes import commands, environment
from yalis.cli.main import main
from yalis.study import results


def test_a_stopped_study_continues_and_a_failed_setting_does_not_end_it(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # tp10 is refused by a model of 9 heads. Settings run in this order: tp1, tp2, tp10.
    args = ["bench", "scaling", "--out", str(tmp_path / "study"), "--ranks", "1,2,10", "--schemes", "tp"]
    args += ["--allreduce", "torch", "--workload", "2x6x4", "--repeats", "2", "--threads", "1", "--device", "cpu"]
    args += ["--model", model]
    study = subprocess.Popen(
        [sys.executable, "-m", "yalis", *args], env=environment(), stderr=subprocess.PIPE, text=True
    )
    second = tmp_path / "study" / "tp2-torch" / "log.txt"
    try:
        deadline = time.monotonic() + 120
        while not second.exists():
            assert time.monotonic() < deadline
            assert study.poll() is None
            time.sleep(0.05)
        study.send_signal(signal.SIGINT)
        _, err = study.communicate(timeout=60)
    finally:
        study.kill()
        study.wait()
    assert study.returncode == 130, err
    assert err.endswith(f"stopped: {tmp_path / 'study'} has 1 of 3 settings; the same command continues\n")
    assert not [command for command in commands() if str(tmp_path / "study") in command]
    (first,) = (tmp_path / "study" / "tp1").glob("*.json")
    written = first.stat().st_mtime_ns

    assert main(args) == 1
    out, err = capsys.readouterr()
    assert "tp 10 leaves ranks without a shard" in out
    assert "no figures for 1 of 3 settings" in err
    assert first.stat().st_mtime_ns == written
    (path,) = (tmp_path / "study").glob("scaling-*.json")
    one, two, ten = results.read(path).rows
    assert (one["status"], two["status"]) == ("ok", "ok")
    assert ten["status"].startswith("tp 10 leaves ranks without a shard")
    assert two["speedup"] == pytest.approx(one["seconds"] / two["seconds"])
    assert two["same_tokens"] == 1
    second_result = results.read(tmp_path / "study" / two["file"])
    assert second_result.topology == {"ranks": 2, "ranks_per_host": [2], "launcher": ""}
    assert second_result.rows[0]["floor_s"] is None  # two ranks on one machine share its memory bandwidth
