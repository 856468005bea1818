"""Whole batch jobs on a tiny model: one result per line, equal to those of an uninterrupted run."""

from __future__ import annotations

import hashlib
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
from yalis.batch.job import WINDOW, BatchJob, JobProgress
from yalis.cli.main import main
from yalis.engine.llm import LLM
from yalis.errors import YalisError, YalisFailure
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
    """Read the results by id; checks that every line is complete and every id unique."""
    rows = [json.loads(line) for line in path.read_text().split("\n")[:-1]]
    assert path.read_bytes().endswith(b"\n")
    by_id = {row["custom_id"]: row for row in rows}
    assert len(by_id) == len(rows)
    return by_id


def run(source: Path, target: Path, model: str, **defaults: Any) -> JobProgress:
    with BatchJob(source, target, model, defaults) as job:
        return job.run(lambda: LLM(model, **ENGINE))


class InterruptAfter:
    """Raises KeyboardInterrupt once `after` results are written."""

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
    body = one["response"]["body"]  # the first line of the input has the OpenAI batch format
    assert body["usage"]["completion_tokens"] == len(body["choices"][0]["token_ids"]) == requests(30)[1]["max_tokens"]
    with LLM(model, **ENGINE) as llm:  # the same request through generate()
        row = requests(30)[1]
        greedy = run(save(tmp_path / "one", [{**row, "temperature": 0}]), tmp_path / "one.out", model)
        assert greedy.done == 1
        alone = llm.generate([row["prompt"]], SamplingParams(max_tokens=row["max_tokens"], ignore_eos=True))[0]
        assert answers(tmp_path / "one.out")["q1"]["token_ids"] == alone.token_ids


def test_interrupted_and_resumed_equals_uninterrupted(tmp_path: Path, model: str) -> None:
    source = save(tmp_path / "in", requests(40))
    run(source, tmp_path / "whole", model)
    for after in (1, 13, 27):
        with BatchJob(source, tmp_path / "out", model) as job, pytest.raises(KeyboardInterrupt):
            job.run(lambda: LLM(model, **ENGINE), report=InterruptAfter(after))
        assert after <= len(answers(tmp_path / "out")) < 40
    end = run(source, tmp_path / "out", model)
    assert end.resumed > 0
    assert answers(tmp_path / "out") == answers(tmp_path / "whole")


def test_progress_counts_tokens_of_running_requests(
    tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("yalis.batch.job.UPDATE_SECONDS", 0.0)
    rows = [{"prompt": "ab", "max_tokens": length, "ignore_eos": True, "n": 2} for length in (3, 40)]
    seen: list[JobProgress] = []
    with BatchJob(save(tmp_path / "in", rows), tmp_path / "out", model) as job:
        end = job.run(lambda: LLM(model, **ENGINE), report=seen.append)
    first = next(now for now in seen if now.generated)
    assert (first.done, first.running, first.time_left) == (0, 2, None)
    assert first.tokens_per_s > 0
    assert [now.generated for now in seen] == sorted(now.generated for now in seen)
    last = [now for now in seen if now.done == 1]
    assert {now.running for now in last} == {1}
    assert all(now.time_left is not None and now.time_left.seconds > 0 and now.time_left.at_most for now in last)
    assert (end.running, end.generated, end.output_tokens) == (0, 86, 86)


def test_only_a_window_of_the_input_is_held(tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    max_unfinished = 0
    submit = LLM.submit

    def counting_submit(self: LLM, *args: Any) -> int:
        nonlocal max_unfinished
        request_id = submit(self, *args)
        max_unfinished = max(max_unfinished, self.num_unfinished)
        return request_id

    monkeypatch.setattr(LLM, "submit", counting_submit)
    rows = [{"prompt": [1, 2], "max_tokens": 2, "ignore_eos": True}] * 100
    end = run(save(tmp_path / "in", rows), tmp_path / "out", model)
    assert end.done == 100
    assert max_unfinished == WINDOW * 4


def test_a_finished_job_loads_no_model(tmp_path: Path, model: str) -> None:
    source, target = save(tmp_path / "in", requests(9)), tmp_path / "out"
    run(source, target, model)
    before = target.read_bytes()

    def never() -> LLM:
        raise AssertionError("loaded a model without need")

    with BatchJob(source, target, model) as job:
        assert job.run(never).resumed == 9
    assert target.read_bytes() == before
    with BatchJob(save(tmp_path / "bad", [{"temperature": 1}, {"prompt": 3}]), tmp_path / "bad.out", model) as job:
        assert job.run(never).errors == 2


def test_refused_before_any_work(tmp_path: Path) -> None:
    double = save(tmp_path / "in", [{"custom_id": "a", "prompt": "x"}] * 2)
    with pytest.raises(YalisError, match=r"lines 1 and 2 .* both have custom_id 'a'"):
        BatchJob(double, tmp_path / "out", "model")
    assert not (tmp_path / "out").exists()
    good = save(tmp_path / "good", [{"prompt": "x"}])
    with pytest.raises(YalisError, match="is also the input"):
        BatchJob(good, good, "model")
    os.mkfifo(tmp_path / "fifo")
    writer = threading.Thread(target=lambda: (tmp_path / "fifo").write_bytes(b""))
    writer.start()
    with pytest.raises(YalisError, match="can be read only once"):
        BatchJob(tmp_path / "fifo", tmp_path / "out", "model")
    writer.join()


def test_results_with_unknown_ids_are_kept(tmp_path: Path, model: str) -> None:
    old, bad = {"custom_id": "old", "error": None}, {"custom_id": "bad", "prompt": 3}
    target = tmp_path / "out"
    with BatchJob(save(tmp_path / "in", [bad]), target, model) as job:
        job.run(lambda: LLM(model, **ENGINE))  # an error, for which no model is loaded
    target.write_text(target.read_text() + json.dumps(old) + "\n")
    with BatchJob(save(tmp_path / "in", [bad, {"prompt": "x", "max_tokens": 1}]), target, model) as job:
        assert job.unknown_ids == ["old"]
        assert job.run(lambda: LLM(model, **ENGINE)).done == 2
    assert set(answers(target)) == {"old", "bad", "line-2"}


def test_results_of_another_input_are_refused(tmp_path: Path, model: str) -> None:
    target = save(tmp_path / "out", [{"custom_id": "old", "error": None}])
    before = target.read_bytes()
    with pytest.raises(YalisError, match="out has results of another input; give another file for the results"):
        BatchJob(save(tmp_path / "in", [{"prompt": "x"}]), target, model)
    assert target.read_bytes() == before


def test_lines_added_or_changed_during_a_job_are_left_to_the_next(tmp_path: Path, model: str) -> None:
    first, second = {"prompt": "x", "max_tokens": 1}, {"custom_id": "b", "prompt": "y", "max_tokens": 1}
    source = save(tmp_path / "in", [first, second])
    with BatchJob(source, tmp_path / "out", model) as job:
        save(source, [first, {**second, "prompt": "z"}, {"custom_id": "line-1", "prompt": "y"}, {"prompt": "z"}])
        assert job.run(lambda: LLM(model, **ENGINE)).done == 1
    assert set(answers(tmp_path / "out")) == {"line-1"}


def test_a_line_that_cannot_run_is_an_error_and_the_others_run(tmp_path: Path, model: str) -> None:
    half = "\ud800"
    odd: list[dict[str, Any]] = [
        {"prompt": f"a{half}"},
        {"messages": [{"role": "user", "content": half}]},
        {"messages": [{"role": half, "content": "x"}]},
        {"prompt": "x", "stop": [half]},
        {"prompt": "x", "temperature": 10**400},
        {"prompt": "x", "repetition_penalty": 10**400},
        {"prompt": "x", "n": 10**9},
        {"prompt": "x", "seed": 10**400},
        {"prompt": [10**400]},
        {"prompt": "x", "stop_token_ids": [10**400]},
    ]
    extreme = [{"top_k": 10**30}, {"logprobs": 10**6}, {"temperature": 1e308}, {"temperature": 1e-308}]
    extreme += [{"repetition_penalty": 1e308}, {"repetition_penalty": 1e-308}, {"max_tokens": 10**30, "stop": ["a"]}]
    fine = [{"prompt": "x", "max_tokens": 2, **fields} for fields in extreme]
    end = run(save(tmp_path / "in", [*odd, *fine]), tmp_path / "out", model)
    found = answers(tmp_path / "out")
    wrong = {name for name, row in found.items() if row["error"] is not None}
    assert (end.total, end.done, end.errors) == (len(odd) + len(fine), len(odd) + len(fine), len(odd))
    assert wrong == {f"line-{number}" for number in range(1, len(odd) + 1)}
    assert "half a character" in found["line-1"]["error"]["message"]


def test_a_result_of_another_request_is_refused(tmp_path: Path, model: str) -> None:
    rows = [{"prompt": "x", "max_tokens": 1}, {"prompt": "y", "max_tokens": 1}]
    source, target = save(tmp_path / "in", rows), tmp_path / "out"
    run(source, target, model)
    before = target.read_bytes()
    moved = save(tmp_path / "moved", [{"prompt": "new"}, *rows])  # every line-N is now another
    with pytest.raises(
        YalisError, match=r"out has a result for 'line-1' with another prompt or sampling than line 1 of"
    ):
        run(moved, target, model)
    with pytest.raises(YalisError, match=f"with another sampling than line 1 of {source}; .*, or remove {target}$"):
        run(source, target, model, temperature=1.0)
    with pytest.raises(YalisError, match="result for 'line-1' with another model/dtype than line 1"):
        BatchJob(source, target, "another model")
    assert target.read_bytes() == before
    assert run(save(tmp_path / "longer", [*rows, {"prompt": "z", "max_tokens": 1}]), target, model).resumed == 2
    assert target.read_bytes().startswith(before)


def test_error_lines_of_an_earlier_version_are_kept(tmp_path: Path, model: str) -> None:
    """Their digest was that of the message, which may have changed since."""
    source = save(tmp_path / "in", [{"prompt": "x", "max_token": 1}, {"prompt": "x", "max_tokens": 1}])
    message = "wording of an earlier version"
    digest = hashlib.sha256(json.dumps([model, message]).encode()).hexdigest()[:16]
    row = {"custom_id": "line-1", "digest": digest, "error": {"line": 1, "message": message}}
    target = save(tmp_path / "out", [row])
    assert run(source, target, model).resumed == 1
    assert answers(target)["line-1"] == row
    save(source, [{"prompt": "x"}])  # the line has been corrected
    with pytest.raises(YalisError, match="or add --retry-errors"):
        BatchJob(source, target, model)


def test_retry_errors_runs_error_lines_again(tmp_path: Path, model: str) -> None:
    rows = [{"prompt": "x", "max_tokens": 1}, {"prompt": "", "max_tokens": 1}, {"max_tokens": 1}]
    source, target = save(tmp_path / "in", rows), tmp_path / "out"
    assert run(source, target, model).errors == 2
    with target.open("a") as file:
        file.write('{"custom_id": "old", "error": {"line": 9, "message": "no"}}\n')
    first = answers(target)
    rows[2]["prompt"] = "fixed"
    save(source, rows)
    with pytest.raises(YalisError, match=r"result for 'line-3' .* or add --retry-errors"):
        run(source, target, model)
    with BatchJob(source, target, model, retry_errors=True) as job:
        assert (job.progress.done, job.progress.errors) == (1, 0)
        assert set(answers(target)) == {"line-1", "old"}  # as a crash here would leave it
        end = job.run(lambda: LLM(model, **ENGINE))
    assert (end.done, end.errors, end.resumed) == (3, 1, 1)
    found = answers(target)
    assert found["line-3"]["error"] is None
    assert {name: found[name] for name in ("line-1", "line-2", "old")} == {
        name: first[name] for name in ("line-1", "line-2", "old")
    }
    save(source, [{"prompt": "other", "max_tokens": 1}, *rows[1:]])
    before = target.read_bytes()
    with pytest.raises(YalisError, match="result for 'line-1' with another prompt"):
        BatchJob(source, target, model, retry_errors=True)
    assert target.read_bytes() == before  # refused before anything is removed


def _command(source: Path, target: Path, model: str) -> list[str]:
    flags = ["--model", model, "--max-num-seqs", "4", "--kv-blocks", "64", "--threads", "1"]
    return [sys.executable, "-m", "yalis", "batch", str(source), str(target), *flags]


def _batch(source: Path, target: Path, model: str, *flags: str) -> int:
    return main([*_command(source, target, model)[3:], *flags])


def test_exit_status_and_hint_after_errors(
    tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = save(tmp_path / "in", [{"prompt": ""}, {"prompt": 3}]), tmp_path / "out"
    capsys.readouterr()
    assert _batch(source, target, model) == 1
    hint = "holds all 2 results, 2 of them errors (after a fix, --retry-errors runs them again)"
    why = f"the first error is in line 1 of {source}: the prompt is empty; give at least one character or token id"
    assert capsys.readouterr().err == f"yalis: {target} {hint}\nyalis: {why}\n"
    assert _batch(save(source, [{"prompt": "x", "max_tokens": 1}, {"prompt": 3}]), target, model, "--retry-errors") == 0
    output = capsys.readouterr().err
    assert "holds all 2 results, 1 of them errors (after a fix, --retry-errors runs it again)" in output
    assert f"the error is in line 2 of {source}: prompt is neither" in output
    monkeypatch.chdir(Path(model).parent)  # another spelling of the same model
    assert _batch(source, target, Path(model).name) == 0
    assert "; 2 were from an earlier run" in capsys.readouterr().err
    for other in (["--load", "random"], ["--dtype", "bfloat16"]):
        assert _batch(source, target, model, *other) == 2
        assert "with another model/dtype than line 1" in capsys.readouterr().err
    empty, none = tmp_path / "empty", tmp_path / "none"
    assert _batch(save(tmp_path / "nothing", []), empty, model) == 0
    message = f"yalis: {tmp_path / 'nothing'} has 0 requests, so nothing was written to {empty}\n"
    assert (capsys.readouterr().err, empty.exists()) == (message, False)
    assert _batch(save(source, [{"prompt": "x"}]), none, str(tmp_path / "no-model")) == 2
    assert not none.exists()


def test_a_dash_for_input_or_output_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    source = save(tmp_path / "in", [{"prompt": "x"}])
    assert main(["batch", "-", "out"]) == 2
    assert "standard input can be read only once" in capsys.readouterr().err
    assert main(["batch", str(source), "-"]) == 2
    assert "a job that writes to standard output could not be resumed; give a file" in capsys.readouterr().err
    assert os.listdir() == ["in"]


def test_messages_about_a_single_result(tmp_path: Path, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    source, target = save(tmp_path / "in", [{"prompt": 3}]), tmp_path / "out"
    capsys.readouterr()
    assert _batch(source, target, model) == 1
    message = f"yalis: {target} holds the one result, an error (after a fix, --retry-errors runs it again)"
    why = f"yalis: the error is in line 1 of {source}: prompt is neither a text nor a list of token ids; "
    assert capsys.readouterr().err.startswith(f"{message}\n{why}")
    assert _batch(source, target, model) == 1
    assert capsys.readouterr().err.startswith(f"{message}; 1 was from an earlier run\n{why}")
    assert _batch(save(source, []), target, model) == 0
    assert f"{target} also holds 1 result whose id is not in the input" in capsys.readouterr().err


def test_a_failure_during_the_job_prints_how_to_resume(
    tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = save(tmp_path / "in", requests(8)), tmp_path / "out"
    poll = LLM.poll

    def fail_later(self: LLM) -> Any:
        if target.stat().st_size:
            raise YalisFailure("rank 1 died while running")
        return poll(self)

    def fail_at_once(self: LLM, **fields: Any) -> None:
        raise YalisFailure("no room")

    capsys.readouterr()
    with monkeypatch.context() as patch:
        patch.setattr(LLM, "__init__", fail_at_once)
        assert _batch(source, target, model) == 1
    assert capsys.readouterr().err == "yalis: error: no room\n"  # the same command would fail again
    with monkeypatch.context() as patch:
        patch.setattr(LLM, "poll", fail_later)
        assert _batch(source, target, model) == 1
    message = (
        f"error: rank 1 died while running; {target} holds {len(answers(target))} of 8 results; run the same command"
    )
    assert message in capsys.readouterr().err
    assert _batch(source, target, model) == 0
    assert len(answers(target)) == 8


def test_ctrl_c_while_the_input_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("yalis.batch.job.index_lines", interrupted)
    assert _batch(save(tmp_path / "in", [{"prompt": "x"}]), tmp_path / "out", "model") == 130
    assert capsys.readouterr().err == "yalis: stopped\n"


def test_ctrl_c_while_the_model_is_loaded(
    tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(self: LLM, **fields: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(LLM, "__init__", interrupted)
    source, target = save(tmp_path / "in", [{"prompt": "x"}, {"prompt": 3}]), tmp_path / "out"
    assert _batch(source, target, model) == 130
    assert capsys.readouterr().err == "yalis: stopped: nothing was written\n"
    assert not target.exists()
    save(source, [{"prompt": 3}, {"prompt": "x"}])  # the result of the invalid line is written first
    assert _batch(source, target, model) == 130
    message = f"yalis: stopped: {target} holds 1 of 2 results; run the same command again to continue\n"
    assert capsys.readouterr().err == message


def test_a_ctrl_c_between_writing_and_counting_loses_no_count(
    tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = save(tmp_path / "in", requests(8)), tmp_path / "out"

    def write_and_be_interrupted(*given: Any) -> int:
        written = pwrite(*given)
        signal.raise_signal(signal.SIGINT)
        return written

    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", write_and_be_interrupted)
    capsys.readouterr()
    assert _batch(source, target, model) == 130
    assert len(answers(target)) == 1
    assert f"stopped: {target} holds 1 of 8 results;" in capsys.readouterr().err


def _stop_when(process: subprocess.Popen[bytes], target: Path, size: int, signum: signal.Signals) -> None:
    while process.poll() is None and (target.stat().st_size if target.exists() else 0) < size:
        time.sleep(0.0005)
    process.send_signal(signum)


def test_a_job_killed_at_random_times_ends_with_the_same_results(tmp_path: Path, model: str) -> None:
    source, target, rng = save(tmp_path / "in", requests(120)), tmp_path / "out", random.Random(3)
    assert _batch(source, tmp_path / "whole", model) == 0
    uninterrupted = answers(tmp_path / "whole")
    step = (tmp_path / "whole").stat().st_size // 4
    killed, reached = 0, 0
    for _ in range(3):
        with subprocess.Popen(_command(source, target, model), stderr=subprocess.DEVNULL) as process:
            _stop_when(process, target, reached + rng.randint(1, step), signal.SIGKILL)
        killed += process.returncode == -signal.SIGKILL
        reached = target.stat().st_size
    assert killed == 3  # each was killed before it finished
    with target.open("ab") as file:
        file.write(b'{"custom_id": "q1')  # as if the last kill had left an incomplete line
    done = subprocess.run(_command(source, target, model), stderr=subprocess.PIPE, check=True)
    assert b"holds all 120 results, 2 of them errors" in done.stderr
    assert answers(target) == uninterrupted


@pytest.mark.parametrize(
    ("signum", "status", "ignored"),
    [(signal.SIGINT, 130, False), (signal.SIGTERM, 143, False), (signal.SIGTERM, 143, True)],
    ids=["Ctrl-C", "SIGTERM", "SIGTERM in the background"],
)
def test_ctrl_c_prints_how_to_resume(
    tmp_path: Path, model: str, signum: signal.Signals, status: int, ignored: bool
) -> None:
    """A shell has what it starts in the background ignore Ctrl-C."""
    source, target = save(tmp_path / "in", requests(120)), tmp_path / "out"
    command = _command(source, target, model)
    if ignored:
        command = ["sh", "-c", 'trap "" INT; exec "$@"', "sh", *command]
    with subprocess.Popen(command, stderr=subprocess.PIPE) as process:
        if ignored:
            _stop_when(process, target, 1000, signal.SIGINT)
        _stop_when(process, target, 2000, signum)
        assert process.stderr is not None
        message = process.stderr.read().decode()
    assert process.returncode == status
    held = f"{target} holds {len(answers(target))} of 120 results"
    assert message == f"yalis: stopped: {held}; run the same command again to continue\n"


@pytest.mark.parametrize("end", ["finished", "Ctrl-C", "rank died"])
def test_a_job_whose_output_is_removed_saves_its_results(
    tmp_path: Path, model: str, end: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target, rescued = save(tmp_path / "in", requests(30)), tmp_path / "out", tmp_path / "out.rescued"
    poll, removed = LLM.poll, False

    def remove_later(self: LLM) -> Any:
        nonlocal removed
        if not removed and target.stat().st_size:
            target.unlink()
            removed = True
        elif removed and end == "Ctrl-C":
            raise KeyboardInterrupt
        elif removed and end == "rank died":
            raise YalisFailure("rank 1 died")
        return poll(self)

    monkeypatch.setattr(LLM, "poll", remove_later)
    capsys.readouterr()
    assert _batch(source, target, model) == {"finished": 1, "Ctrl-C": 130, "rank died": 1}[end]
    begin = {"finished": "error: ", "Ctrl-C": "stopped: ", "rank died": "error: rank 1 died; "}[end]
    count = len(answers(rescued))
    assert count == 30 if end == "finished" else 0 < count < 30
    continued = f"run the same command with {rescued} instead of {target} to continue"
    message = f"{target} was removed or renamed while the job ran; its {count} results are saved in {rescued}: "
    assert capsys.readouterr().err.splitlines()[-1] == f"yalis: {begin}{message}{continued}"
    assert not target.exists()
    removed, end = True, "finished"
    assert _batch(source, rescued, model) == 0
    assert _batch(source, tmp_path / "whole", model) == 0
    assert answers(rescued) == answers(tmp_path / "whole")


def test_a_failure_before_the_first_result_also_tells_where_results_were_saved(
    tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = save(tmp_path / "in", [{"prompt": 3}, {"prompt": "x"}]), tmp_path / "out"

    def fail(self: LLM, **fields: Any) -> None:
        target.unlink()
        raise YalisFailure("no memory")

    monkeypatch.setattr(LLM, "__init__", fail)
    assert _batch(source, target, model) == 1
    first, last = capsys.readouterr().err.splitlines()[-2:]
    assert first.startswith(f"yalis: {target} was removed or renamed while the job ran; its 1 result is saved in")
    assert last == "yalis: error: no memory"
