"""The yalis command: exit status, one-line messages, and a fast start."""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from yalis.cli import models
from yalis.cli.main import main
from yalis.engine.interrupts import Stopped
from yalis.errors import YalisError, YalisFailure
from yalis.launch import liveness

YALIS = [sys.executable, "-m", "yalis"]


def test_starts_without_torch_in_half_a_second() -> None:
    code = "import sys, runpy; sys.argv = ['yalis', '--help']\ntry: runpy.run_module('yalis', run_name='__main__')\n"
    code += "except SystemExit: pass\n"
    code += "heavy = {'torch', 'transformers', 'numpy'} & set(sys.modules)\nassert not heavy, heavy"
    for command in (["-c", code], ["-c", "import yalis; yalis.SamplingParams"]):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, *command], check=True, stdout=subprocess.DEVNULL)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.5


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "no verb given; type `yalis --help`"),
        (["sing"], "invalid choice: 'sing'"),
        (["serve", "x"], "unknown argument 'x'; type `yalis serve --help` for the accepted arguments"),
        (["serve", "--port", "99999"], "port is 99999"),
        (["generate"], "no prompt given"),
        (["generate", "x", "--bogus"], "unknown argument '--bogus'; type `yalis generate --help`"),
        (["generate", "x", "--max-tok", "3"], "unknown argument '--max-tok' (did you mean --max-tokens?); type"),
        (["generate", "x", "--max_token=3"], "unknown argument '--max_token=3' (did you mean --max-tokens?); type"),
        (["generate", "x", "--figure", "y"], "unknown argument '--figure'; type `yalis generate --help`"),
        (["generate", "x", "--load-format", "dummy"], "unknown argument '--load-format' (give --load random for"),
        (["generate", "x", "-tp", "2"], "unknown argument '-tp' (did you mean --tp?)"),
        (["generate", "x", "--max-b"], "unknown argument '--max-b' (did you mean --max-batch-tokens?)"),
        (["bench", "latency", "--output", "y"], "unknown argument '--output' (did you mean --output-len?)"),
        (["generate", "x", "--max_tokens=0"], "max_tokens is 0"),
        (["genrate", "x"], "invalid choice: 'genrate' (did you mean generate?); type `yalis --help`"),
        (["bench", "latncy"], "invalid choice: 'latncy' (did you mean latency?); type `yalis bench --help`"),
        (["generate", "--prompt-ids", "1,a"], "--prompt-ids is '1,a'"),
        (["generate", "x", "--model", "/no/such/model"], "/no/such/model"),
        (["chat", "x", "--n", "2"], "n is 2"),
        (["batch", "/no/such.jsonl", "/no/out.jsonl"], "cannot read /no/such.jsonl"),
        (["generate", "x", "--temperature", "inf"], "temperature is inf; give a finite number of at least 0"),
        (["chat", ""], "the message is empty"),
        (["chat", " ", " "], "the message is empty"),
        (["bench"], "type `yalis bench NAME`, where NAME is latency"),
        (["bench", "latency", "--out", __file__], "test_cli_main.py, which is not a folder"),
        (["bench", "latency", "--out", f"{__file__}/x"], "x, which cannot be written to: Not a directory; give a"),
        (["bench", "latency", "--peer", "nobody"], "unknown peer 'nobody'; accepted: transformers"),
        (["bench", "latency", "--batch", "1,x"], "'1,x' is not a list of whole numbers"),
        (["bench", "latency", "--output-len", "1"], "output_len is 1"),
    ],
)
def test_invalid_input_is_one_line_and_exit_2(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("yalis: error: ")
    assert err.count("\n") == 1
    assert message in err


@pytest.mark.parametrize("words", ["generate x", "chat x", "batch {source} {target}", "bench latency", "bench kernels"])
def test_a_missing_torch_is_one_line(words: str, tmp_path: Path) -> None:
    (tmp_path / "in").write_text('{"prompt": "x"}\n')
    command = words.format(source=tmp_path / "in", target=tmp_path / "out").split()
    code = "import sys; sys.modules['torch'] = None; from yalis.cli.main import main; sys.exit(main(sys.argv[1:]))"
    done = subprocess.run([sys.executable, "-c", code, *command], capture_output=True, text=True, check=False)
    message = "torch is not installed; pip install torch (`yalis doctor` lists what else is missing)"
    assert (done.returncode, done.stdout, done.stderr) == (1, "", f"yalis: error: {message}\n")
    assert not (tmp_path / "out").exists()


def _raise(error: BaseException) -> Callable[[argparse.Namespace], int]:
    def run(args: argparse.Namespace) -> int:
        raise error

    return run


def failure_after_printed(message: str) -> YalisFailure:
    """Return a failure whose cause is "rank 1 died", which the liveness monitor has printed."""
    failure, cause = YalisFailure(message), YalisFailure("rank 1 died")
    cause.printed, failure.__cause__ = True, cause
    return failure


@pytest.mark.parametrize(
    ("error", "status", "printed"),
    [
        (YalisError("change\nthis"), 2, "yalis: error: change this\n"),
        (YalisFailure("the disk is full"), 1, "yalis: error: the disk is full\n"),
        (failure_after_printed("rank 1 died"), 1, ""),
        (failure_after_printed("rank 1 died; 5 tokens of at most 9"), 1, "yalis: 5 tokens of at most 9\n"),
        (OSError(28, "full"), 1, "yalis: error: the output could not be written: full\n"),
        (ValueError("a\nb"), 70, "yalis: internal error: ValueError: a b; run again with --debug for the traceback\n"),
        (KeyboardInterrupt(), 130, "yalis: stopped\n"),
        (Stopped("nothing was written"), 130, "yalis: stopped: nothing was written\n"),
    ],
)
def test_errors_of_a_verb(
    error: BaseException, status: int, printed: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(models, "run", _raise(error))
    monkeypatch.setattr("yalis.cli.main._drop_stdout", lambda: None)
    assert main(["models"]) == status
    assert capfd.readouterr().err == printed
    assert main(["models", "--debug"]) == status
    assert "Traceback" in capfd.readouterr().err


def test_a_failure_that_the_liveness_thread_prints_names_flags(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def run(args: argparse.Namespace) -> int:
        liveness.print_error("rank 1: out of memory; give kv_blocks=512")
        return 1

    monkeypatch.setattr(liveness, "reword", str)
    monkeypatch.setattr(models, "run", run)
    assert main(["models"]) == 1
    assert capfd.readouterr().err == "yalis: rank 1: out of memory; give --kv-blocks 512\n"


def test_a_closed_pipe_is_silent() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run([*YALIS, "models"], stdout=writing, stderr=subprocess.PIPE, check=False)
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.parametrize(
    ("closed", "argv", "status"),
    [(">&-", "models", 0), ("2>&-", "sing", 2), ("<&-", "generate --prompt-ids x -", 2), ("<&- >&- 2>&-", "models", 0)],
)
def test_closed_standard_streams(closed: str, argv: str, status: int) -> None:
    command = ["sh", "-c", f'exec "$@" {closed}', "sh", *YALIS, *argv.split()]
    done = subprocess.run(command, capture_output=True, check=False)
    assert done.returncode == status
    assert b"internal error" not in done.stderr


def test_a_full_disk_on_stdout_is_one_line() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run([*YALIS, "models"], stdout=full, stderr=subprocess.PIPE, check=False)
    assert done.returncode == 1
    assert done.stderr == b"yalis: error: the output could not be written: No space left on device\n"
