"""Whole offline jobs on a tiny model: every line once, whatever interrupts, and the same answers as undisturbed."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.tiny_chat import save_tiny_chat
from yalis.engine.llm import LLM
from yalis.engine.offline import WINDOW, JobProgress, OfflineJob
from yalis.errors import YalisError
from yalis.types import SamplingParams

ENGINE = {"max_num_seqs": 4, "kv_blocks": 64, "threads": 1}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_chat(tmp_path_factory.mktemp("model")))


def requests(count: int) -> list[dict[str, Any]]:
    rng = random.Random(1)
    rows: list[dict[str, Any]] = []
    for number in range(count):
        sampling = {"max_tokens": rng.randint(1, 40), "temperature": rng.choice([0, 1.0]), "ignore_eos": True}
        text = "".join(rng.choice("abcdef ") for _ in range(rng.randint(1, 30)))
        if number % 3 == 0:
            rows.append(
                {"custom_id": f"q{number}", "body": {"messages": [{"role": "user", "content": text}], **sampling}}
            )
        else:
            rows.append({"custom_id": f"q{number}", "prompt": text, **sampling})
    rows[5] = {"custom_id": "q5", "prompt": "", "max_tokens": 3}
    rows[7] = {"custom_id": "q7", "prompt": "x" * 1000}
    return rows


def save(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def answers(path: Path) -> dict[str, Any]:
    """By id; checks that every line is whole and every id there once."""
    rows = [json.loads(line) for line in path.read_text().split("\n")[:-1]]
    assert path.read_bytes().endswith(b"\n")
    by_id = {row["custom_id"]: row for row in rows}
    assert len(by_id) == len(rows)
    return by_id


def run(source: Path, target: Path, model: str, **defaults: Any) -> JobProgress:
    with OfflineJob(source, target, defaults) as job:
        return job.run(lambda: LLM(model, **ENGINE))


class Impatient:
    """Ctrl-C when so many results are there."""

    def __init__(self, after: int) -> None:
        self.after = after

    def __call__(self, now: JobProgress) -> None:
        if now.done >= self.after:
            raise KeyboardInterrupt


def test_every_line_gets_its_result(tmp_path: Path, model: str) -> None:
    source, target = save(tmp_path / "in", requests(30)), tmp_path / "out"
    with source.open("a") as file:
        file.write("not json\n")
    end = run(source, target, model)
    found = answers(target)
    assert (end.total, end.done, end.errors, end.resumed) == (31, 31, 3, 0)
    assert set(found) == {f"q{number}" for number in range(30)} | {"line-31"}
    assert found["q5"]["error"]["line"] == 6
    assert "empty" in found["q5"]["error"]["message"]
    assert "1000 tokens" in found["q7"]["error"]["message"]
    assert found["line-31"]["error"]["line"] == 31
    one = found["q1"]
    assert one["error"] is None
    assert one["output_tokens"] == len(one["token_ids"]) == requests(30)[1]["max_tokens"]
    with LLM(model, **ENGINE) as llm:  # the answer is the one that the library gives alone
        row = requests(30)[1]
        greedy = run(save(tmp_path / "one", [{**row, "temperature": 0}]), tmp_path / "one.out", model)
        assert greedy.done == 1
        alone = llm.generate([row["prompt"]], SamplingParams(max_tokens=row["max_tokens"], ignore_eos=True))[0]
        assert answers(tmp_path / "one.out")["q1"]["token_ids"] == alone.token_ids


def test_interrupted_and_resumed_equals_undisturbed(tmp_path: Path, model: str) -> None:
    source = save(tmp_path / "in", requests(40))
    run(source, tmp_path / "whole", model)
    for after in (1, 13, 27):
        with OfflineJob(source, tmp_path / "out") as job, pytest.raises(KeyboardInterrupt):
            job.run(lambda: LLM(model, **ENGINE), report=Impatient(after))
        assert after <= len(answers(tmp_path / "out")) < 40
    end = run(source, tmp_path / "out", model)
    assert end.resumed > 0
    assert answers(tmp_path / "out") == answers(tmp_path / "whole")


def test_only_a_window_of_the_input_is_held(tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    most = 0
    submit = LLM.submit

    def watch(self: LLM, *args: Any) -> int:
        nonlocal most
        taken = submit(self, *args)
        most = max(most, self.num_unfinished)
        return taken

    monkeypatch.setattr(LLM, "submit", watch)
    rows = [{"prompt": [1, 2], "max_tokens": 2, "ignore_eos": True}] * 100
    end = run(save(tmp_path / "in", rows), tmp_path / "out", model)
    assert end.done == 100
    assert most == WINDOW * 4


def test_nothing_left_loads_no_model(tmp_path: Path, model: str) -> None:
    source, target = save(tmp_path / "in", requests(9)), tmp_path / "out"
    run(source, target, model)
    before = target.read_bytes()

    def never() -> LLM:
        raise AssertionError("loaded a model for nothing")

    with OfflineJob(source, target) as job:
        assert job.finished
        assert job.run(never).resumed == 9
    assert target.read_bytes() == before
    with OfflineJob(save(tmp_path / "bad", [{"temperature": 1}, {"prompt": 3}]), tmp_path / "bad.out") as job:
        assert job.run(never).errors == 2


def test_refused_before_any_work(tmp_path: Path) -> None:
    double = save(tmp_path / "in", [{"custom_id": "a", "prompt": "x"}] * 2)
    with pytest.raises(YalisError, match=r"lines 1 and 2 .* both have custom_id 'a'"):
        OfflineJob(double, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    good = save(tmp_path / "good", [{"prompt": "x"}])
    with pytest.raises(YalisError, match="is also the input"):
        OfflineJob(good, good)
    os.mkfifo(tmp_path / "fifo")
    writer = threading.Thread(target=lambda: (tmp_path / "fifo").write_bytes(b""))
    writer.start()
    with pytest.raises(YalisError, match="can be read only once"):
        OfflineJob(tmp_path / "fifo", tmp_path / "out")
    writer.join()


def test_results_nobody_asked_for_stay(tmp_path: Path, model: str) -> None:
    target = save(tmp_path / "out", [{"custom_id": "old", "error": None}])
    with OfflineJob(save(tmp_path / "in", [{"prompt": "x", "max_tokens": 1}]), target) as job:
        assert job.strangers == ["old"]
        assert job.run(lambda: LLM(model, **ENGINE)).done == 1
    assert set(answers(target)) == {"old", "line-1"}


def test_lines_added_meanwhile_wait(tmp_path: Path, model: str) -> None:
    source = save(tmp_path / "in", [{"prompt": "x", "max_tokens": 1}])
    with OfflineJob(source, tmp_path / "out") as job:
        save(source, [{"prompt": "x", "max_tokens": 1}, {"custom_id": "line-1", "prompt": "y"}, {"prompt": "z"}])
        assert job.run(lambda: LLM(model, **ENGINE)).done == 1
    assert set(answers(tmp_path / "out")) == {"line-1"}


def _command(source: Path, target: Path, model: str) -> list[str]:
    flags = ["--model", model, "--max-num-seqs", "4", "--kv-blocks", "64", "--threads", "1"]
    return [sys.executable, "-m", "yalis", "batch", str(source), str(target), *flags]


def _stop_when(process: subprocess.Popen[bytes], target: Path, size: int, how: signal.Signals) -> None:
    while process.poll() is None and (target.stat().st_size if target.exists() else 0) < size:
        time.sleep(0.0005)
    process.send_signal(how)


def test_killed_at_any_moment_the_finished_file_is_the_same(tmp_path: Path, model: str) -> None:
    source, target, rng = save(tmp_path / "in", requests(120)), tmp_path / "out", random.Random(3)
    run(source, tmp_path / "whole", model)
    undisturbed = answers(tmp_path / "whole")
    step = (tmp_path / "whole").stat().st_size // 4
    killed, reached = 0, 0
    for _ in range(3):
        with subprocess.Popen(_command(source, target, model), stderr=subprocess.DEVNULL) as process:
            _stop_when(process, target, reached + rng.randint(1, step), signal.SIGKILL)
        killed += process.returncode == -signal.SIGKILL
        reached = target.stat().st_size
    assert killed == 3  # each was still at work
    with target.open("ab") as file:
        file.write(b'{"custom_id": "q1')  # as if the last kill had torn a line
    done = subprocess.run(_command(source, target, model), stderr=subprocess.PIPE, check=True)
    assert b"holds all 120 results, 2 of them errors" in done.stderr
    assert answers(target) == undisturbed


def test_ctrl_c_says_how_to_go_on(tmp_path: Path, model: str) -> None:
    source, target = save(tmp_path / "in", requests(120)), tmp_path / "out"
    with subprocess.Popen(_command(source, target, model), stderr=subprocess.PIPE) as process:
        _stop_when(process, target, 2000, signal.SIGINT)
        assert process.stderr is not None
        told = process.stderr.read().decode()
    assert process.returncode == 130
    held = f"{target} holds {len(answers(target))} of 120 results"
    assert told == f"yalis: stopped: {held}; run the same command again to continue\n"
