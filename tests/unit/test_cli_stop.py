"""Ctrl-C on real commands: finished work is kept, one message is printed, and the exit status is 130."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.scripted_server import MODELS, Received, ScriptedServer, Step, answer, stream, token, usage
from tests.terminal import Terminal
from tests.tiny_chat import save_tiny_chat
from yalis.study import results

ENDLESS = "30000"  # tokens
NOTHING = b"stopped: nothing was written"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_chat(tmp_path_factory.mktemp("model"), max_position=32768))


def _stop(words: list[str], moment: bytes, stdout: Path) -> bytes:
    """Run a command with stdout in a file, type ^C once its progress shows `moment`; returns what it prints after."""
    with stdout.open("wb") as file:
        terminal = Terminal([sys.executable, "-m", "yalis", *words], file)
        try:
            terminal.wait_for(moment)
            terminal.type(b"\x03")
        finally:
            output = terminal.end()
    assert terminal.process.returncode == 130, output
    return output


def _messages(output: bytes) -> list[bytes]:
    """Return the messages that remain on the terminal, without the overwritten progress and the echoed ^C."""
    lines = [line.rpartition(b"\x1b[K")[2].removeprefix(b"^C").rstrip() for line in output.splitlines()]
    return [line for line in lines if line.startswith(b"yalis: ")]


def test_generate_writes_the_tokens_so_far_to_a_file(model: str, tmp_path: Path) -> None:
    words = ["generate", "abc", "--model", model, "--max-tokens", ENDLESS, "--ignore-eos", "--threads", "1"]
    output = _stop(words, b"2 tokens of at most 30000", tmp_path / "out")
    (message,) = _messages(output)
    found = re.fullmatch(rb"yalis: stopped: (\d+) tokens? of at most 30000", message)
    assert found, message
    assert 0 < int(found[1]) < 30000
    text = (tmp_path / "out").read_bytes()
    assert text.endswith(b"\n")
    assert len(text) > 1


def test_generate_ends_the_streamed_line(model: str) -> None:
    words = ["generate", "--prompt-ids", "5,6", "--model", model, "--max-tokens", ENDLESS, "--ignore-eos"]
    terminal = Terminal([sys.executable, "-m", "yalis", *words, "--threads", "1"])
    terminal.wait_for(b"*")  # which this model generates often
    terminal.type(b"\x03")
    output = terminal.end()
    assert terminal.process.returncode == 130
    assert re.search(rb"\nyalis: stopped: \d+ tokens? of at most 30000\r\n$", output)


def test_generate_json_marks_cancelled_results(model: str, tmp_path: Path) -> None:
    """The context fits three tokens after the first prompt."""
    long, max_len = ",".join(["7"] * 8189), "8192"
    words = ["generate", "--prompt-ids", long, "--prompt-ids", "5,6,7", "--max-model-len", max_len, "--json"]
    words += ["--model", model, "--max-tokens", ENDLESS, "--ignore-eos", "--threads", "1"]
    output = _stop(words, b"1/2 prompts", tmp_path / "out")
    finished, cancelled = map(json.loads, (tmp_path / "out").read_text().splitlines())
    assert (finished["finish_reason"], len(finished["token_ids"])) == ("length", 3)
    assert cancelled["finish_reason"] == "cancelled"
    tokens = 3 + len(cancelled["token_ids"])
    assert 4 <= tokens < 8192
    assert _messages(output) == [f"yalis: stopped: {tokens} tokens of at most 8192, 1 of 2 answers finished".encode()]


def test_bench_latency_keeps_finished_workloads(model: str, tmp_path: Path) -> None:
    # Progress is drawn every tenth of a second, so the first workload must take longer.
    words = ["bench", "latency", "--workload", "1x8x500", "--workload", f"2x8x{ENDLESS}", "--model", model]
    words += ["--warmup", "0", "--repeats", "2", "--threads", "1", "--out", str(tmp_path / "kept")]
    output = _stop(words, b"2x8x30000: yalis", tmp_path / "out")
    (path,) = (tmp_path / "kept").iterdir()
    wrote, stopped = _messages(output)
    assert wrote == f"yalis: wrote {path}".encode()
    assert stopped == b"yalis: stopped: 1 of 2 workloads done"
    printed = (tmp_path / "out").read_text()
    assert "1x8x500 " in printed
    assert printed.endswith("\nstopped after 1 of 2 workloads\n")
    result = results.read(path)
    assert result.parameters["workload"] == [{"batch": 1, "prompt_len": 8, "output_len": 500}]
    assert [(row["batch"], row["output_len"], row["status"]) for row in result.rows] == [(1, 500, "ok")]
    assert result.notes == ["stopped after 1 of 2 workloads"]


def test_bench_serve_keeps_finished_points(tmp_path: Path) -> None:
    def script(request: Received) -> list[Step]:
        if request.path != "/v1/completions":
            return [answer(200, MODELS)]
        count = request.body["max_tokens"]
        slow = len(server.received) > 6  # the requests of the second point
        return stream([*[token()] * count, usage(4, count)], seconds=30.0 if slow else 0.1)

    with ScriptedServer(script) as server:
        words = ["bench", "serve", "--url", server.url, "--concurrency", "1,2", "--workload", "4x4x4", "--warmup", "0"]
        output = _stop(
            [*words, "--out", str(tmp_path / "kept")], b"concurrency 2: 0 of 4 requests, 2", tmp_path / "out"
        )
    (path,) = (tmp_path / "kept").iterdir()
    assert _messages(output) == [f"yalis: wrote {path}".encode(), b"yalis: stopped: 1 of 2 points done"]
    assert "Stopped after 1 of 2 points." in (tmp_path / "out").read_text()
    assert [row["concurrency"] for row in results.read(path).rows] == [1]


@pytest.mark.parametrize(
    ("words", "moment"),
    [
        (f"bench latency --batch 1,2 --output-len {ENDLESS} --threads 1", "1x64x30000: yalis"),
        ("bench allreduce --ranks 2 --sizes 8K --repeats 1000000", "8 KB"),
        (f"profile --workload 1x8x{ENDLESS} --threads 1", "warm-up"),
        (f"bench slice --tp 2 --workload 1x8x{ENDLESS} --threads 1 --device cpu", "tp 2: loading"),
        pytest.param("bench kernels --repeats 1000", "1 row", marks=pytest.mark.full),
        pytest.param(f"bench throughput --workload 1x8x{ENDLESS} --threads 1", "yalis", marks=pytest.mark.full),
    ],
    ids=["latency", "allreduce", "profile", "slice", "kernels", "throughput"],
)
def test_an_unfinished_measurement_writes_nothing(model: str, tmp_path: Path, words: str, moment: str) -> None:
    given = words.split() + (["--model", model] if ENDLESS in words else [])
    output = _stop([*given, "--out", str(tmp_path / "a" / "b")], moment.encode(), tmp_path / "out")
    assert _messages(output) == [b"yalis: " + NOTHING]
    assert (tmp_path / "out").read_bytes() == b""
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "SIGTERM"])
def test_a_signal_during_the_import_of_torch_is_not_lost(tmp_path: Path, signum: signal.Signals) -> None:
    """C code in torch swallows the exception, as the fake module here does."""
    lines = ["import signal", "try:", f"    signal.raise_signal({int(signum)})", "except BaseException:", "    pass"]
    (tmp_path / "torch.py").write_text("\n".join([*lines, "came = True"]))
    script = """
import time
from yalis.cli.signals import sigterm_as_ctrl_c
with sigterm_as_ctrl_c():
    try:
        import torch
        time.sleep(30)
    except KeyboardInterrupt:
        print("stopped", torch.came)
"""
    found = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{Path(__file__).parents[2]}"}
    done = subprocess.run([sys.executable, "-c", script], env=found, capture_output=True, text=True, timeout=20)
    assert done.stdout == "stopped True\n", done.stderr


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "SIGTERM"])
def test_a_signal_during_the_import_of_the_command_line(signum: signal.Signals) -> None:
    script = f"""
import signal, sys
from yalis.__main__ import main
class Finder:
    def find_spec(self, name, path, target=None):
        if name == "yalis.cli.main":
            signal.raise_signal({int(signum)})
sys.meta_path.insert(0, Finder())
main()
"""
    found = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", script], env=found, capture_output=True, text=True, timeout=20)
    assert (done.returncode, done.stdout, done.stderr) == (128 + signum, "", "yalis: stopped\n")


def test_an_unfinished_report_leaves_the_old_page(tmp_path: Path) -> None:
    folder = Path(__file__).parents[2] / "benchmarks" / "results" / "cpu"
    page, aside = tmp_path / "page.html", tmp_path / "aside"
    page.write_text("an older page")
    aside.mkdir()
    command = [sys.executable, "-m", "yalis", "report", str(folder), "-o", str(page)]
    with subprocess.Popen(command, env={**os.environ, "TMPDIR": str(aside)}, stderr=subprocess.PIPE) as report:
        while report.poll() is None and not list(aside.glob("yalis-report-*/*.png")):  # the first of several
            time.sleep(0.01)
        report.send_signal(signal.SIGINT)
        assert report.stderr is not None
        assert report.stderr.read() == b"yalis: " + NOTHING + b"\n"
    assert report.returncode == 130
    assert page.read_text() == "an older page"
    assert set(tmp_path.iterdir()) == {page, aside}
    assert not list(aside.iterdir())


@pytest.mark.parametrize("sigint", ["SIG_DFL", "SIG_IGN"])  # the shell ignores Ctrl-C for jobs in the background
def test_sigusr1_stops_as_sigterm_does(sigint: str) -> None:
    script = f"""
import signal
signal.signal(signal.SIGINT, signal.{sigint})
from yalis.cli.signals import ignore_sigusr1, sigterm_as_ctrl_c, sigusr1_as_sigterm
ignore_sigusr1()
signal.raise_signal(signal.SIGUSR1)
with sigterm_as_ctrl_c(), sigusr1_as_sigterm() as came:
    try:
        signal.raise_signal(signal.SIGUSR1)
    except KeyboardInterrupt:
        print("stopped", came == [signal.SIGUSR1])
signal.raise_signal(signal.SIGUSR1)
print("ignored")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=20)
    assert (done.stdout, done.returncode) == ("stopped True\nignored\n", 0), done.stderr
